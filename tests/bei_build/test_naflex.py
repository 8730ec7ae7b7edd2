"""SigLIP 2's NaFlex: images of many proportions in one step, without padding, as transformers computes each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import psutil
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

import bei
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.load import load_engine
from bei.engine.packing import graph_inputs
from bei.errors import CheckpointError
from bei.image.encoder import whole_patches
from bei.image.source import ImageInput
from bei_build.checkpoint.image_tower import ImageCheckpoint, read_image_tower, read_images_alone
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import encoder_of_tower
from tests.bei.image.test_decode import HOSTILE
from tests.support.builds import build_artifact, open_engine
from tests.support.cpus import needs_bf16
from tests.support.served import Served
from tests.support.two_towers import (
    NAFLEX_PROCESSOR,
    PATCH,
    TEXTS,
    data_url,
    drawn_files,
    library_vectors,
    model_inputs,
    png,
    save_naflex,
    write_processor,
)

FILES = [*drawn_files(), png(1, 1), png(3000, 2), png(5, 700)]
MOST = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_naflex(tmp_path_factory.mktemp("naflex") / "siglip2")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Float32Array:
    """Of FILES, then of TEXTS."""
    return library_vectors(checkpoint, transformers.Siglip2Model, FILES, TEXTS)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "siglip2")


@pytest.fixture(scope="module")
def images(checkpoint: Path) -> ImageCheckpoint:
    found = read_image_tower(read_checkpoint(locate(str(checkpoint))))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def encodings(images: ImageCheckpoint) -> list[Encoding]:
    return encoder_of_tower(images).encode([ImageInput(content) for content in FILES])


def unit(rows: Float32Array) -> Float32Array:
    found: Float32Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def grid_of(encoding: Encoding) -> tuple[int, int]:
    assert encoding.image is not None
    return encoding.image.grid


def test_patches_are_those_of_the_image_processor(
    checkpoint: Path, images: ImageCheckpoint, encodings: list[Encoding]
) -> None:
    scales, shifts = (np.tile(np.array(of), PATCH**2) for of in (images.processor.scales, images.processor.shifts))
    for content, encoding in zip(FILES, encodings, strict=True):
        read = model_inputs(checkpoint, content)
        assert grid_of(encoding) == tuple(read["spatial_shapes"][0].tolist())
        assert encoding.image is not None
        wanted = read["pixel_values"][0].numpy()[: encoding.num_tokens]
        np.testing.assert_allclose(encoding.image.levels * scales + shifts, wanted, atol=1e-5)
    assert len({grid_of(encoding) for encoding in encodings}) > 6


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=[pytest.mark.slow, needs_bf16])])
def test_images_of_many_proportions_in_one_step_have_the_librarys_vectors(
    precision: str, checkpoint: Path, encodings: list[Encoding], expected: Float32Array, tmp_path: Path
) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "out", precision=precision)
    assert artifact.certificate.images
    assert artifact.certificate.images.kind == "reference"
    alone = artifact.of_second
    engine = open_engine(alone.engine_dir, alone.manifest)
    try:
        found = unit(engine.run(PackedBatch.from_encodings(encodings))["embedding"])
    finally:
        engine.close()
    if precision == "fp32":
        np.testing.assert_allclose(found, expected[: len(FILES)], atol=2e-4)
    assert (found * expected[: len(FILES)]).sum(axis=1).min() > 0.999


def test_the_module_gives_the_librarys_vectors(
    images: ImageCheckpoint, encodings: list[Encoding], expected: Float32Array
) -> None:
    with images.checkpoint.weights() as weights:
        model = packed_model(images.checkpoint.spec, weights.read, images.checkpoint.max_seq_len)
    found = run(model, PackedBatch.from_encodings(encodings))["embedding"]
    np.testing.assert_allclose(unit(found), expected[: len(FILES)], atol=2e-4)


def test_the_graph_gives_the_librarys_vectors_in_onnx_runtime(
    images: ImageCheckpoint, encodings: list[Encoding], expected: Float32Array, tmp_path: Path
) -> None:
    types = GraphTypes(DType.FP32, DType.FP32)
    with images.checkpoint.weights() as weights:
        core, longest = AttentionCore.TRT_ATTENTION, images.checkpoint.max_seq_len
        path = write_graph(images.checkpoint.spec, weights.read, tmp_path, types, core, longest)
    session, batch = onnxruntime.InferenceSession(path), PackedBatch.from_encodings(encodings)
    (found,) = session.run(["embedding"], graph_inputs(batch, [one.name for one in session.get_inputs()]))
    np.testing.assert_allclose(unit(found[: batch.batch_size]), expected[: len(FILES)], atol=2e-4)


@pytest.mark.slow
def test_a_package_for_pytorch_gives_the_librarys_vectors(
    checkpoint: Path, encodings: list[Encoding], expected: Float32Array, tmp_path: Path
) -> None:
    alone = build_artifact(checkpoint, tmp_path / "out", load_engine, target="cuda-twin").of_second
    engine = load_engine(alone.engine_dir, alone.manifest)
    try:
        found = unit(engine.run(PackedBatch.from_encodings(encodings))["embedding"])
    finally:
        engine.close()
    np.testing.assert_allclose(found, expected[: len(FILES)], atol=2e-4)


@pytest.mark.slow
def test_the_vision_class_alone_is_built(checkpoint: Path, expected: Float32Array, tmp_path: Path) -> None:
    model: Any = transformers.Siglip2Model.from_pretrained(checkpoint)
    model.vision_model.save_pretrained(tmp_path / "vision")
    write_processor(tmp_path / "vision", NAFLEX_PROCESSOR)
    artifact = build_artifact(tmp_path / "vision", tmp_path / "out")
    assert artifact.manifest.modalities == ["image"]
    read = encoder_of_tower(read_images_alone(locate(str(tmp_path / "vision"))))
    engine = open_engine(artifact.engine_dir, artifact.manifest)
    try:
        batch = PackedBatch.from_encodings(read.encode([ImageInput(content) for content in FILES]))
        np.testing.assert_allclose(unit(engine.run(batch)["embedding"]), expected[: len(FILES)], atol=2e-4)
    finally:
        engine.close()


def test_a_server_reads_texts_and_images_of_many_sizes_and_counts_their_pixels(
    artifact: Artifact, expected: Float32Array, encodings: list[Encoding]
) -> None:
    app = Served(artifact)
    try:
        parts = [{"image": data_url(content)} for content in FILES]
        answer = app.post("/v1/embeddings", {"input": [*parts, *TEXTS]})
        found = np.array([item["embedding"] for item in answer.json()["data"]], np.float32)
        np.testing.assert_allclose(found, expected, atol=2e-4)
        assert app.get("/health").status_code == 200
        assert app.get("/info").json()["images"]["tokens"] == MOST
        inputs = [{"content": [{"type": "image_base64", "image_base64": part["image"]}]} for part in parts]
        usage = app.post("/voyage/v1/multimodalembeddings", {"inputs": inputs, "model": "siglip2"}).json()["usage"]
        assert usage["image_pixels"] == sum(one.num_tokens for one in encodings) * PATCH**2
    finally:
        app.close()


@given(
    height=st.integers(1, 20_000),
    width=st.integers(1, 20_000),
    patch=st.sampled_from((4, 14, 16)),
    most=st.integers(1, 1024),
)
@settings(max_examples=200, deadline=None)
def test_sizes_are_the_librarys(height: int, width: int, patch: int, most: int) -> None:
    found = whole_patches(height, width, patch, most)
    assert found == get_image_size_for_max_num_patches(height, width, patch, most)


def test_the_same_patches_in_rows_of_another_length_are_another_image(images: ImageCheckpoint) -> None:
    encoder = encoder_of_tower(images)
    levels = np.zeros((2 * PATCH, 8 * PATCH, 3), np.uint8)
    wide, tall = encoder.encoding_of(levels), encoder.encoding_of(levels.transpose(1, 0, 2))
    assert wide.image is not None
    assert tall.image is not None
    np.testing.assert_array_equal(wide.image.levels, tall.image.levels)
    assert wide.image.digest != tall.image.digest


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000), (2500, 2500), (1, 1)])
def test_an_image_of_any_proportions_has_at_most_the_models_patches(
    size: tuple[int, int], images: ImageCheckpoint
) -> None:
    (encoding,) = encoder_of_tower(images).encode([ImageInput(Image.new("RGB", size))])
    assert 1 <= encoding.num_tokens <= MOST


def test_hostile_files_are_errors_of_their_own_beside_images_of_all_sizes(
    artifact: Artifact, expected: Float32Array
) -> None:
    hostile = [content for content, _ in HOSTILE.values()]
    with bei.Model(artifact.path, tune="off") as model:
        report = bei.Report()
        found = model.embed([*hostile, *FILES], report=report)
        assert set(report.errors) <= set(range(len(hostile)))
        assert len(report.errors) > len(hostile) // 2  # two are above limits that this model does not have
        np.testing.assert_allclose(found[len(hostile) :], expected[: len(FILES)], atol=2e-4)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images_of_many_sizes(artifact: Artifact) -> None:
    def run(first: int) -> None:
        for seed in range(first, first + 20):
            sizes = np.random.default_rng(seed).integers(1, 900, (20, 2))
            model.embed([png(int(width), int(height), (seed, 7, 9)) for width, height in sizes])

    with bei.Model(artifact.path, tune="off") as model:
        run(0)
        before = psutil.Process().memory_info().rss
        run(20)
        assert psutil.Process().memory_info().rss - before < 60_000_000


@pytest.mark.parametrize("most", [0, 1 << 20, 7])
def test_a_manifest_whose_patches_are_not_its_tokens_is_refused(most: int, artifact: Artifact) -> None:
    assert manifest_fault(artifact.manifest) is None
    tower = artifact.manifest.image_tower
    assert tower is not None
    processor = msgspec.structs.replace(tower.processor, max_num_patches=most)
    changed = msgspec.structs.replace(artifact.manifest, images=msgspec.structs.replace(tower, processor=processor))
    assert manifest_fault(changed) is not None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"patch_size": 8}, "patch_size"),
        ({"do_resize": False}, "do_resize"),
        ({"max_num_patches": 0}, "max_num_patches"),
        ({"max_num_patches": "many"}, "max_num_patches"),
        ({"max_num_patches": 1 << 20}, "max_num_patches"),
        ({"image_processor_type": "SiglipImageProcessor"}, "max_num_patches"),
        ({"do_center_crop": True, "crop_size": 32}, "crop"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    folder = save_naflex(tmp_path / "siglip2", **changed)
    with pytest.raises(CheckpointError, match=named):
        read_image_tower(read_checkpoint(locate(str(folder))))
