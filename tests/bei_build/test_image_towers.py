"""Image towers: the same vectors as transformers' classes, on every target; and what a build refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import onnxruntime
import pytest
import transformers

from bei.artifact.manifest import Artifact
from bei.artifact.store import load
from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.load import load_engine
from bei.engine.packing import graph_inputs
from bei.errors import ArtifactManifestError, CheckpointError, ConfigError
from bei.image.source import ImageInput
from bei.verification.verify import verify
from bei_build.checkpoint.image_tower import ImageCheckpoint, read_image_tower
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.config import BuildConfig
from bei_build.job import OpenEngine
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import check_buildable, encoder_of_tower
from tests.support.builds import build_artifact, open_engine
from tests.support.cpus import needs_bf16
from tests.support.two_towers import (
    CLIP_PROCESSOR,
    TEXTS,
    drawn_files,
    library_vectors,
    save_clip,
    save_siglip,
    write_processor,
)

Save = Callable[..., Path]
FAMILIES: dict[str, tuple[Save, Any]] = {
    "CLIP": (save_clip, transformers.CLIPModel),
    "SigLIP": (save_siglip, transformers.SiglipModel),
}
FILES = drawn_files()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and its class."""
    save, model_class = FAMILIES[request.param]
    return save(tmp_path_factory.mktemp("towers") / request.param), model_class


@pytest.fixture(scope="module")
def expected(family: tuple[Path, Any]) -> Float32Array:
    return library_vectors(*family, FILES, [])


def tower_of(folder: Path) -> ImageCheckpoint:
    images = read_image_tower(read_checkpoint(locate(str(folder))))
    assert images is not None
    return images


def encodings_of(images: ImageCheckpoint) -> list[Encoding]:
    return encoder_of_tower(images).encode([ImageInput(content) for content in FILES])


def unit(rows: Float32Array) -> Float32Array:
    found: Float32Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def vectors(artifact: Artifact, encodings: list[Encoding], opened: OpenEngine = open_engine) -> Float32Array:
    """Of the image engine of ``artifact``, several images a step."""
    alone = artifact.of_second
    engine = opened(alone.engine_dir, alone.manifest)
    try:
        parts = [encodings[start : start + 7] for start in range(0, len(encodings), 7)]
        return unit(np.concatenate([engine.run(PackedBatch.from_encodings(part))["embedding"] for part in parts]))
    finally:
        engine.close()


@pytest.mark.parametrize(("precision", "most"), [("fp32", 2e-4), pytest.param("bf16", None, marks=needs_bf16)])
def test_artifacts_give_the_librarys_vectors(
    precision: str, most: float | None, family: tuple[Path, Any], expected: Float32Array, tmp_path: Path
) -> None:
    artifact = build_artifact(family[0], tmp_path / "out", precision=precision, all_texts=True)
    agreement = artifact.certificate.images
    assert agreement
    assert agreement.kind == "reference"
    assert agreement.num_images == len(FILES)
    found = vectors(artifact, encodings_of(tower_of(family[0])))
    if most is not None:
        np.testing.assert_allclose(found, expected, atol=most)
    assert (found * expected).sum(axis=1).min() > 0.999


def test_the_module_gives_the_librarys_vectors(family: tuple[Path, Any], expected: Float32Array) -> None:
    images = tower_of(family[0])
    with images.checkpoint.weights() as weights:
        model = packed_model(images.checkpoint.spec, weights.read, images.checkpoint.max_seq_len)
    found = run(model, PackedBatch.from_encodings(encodings_of(images)))["embedding"]
    np.testing.assert_allclose(unit(found), expected, atol=2e-4)


@pytest.mark.parametrize("core", [AttentionCore.MATMUL_SOFTMAX, AttentionCore.TRT_ATTENTION])
def test_the_graph_gives_the_librarys_vectors_in_onnx_runtime(
    core: AttentionCore, family: tuple[Path, Any], expected: Float32Array, tmp_path: Path
) -> None:
    images = tower_of(family[0])
    with images.checkpoint.weights() as weights:
        types = GraphTypes(DType.FP32, DType.FP32)
        path = write_graph(images.checkpoint.spec, weights.read, tmp_path, types, core, images.checkpoint.max_seq_len)
    session = onnxruntime.InferenceSession(path)
    batch = PackedBatch.from_encodings(encodings_of(images))
    inputs = graph_inputs(batch, [one.name for one in session.get_inputs()])
    (found,) = session.run(["embedding"], inputs)
    np.testing.assert_allclose(unit(found[: batch.batch_size]), expected, atol=2e-4)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip") / "clip")


