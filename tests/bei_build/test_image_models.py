"""Models that read images alone: the vectors of transformers' classes, and what their builds refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from bei.artifact.certificate_faults import certificate_fault
from bei.artifact.manifest import Artifact
from bei.core import Encoding, Float32Array, PackedBatch
from bei.errors import CheckpointError, ConfigError, WeightsError
from bei.image.source import ImageInput
from bei.verification.verify import verify
from bei_build.checkpoint.image_tower import ImageCheckpoint, read_images_alone
from bei_build.checkpoint.locate import locate
from bei_build.spec.position_tables import resized_grid
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import encoder_of_tower
from tests.support.builds import build_artifact, running
from tests.support.checkpoints import add_modules
from tests.support.cpus import needs_bf16
from tests.support.reading import saved
from tests.support.two_towers import (
    VIT_PROCESSOR,
    drawn_files,
    library_vectors,
    pixel_values,
    save_clip,
    save_tower,
    tower_vectors,
    write_processor,
)

# Class, the output that has its vectors, and settings of its config.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "CLIP": ("CLIPVisionModelWithProjection", "image_embeds", {}),
    "CLIP without projection": ("CLIPVisionModel", "pooler_output", {}),
    "SigLIP": ("SiglipVisionModel", "pooler_output", {}),
    "ViT": ("ViTModel", "last_hidden_state", {"qkv_bias": False}),
    "DINOv2": ("Dinov2Model", "pooler_output", {"image_size": 80, "layerscale_value": 0.7, "mlp_ratio": 2}),
    "DINOv2 with SwiGLU": ("Dinov2Model", "pooler_output", {"use_swiglu_ffn": True, "patch_size": 8}),
    "DINOv2 with registers": (
        "Dinov2WithRegistersModel",
        "pooler_output",
        {"image_size": 80, "size": (48, 32), "layerscale_value": 0.7, "num_register_tokens": 3},
    ),
    "DINOv2 with registers and SwiGLU": (
        "Dinov2WithRegistersModel",
        "pooler_output",
        {"image_size": 32, "use_swiglu_ffn": True},
    ),
    "DINOv3": (
        "DINOv3ViTModel",
        "pooler_output",
        {"image_size": 80, "size": (48, 64), "layerscale_value": 0.7, "num_register_tokens": 4},
    ),
    "DINOv3 with gates": (
        "DINOv3ViTModel",
        "pooler_output",
        {
            **{"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 1, "rope_theta": 50.0},
            **{"query_bias": False, "value_bias": False, "proj_bias": False, "mlp_bias": False},
        },
    ),
}
FILES = drawn_files()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_tower(folder / kind, name, **settings) for kind, (name, _, settings) in MODELS.items()}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip") / "clip")


def expected_of(kind: str, checkpoints: dict[str, Path]) -> Float32Array:
    return tower_vectors(checkpoints[kind], FILES, MODELS[kind][1])


def tower_of(folder: Path) -> ImageCheckpoint:
    return read_images_alone(locate(str(folder)))


def encodings_of(images: ImageCheckpoint) -> list[Encoding]:
    return encoder_of_tower(images).encode([ImageInput(content) for content in FILES])


def unit(rows: Float32Array) -> Float32Array:
    found: Float32Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def vectors(artifact: Artifact, images: ImageCheckpoint) -> Float32Array:
    with running(artifact) as engine:
        return unit(engine.run(PackedBatch.from_encodings(encodings_of(images)))["embedding"])


@pytest.mark.parametrize("kind", MODELS)
def test_the_module_gives_the_librarys_vectors(kind: str, checkpoints: dict[str, Path]) -> None:
    images = tower_of(checkpoints[kind])
    with images.checkpoint.weights() as weights:
        model = packed_model(images.checkpoint.spec, weights.read, images.checkpoint.max_seq_len)
    found = run(model, PackedBatch.from_encodings(encodings_of(images)))["embedding"]
    np.testing.assert_allclose(unit(found), expected_of(kind, checkpoints), atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("ViT", "fp32"),
        ("DINOv3", "fp32"),
        *(pytest.param(kind, "fp32", marks=pytest.mark.slow) for kind in MODELS if kind not in ("ViT", "DINOv3")),
        *(pytest.param(kind, "bf16", marks=[pytest.mark.slow, needs_bf16]) for kind in MODELS),
    ],
)
def test_artifacts_without_a_tokenizer_give_the_librarys_vectors(
    kind: str, precision: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = checkpoints[kind]
    artifact = build_artifact(folder, tmp_path / "out", precision=precision, all_texts=True)
    assert artifact.manifest.modalities == ["image"]
    assert not (artifact.path / "tokenizer.json").exists()
    assert not (artifact.path / "image_engine").exists()
    assert artifact.certificate.kind == "reference"
    assert artifact.certificate.verdict == f"passed on {len(FILES)} images"
    expected, found = expected_of(kind, checkpoints), vectors(artifact, tower_of(folder))
    if precision == "fp32":
        np.testing.assert_allclose(found, expected, atol=2e-4)
    assert (found * expected).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("kind", ["ViT", "DINOv2", "DINOv3"])
def test_pixels_are_those_of_the_image_processor(kind: str, checkpoints: dict[str, Path]) -> None:
    folder, images = checkpoints[kind], tower_of(checkpoints[kind])
    encoder = encoder_of_tower(images)
    for content in FILES:
        levels = encoder.levels(ImageInput(content)).astype(np.float32)
        found = levels * np.array(images.processor.scales) + np.array(images.processor.shifts)
        np.testing.assert_allclose(found.transpose(2, 0, 1), pixel_values(folder, content)[0].numpy(), atol=1e-5)


def test_the_image_tower_of_a_two_tower_checkpoint_is_built_alone(clip: Path, tmp_path: Path) -> None:
    alone = build_artifact(clip, tmp_path / "alone", texts=False, verify=False)
    whole = build_artifact(clip, tmp_path / "whole", verify=False)
    assert alone.manifest.image_tower == whole.manifest.image_tower
    assert (alone.path / "engine/model.bin").read_bytes() == (whole.path / "image_engine/model.bin").read_bytes()
    found = vectors(alone, tower_of(clip))
    np.testing.assert_allclose(found, library_vectors(clip, transformers.CLIPModel, FILES, []), atol=2e-4)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("grid", [(16, 16), (5, 9), (37, 37), (40, 3)])
def test_position_tables_are_resized_as_by_torch(grid: tuple[int, int], antialias: bool) -> None:
    table = np.random.default_rng(0).normal(size=(37 * 37, 5)).astype(np.float32)
    square = torch.from_numpy(table).reshape(1, 37, 37, 5).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        square, size=grid, mode="bicubic", align_corners=False, antialias=antialias
    )
    expected = resized.permute(0, 2, 3, 1).reshape(-1, 5).numpy()
    found = resized_grid(table, 37, grid, antialias=antialias)
    np.testing.assert_allclose(found, expected, atol=1e-4)  # torch has places in FP32


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_seq_len": 8}, "max_seq_len"),
        ({"prompts": {"query": "query: "}}, "prompts"),
        ({"pooling": "mean"}, "pooling"),
        ({"task": "rerank"}, "task"),
        ({"verify_retrieval": True}, "verify_retrieval"),
        ({"images": False}, "--no-images"),
        ({"precision": "int8"}, "calibration_size"),
        ({"precision": "int8", "calibration_size": 128}, "not quantized, and --precision int8 is"),
        ({"verify_budget": 3.0}, "verify_budget"),
    ],
)
def test_settings_of_texts_are_refused_by_name(
    settings: dict[str, Any], named: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        build_artifact(checkpoints["ViT"], tmp_path / "out", **settings)


def test_without_texts_a_model_of_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BertModel has no image tower: leave --no-texts out"):
        build_artifact(saved(tmp_path / "bert", "BertModel"), tmp_path / "out", texts=False)


def test_without_texts_and_images_nothing_is_left(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is left to build"):
        build_artifact(clip, tmp_path / "out", texts=False, images=False)


def test_a_checkpoint_without_an_image_processor_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["ViT"], tmp_path / "vit")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        tower_of(folder)


def test_images_that_patches_do_not_fill_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["DINOv2"], tmp_path / "dinov2")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    write_processor(folder, {**settings, "crop_size": {"height": 40, "width": 48}})
    with pytest.raises(CheckpointError, match="40 x 48 pixels, which patches of 16 do not fill"):
        tower_of(folder)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("DINOv2 with registers", {"num_register_tokens": 0}, "num_register_tokens = 0"),
        ("DINOv3", {"num_register_tokens": 65}, "from 1 to 64"),
        ("DINOv3", {"num_register_tokens": 3}, "embeddings.register_tokens"),
        ("DINOv3", {"value_bias": False}, "value_bias"),
        ("DINOv3", {"key_bias": 1}, "key_bias"),
        ("DINOv3", {"rope_theta": 0.0}, "rope_theta"),
        ("DINOv3", {"num_attention_heads": 8}, "4 must divide it"),
    ],
)
def test_configs_that_the_weights_or_the_family_contradict_are_refused(
    kind: str, changes: dict[str, Any], named: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoints[kind], tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    with pytest.raises((CheckpointError, WeightsError), match=named):
        tower_of(folder).checkpoint.weights()


def test_layers_of_dinov3_are_read_by_the_names_of_its_module(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["DINOv3"], tmp_path / "dinov3")
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("layer.0.") for name in tensors)
    save_file(
        {f"model.{name}" if name.startswith("layer.") else name: array for name, array in tensors.items()},
        folder / "model.safetensors",
    )
    own, other = (tower_of(one).checkpoint.weights() for one in (checkpoints["DINOv3"], folder))
    with own, other:
        name = "layers.1.mlp.down.weight"
        np.testing.assert_array_equal(other.read(name), own.read(name))


def test_a_layer_without_its_factors_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["DINOv2"], tmp_path / "dinov2")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "layer_scale1" in name)
    save_file({other: array for other, array in tensors.items() if other != name}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{name} is missing"):
        tower_of(folder).checkpoint.weights()


def test_one_number_as_size_of_vit_is_a_square(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["ViT"], tmp_path / "vit")
    write_processor(folder, {**VIT_PROCESSOR, "size": 48})
    assert tower_of(folder).processor == tower_of(checkpoints["ViT"]).processor
    assert pixel_values(folder, FILES[1]).shape == (1, 3, 48, 48)


def test_a_manifest_of_another_engine_than_its_tower_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from bei.artifact.validation import manifest_fault

    manifest = build_artifact(checkpoints["SigLIP"], tmp_path / "out", verify=False).manifest
    assert manifest_fault(manifest) is None
    for changed, message in (
        ({"max_num_tokens": manifest.max_num_tokens + 1}, "another engine"),
        ({"images": msgspec.UNSET}, "reads nothing"),
    ):
        fault = manifest_fault(msgspec.structs.replace(manifest, **changed))
        assert fault is not None
        assert message in fault


def test_modules_behind_an_image_tower_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["ViT"], tmp_path / "vit")
    add_modules(folder, ("mean",), hidden=48)
    with pytest.raises(CheckpointError, match=r"modules\.json asks for a pooling"):
        tower_of(folder)


def test_a_certificate_that_differs_from_its_images_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    artifact = build_artifact(checkpoints["ViT"], tmp_path / "out")
    manifest, certificate = artifact.manifest, artifact.certificate
    assert certificate.images
    assert certificate_fault(manifest, certificate) is None
    unverified = msgspec.structs.replace(certificate.images, kind="none", output=None, passed=False)
    for changed in ({"images": unverified}, {"device": "another"}, {"num_held_out_texts": 3}):
        fault = certificate_fault(manifest, msgspec.structs.replace(certificate, **changed))
        assert fault is not None
        assert "which are all that the model reads" in fault


def test_what_verifies_such_an_artifact_names_no_setting_that_its_build_refuses(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    artifact = build_artifact(checkpoints["ViT"], tmp_path / "out", verify=False)
    with pytest.raises(ConfigError, match="keeps no answers of a reference") as caught:
        verify(artifact.path)
    assert "keep-reference" not in str(caught.value)
