"""ColQwen2.5: windows of an image tower, in checkpoints of transformers' class and of colpali-engine's."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from PIL import Image, ImageOps

import bei
from bei.artifact.manifest import Artifact
from bei.core import Float32Array, PackedBatch, rows_of_sequences
from bei.engine.packing import graph_inputs
from bei.errors import BeiError
from bei.image.source import ImageInput
from bei_build.checkpoint.image_tower import read_image_tower
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.spec.flops import visible_pairs
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import encoder_of_tower
from bei_build.weights.peft_adapter import CONFIG, WEIGHTS
from tests.support.builds import build_artifact
from tests.support.checkpoints import read_tensors, write_json, write_tensors
from tests.support.colqwen2 import STEP, as_colpali_engine, library_processor, library_rows, save_colqwen2
from tests.support.cpus import needs_bf16
from tests.support.reading import read
from tests.support.two_towers import drawn_files, png

FILES = [*drawn_files(), png(1, 1), png(3, 600), png(900, 5), png(2000, 1400)]
TEXTS = ["hello world", "!", "what is in the picture? " * 3, " two  spaces ", "tokens <|im_end|> and \n lines", "né"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_colqwen2(tmp_path_factory.mktemp("colqwen2_5") / "colqwen2_5", second=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Float32Array]:
    return library_rows(checkpoint, FILES, TEXTS)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "colqwen2_5")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[bei.Model]:
    with bei.Model(artifact.path, tune="off") as opened:
        yield opened


def assert_close(found: list[Float32Array], expected: list[Float32Array], most: float = 2e-4) -> None:
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=most)


def test_images_of_many_sizes_and_queries_have_the_librarys_vectors(
    model: bei.Model, expected: list[Float32Array]
) -> None:
    assert len({len(rows) for rows in expected}) > 8
    assert_close(
        model.embed_all([*FILES[:9], *TEXTS, *FILES[9:]]),
        [*expected[:9], *expected[len(FILES) :], *expected[9 : len(FILES)]],
    )


@pytest.mark.slow
@needs_bf16
def test_in_bf16_they_are_near(checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "bf16", precision="bf16")
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed_all([*FILES, *TEXTS])
    assert min((mine * theirs).sum(1).min() for mine, theirs in zip(found, expected, strict=True)) > 0.999


def test_the_certificate_compares_images_with_the_librarys_class(artifact: Artifact) -> None:
    images = artifact.certificate.images
    assert images
    assert images.reference.startswith("transformers, FP32")
    assert images.output is not None
    assert images.output.output == "token_embedding"


@pytest.mark.parametrize(
    "settings", [{"window_size": 64}, {"fullatt_block_indexes": [0, 1, 2, 3]}], ids=["size", "layers"]
)
def test_windows_matter(
    settings: dict[str, Any], checkpoint: Path, expected: list[Float32Array], tmp_path: Path
) -> None:
    """Else the vectors would not show which patches attend to each other."""
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    raw = json.loads((folder / "config.json").read_text())
    raw["vlm_config"]["vision_config"].update(settings)
    (folder / "config.json").write_text(json.dumps(raw))
    assert (
        max(
            np.abs(mine - theirs).max()
            for mine, theirs in zip(library_rows(folder, FILES[:6], []), expected, strict=False)
        )
        > 1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "vision",
    [
        {"window_size": 3 * STEP},
        {"window_size": 2 * STEP + 9},
        {"window_size": STEP},
        {"window_size": 112},
        {"fullatt_block_indexes": []},
        {"fullatt_block_indexes": [0]},
        {"hidden_act": "gelu"},
        {"intermediate_size": 20},
        {"num_heads": 2},
        {"patch_size": 6},
    ],
    ids=str,
)
def test_settings_of_the_image_tower_are_honoured(vision: dict[str, Any], tmp_path: Path) -> None:
    folder = save_colqwen2(tmp_path / "colqwen2_5", vision=vision, second=True)
    artifact = build_artifact(folder, tmp_path / "out", verify=False)
    files = [FILES[0], FILES[1], png(1, 1), png(170, 333)]
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all([*files, TEXTS[0]]), library_rows(folder, files, TEXTS[:1]))


@pytest.mark.parametrize("core", [AttentionCore.MATMUL_SOFTMAX, AttentionCore.TRT_ATTENTION])
def test_both_graphs_of_the_tower_give_the_librarys_states_outside_of_openvino(
    core: AttentionCore, checkpoint: Path, tmp_path: Path
) -> None:
    """Images of many sizes in one step: ONNX Runtime, and PyTorch's module."""
    images = read_image_tower(read(checkpoint))
    assert images is not None
    pictures = [
        own for one in encoder_of_tower(images).encode([ImageInput(one) for one in FILES[:8]]) for own in one.of_tower
    ]
    batch = PackedBatch.from_encodings(pictures)
    spec = images.checkpoint.spec
    with images.checkpoint.weights() as weights:
        module = packed_model(spec, weights.read, images.checkpoint.max_seq_len)
        types = GraphTypes(DType.FP32, DType.FP32)
        path = write_graph(spec, weights.read, tmp_path, types, core, images.checkpoint.max_seq_len)
    session = onnxruntime.InferenceSession(path)
    (of_graph,) = session.run(["image_features"], graph_inputs(batch, [one.name for one in session.get_inputs()]))
    model_class: Any = transformers.ColQwen2ForRetrieval
    tower = model_class.from_pretrained(checkpoint).eval().vlm.visual
    for rows in (of_graph[: batch.num_tokens], run(module, batch)["image_features"]):
        found = rows_of_sequences(rows, batch, per_token=True)
        for content, one in zip(FILES[:8], found, strict=True):
            np.testing.assert_allclose(one.reshape(len(one) // 4, -1), _states(tower, checkpoint, content), atol=2e-4)


def _states(tower: Any, folder: Path, content: bytes) -> Float32Array:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    made = library_processor(folder).image_processor(images=image, return_tensors="pt")
    with torch.inference_mode():
        states: Float32Array = tower(made["pixel_values"], grid_thw=made["image_grid_thw"]).pooler_output.numpy()
    return states


def test_only_pairs_within_windows_count_as_work(checkpoint: Path) -> None:
    images = read_image_tower(read(checkpoint))
    assert images is not None
    windowed, whole = images.checkpoint.spec.attentions[:2]
    assert visible_pairs(whole, 40) == 1600
    assert visible_pairs(windowed, 40) == 2 * 16**2 + 8**2


# Checkpoints as colpali-engine saves them.


def own_rows(folder: Path, files: list[bytes], texts: list[str]) -> list[Float32Array]:
    """Vectors of transformers' class of ``folder``, texts as colpali-engine's processor writes them."""
    model_class: Any = transformers.ColQwen2ForRetrieval
    model, processor = model_class.from_pretrained(folder).eval(), library_processor(folder)
    rows = library_rows(folder, files, [])
    for text in texts:
        made = processor.tokenizer(f"Query: {text}{'<|endoftext|>' * 10}", return_tensors="pt")
        with torch.inference_mode():
            rows.append(model(**made).embeddings[0].numpy())
    return rows


@pytest.mark.parametrize("within", ["", "model."])
@pytest.mark.parametrize("second", [True, False], ids=["2.5", "2"])
def test_checkpoints_of_colpali_engine_are_read(second: bool, within: str, tmp_path: Path) -> None:
    folder = save_colqwen2(tmp_path / "native", second=second, width=128)
    files = [*FILES[:4], png(1, 1), png(170, 333)]
    expected = own_rows(folder, files, TEXTS)
    artifact = build_artifact(as_colpali_engine(folder, within), tmp_path / "out")
    assert artifact.manifest.spec.architecture == ("ColQwen2_5" if second else "ColQwen2")
    assert artifact.certificate.images
    assert artifact.certificate.images.reference.startswith("transformers, FP32")
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all([*files, *TEXTS]), expected)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "config.json",
            {"vision_config": {"model_type": "qwen2_5_vl", "window_size": 8, "patch_size": 8}},
            "window_size = 8",
        ),
        (
            "config.json",
            {"vision_config": {"model_type": "qwen2_5_vl", "fullatt_block_indexes": [99]}},
            "indexes = \\[99\\]",
        ),
        ("config.json", {"vision_config": {"model_type": "qwen2_vl"}}, "model_type = 'qwen2_vl'"),
        ("config.json", {"model_type": "qwen2_vl", "architectures": ["Qwen2_5_VLModel"]}, "of this type bei builds"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize"),
        ("processor_config.json", {"query_prefix": "Find: "}, "query_prefix"),
        ("processor_config.json", {"processor_class": "ColPaliProcessor"}, "processor_class"),
    ],
)
def test_other_files_are_refused_by_name(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = as_colpali_engine(save_colqwen2(tmp_path / "native", second=True, width=128))
    if not (folder / name).is_file():
        (folder / name).write_text("{}")
    raw = json.loads((folder / name).read_text())
    for key, value in settings.items():
        raw[key] = {**raw[key], **value} if isinstance(raw.get(key), dict) else value
    (folder / name).write_text(json.dumps(raw))
    with pytest.raises(BeiError, match=message):
        build_artifact(folder, tmp_path / "out")


def test_tensors_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    folder = as_colpali_engine(save_colqwen2(tmp_path / "native", second=True, width=128))
    write_tensors(folder, {**read_tensors(folder), "visual.blocks.0.other": torch.zeros(3)})
    with pytest.raises(BeiError, match=r"visual\.blocks\.0\.other"):
        build_artifact(folder, tmp_path / "out")


def test_an_adapter_alone_is_merged_and_its_processor_is_read(tmp_path: Path) -> None:
    """As vidore publishes them: factors of decoder and projection, and the processor's files, beside no weights."""
    base = save_colqwen2(tmp_path / "native", second=True, width=128)
    native = shutil.copytree(base, tmp_path / "merged")
    as_colpali_engine(base)
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 4, "bias": "none"}
    write_json(folder / CONFIG, config)
    random, merged = torch.Generator().manual_seed(1), read_tensors(native)
    factors: dict[str, torch.Tensor] = {}
    own = {
        "model.layers.0.self_attn.q_proj": "vlm.language_model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj": "vlm.language_model.layers.1.mlp.down_proj",
        "visual.blocks.2.attn.qkv": "vlm.visual.blocks.2.attn.qkv",
        "custom_text_proj": "embedding_proj_layer",
    }
    for module, name in own.items():
        rows, columns = merged[f"{name}.weight"].shape
        a, b = (torch.randn(shape, generator=random) / 4 for shape in ((2, columns), (rows, 2)))
        factors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + 2 * b @ a
    write_tensors(folder, factors, WEIGHTS)
    write_tensors(native, merged)
    fewer = {"max_pixels": 12 * STEP**2}
    settings = json.loads((base / "preprocessor_config.json").read_text())
    write_json(folder / "preprocessor_config.json", {**settings, **fewer})
    whole = json.loads((native / "processor_config.json").read_text())
    write_json(native / "processor_config.json", {**whole, "image_processor": {**whole["image_processor"], **fewer}})
    artifact = build_artifact(folder, tmp_path / "out")
    assert artifact.certificate.images
    assert artifact.certificate.images.reference.startswith("transformers, FP32")
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed_all([*FILES[:3], *TEXTS[:2]]), own_rows(native, FILES[:3], TEXTS[:2]))