@pytest.mark.parametrize(
    "vision",
    [{"image_size": 64, "hidden_act": "gelu"}, {"patch_size": 8, "num_attention_heads": 2}, {"patch_size": 48}],
)
def test_other_sizes_of_clip(vision: dict[str, Any], tmp_path: Path) -> None:
    folder = save_clip(tmp_path / "clip", **vision)
    if side := vision.get("image_size"):
        write_processor(
            folder, {**CLIP_PROCESSOR, "size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        )
    images = tower_of(folder)
    with images.checkpoint.weights() as weights:
        model = packed_model(images.checkpoint.spec, weights.read, images.checkpoint.max_seq_len)
    found = run(model, PackedBatch.from_encodings(encodings_of(images)))["embedding"]
    np.testing.assert_allclose(unit(found), library_vectors(folder, transformers.CLIPModel, FILES, []), atol=2e-4)


def test_a_model_whose_processor_makes_other_images_is_refused(clip: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(clip, tmp_path / "clip")
    write_processor(folder, {**CLIP_PROCESSOR, "crop_size": {"height": 32, "width": 32}})
    with pytest.raises(CheckpointError, match="image_size = 48"):
        build_artifact(folder, tmp_path / "out", verify=False)


def test_without_a_processor_or_with_no_images_texts_alone_are_built(clip: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(clip, tmp_path / "clip")
    (folder / "preprocessor_config.json").unlink()
    for one, images in ((folder, True), (clip, False)):
        artifact = build_artifact(one, tmp_path / "out", verify=False, images=images)
        assert artifact.manifest.image_tower is None
        assert not (artifact.path / "image_engine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packages_for_pytorch_give_the_librarys_vectors(
    precision: str, family: tuple[Path, Any], expected: Float32Array, tmp_path: Path
) -> None:
    artifact = build_artifact(family[0], tmp_path / "out", load_engine, target="cuda-twin", precision=precision)
    found = vectors(artifact, encodings_of(tower_of(family[0])), load_engine)
    if precision == "fp32":
        np.testing.assert_allclose(found, expected, atol=2e-4)
    assert (found * expected).sum(axis=1).min() > 0.999


def test_other_targets_are_refused_by_name() -> None:
    for has_texts, way in ((True, "use --target cpu, or the text tower alone"), (False, r"use --target cpu\.$")):
        with pytest.raises(ConfigError, match=f"not for trtllm: {way}"):
            check_buildable(BuildConfig(model="clip", target="trtllm"), "bf16", mock.Mock(), has_texts=has_texts)


def test_a_lent_plan_is_refused_for_two_towers() -> None:
    config = BuildConfig(model="clip", target="tensorrt", strip_weights=True, plan_of="other")
    able = mock.Mock(cannot_run=lambda: None)
    with pytest.raises(ConfigError, match="plan_of lends one plan, and two towers have two"):
        check_buildable(config, "bf16", able, has_texts=True)
    check_buildable(config, "bf16", able, has_texts=False)


def test_limits_of_steps_are_of_both_engines(clip: Path, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_num_tokens": 120, "max_batch_size": 7}
    manifest = build_artifact(clip, tmp_path / "out", verify=False, **limits).manifest
    for side in (manifest, manifest.image_tower):
        assert {name: getattr(side, name) for name in limits} == limits


def test_a_quantized_precision_is_refused_and_names_the_way(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--no-images"):
        build_artifact(clip, tmp_path / "out", precision="int8", verify=False)


def test_images_are_verified_by_bei_itself_where_torch_is_missing(clip: Path, tmp_path: Path) -> None:
    artifact = build_artifact(clip, tmp_path / "out", reference="engine")
    assert artifact.certificate.images
    assert artifact.certificate.images.kind == "self-consistency"


def test_a_damaged_image_engine_is_not_served(clip: Path, tmp_path: Path) -> None:
    artifact = build_artifact(clip, tmp_path / "out", verify=False)
    manifest = msgspec.json.decode((artifact.path / "manifest.json").read_bytes())
    manifest["images"]["patch_size"] = 7
    with mock.patch("bei.artifact.store._digest", return_value=manifest["digest"]):
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
        (artifact.path / "manifest.json").write_bytes(content)
        with pytest.raises(ArtifactManifestError, match="patches of 7 pixels"):
            load(artifact.path)


def test_texts_that_are_verified_anew_leave_what_is_known_of_images(clip: Path, tmp_path: Path) -> None:
    built = build_artifact(clip, tmp_path / "out", keep_reference=True)
    verified, is_good = verify(built.path)
    assert is_good
    assert load(built.path).certificate == verified.certificate
    assert verified.certificate.images == built.certificate.images
    assert verified.certificate.verdict == built.certificate.verdict


def test_texts_are_as_before(clip: Path, tmp_path: Path) -> None:
    with_images = build_artifact(clip, tmp_path / "with", verify=False)
    without = build_artifact(clip, tmp_path / "without", verify=False, images=False)
    assert with_images.manifest.spec == without.manifest.spec
    assert (with_images.engine_dir / "model.bin").read_bytes() == (without.engine_dir / "model.bin").read_bytes()
    assert TEXTS
