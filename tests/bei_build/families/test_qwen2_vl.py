"""Qwen2-VL and Qwen2.5-VL as embedders, gme's among them: the vectors of transformers' classes for the turns that the
models' own code writes, of texts and of images of many sizes, in one batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bei
from bei.artifact.manifest import Artifact
from bei.core import Float32Array
from bei.errors import BeiError, CheckpointError, ConfigError
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_json, read_tensors, write_json, write_tensors
from tests.support.colqwen2 import rope
from tests.support.cpus import needs_bf16
from tests.support.qwen2_vl import GME, SYSTEM, gme_rows, library_rows, save_gme, save_qwen2_vl
from tests.support.qwen3_vl import NO, RERANKER, STEP, YES
from tests.support.two_towers import drawn_files, png

FILES = [*drawn_files(), png(1, 1), png(3, 600), png(900, 5), png(2000, 1400)]
TEXTS = ["hello world", "!", "what is in the picture? " * 3, " two  spaces ", "tokens <|im_end|> and \n lines", "\n né"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl") / "qwen2_vl")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Float32Array]:
    return library_rows(checkpoint, FILES, TEXTS)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "qwen2_vl")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[bei.Model]:
    with bei.Model(artifact.path, tune="off") as opened:
        yield opened


@pytest.fixture(scope="module")
def gme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gme(tmp_path_factory.mktemp("gme") / "gme")


def vectors_of(folder: Path, inputs: list[Any], out: Path, **options: Any) -> Float32Array:
    """Of a build that is not verified."""
    with bei.Model(build_artifact(folder, out, verify=False, **options).path, tune="off") as model:
        return model.embed(inputs)


def assert_close(found: Any, expected: list[Float32Array]) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-4)


def test_texts_and_images_of_many_sizes_have_the_librarys_vectors(
    model: bei.Model, expected: list[Float32Array]
) -> None:
    assert_close(model.embed([*FILES, *TEXTS]), expected)
    assert np.abs(expected[0] - expected[1]).max() > 0.01  # else the decoder need not have read the images


@pytest.mark.slow
@needs_bf16
def test_in_bf16_they_are_near(checkpoint: Path, expected: list[Float32Array], tmp_path: Path) -> None:
    found = vectors_of(checkpoint, [*FILES, *TEXTS], tmp_path / "bf16", precision="bf16")
    assert (found * np.array(expected)).sum(1).min() > 0.999


def test_the_certificate_compares_both_with_the_librarys_class(artifact: Artifact) -> None:
    images = artifact.certificate.images
    assert images
    assert images.reference.startswith("transformers, FP32")
    assert images.output is not None
    assert images.output.output == "embedding"
    assert artifact.certificate.reference.startswith("transformers, FP32")


def test_gme_counts_an_images_tokens_as_its_own_code_does(gme: Path, tmp_path: Path) -> None:
    wanted = gme_rows(gme, FILES, TEXTS)
    artifact = build_artifact(gme, tmp_path / "out")  # verified with transformers' class on these positions
    assert artifact.certificate.images
    assert artifact.certificate.images.reference.startswith("transformers, FP32")
    assert artifact.manifest.max_seq_len == GME["max_length"]
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed([*FILES, *TEXTS]), wanted)
    on_axes = library_rows(gme, FILES[:4], [])
    assert min(np.abs(one - other).max() for one, other in zip(on_axes, wanted, strict=False)) > 1e-3


def test_images_of_gme_have_the_tokens_of_its_own_code(gme: Path, tmp_path: Path) -> None:
    """Whatever the processor's files say, which are the base model's."""
    folder = shutil.copytree(gme, tmp_path / "gme")
    change_json(folder / "preprocessor_config.json", min_pixels=3136, max_pixels=12845056)
    tower = build_artifact(folder, tmp_path / "out", verify=False).manifest.image_tower
    assert tower is not None
    assert tower.processor.bounds
    assert (tower.processor.bounds.fewest, tower.processor.bounds.most) == (4 * STEP**2, 40 * STEP**2)
    change_json(folder / "config.json", min_image_tokens=None)  # 256, more than the most
    with pytest.raises(CheckpointError, match="pixels from 1"):
        build_artifact(folder, tmp_path / "other", verify=False)


@pytest.mark.slow
def test_gmes_module_of_sentence_transformers_is_read(gme: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(gme, tmp_path / "gme")
    kinds = {"": "custom_st.MultiModalTransformer", "1_Normalize": "sentence_transformers.models.Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
    assert_close(vectors_of(folder, [FILES[0], *TEXTS], tmp_path / "out"), gme_rows(folder, FILES[:1], TEXTS))
    change_json(folder / "config.json", auto_map={"AutoModel": "modeling_other.Other"})
    with pytest.raises(CheckpointError, match=r"custom_st\.MultiModalTransformer"):
        build_artifact(folder, tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("gme", [False, True])
def test_tensors_and_config_of_the_first_versions_are_read(gme: bool, tmp_path: Path) -> None:
    """Names without the modules of today's classes, and settings of the decoder beside those of the whole."""
    folder = save_qwen2_vl(tmp_path / "qwen2_vl", gme=gme)
    wanted = library_rows(folder, FILES[:2], TEXTS[:1], as_text=gme)
    tensors = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): own
        for name, own in read_tensors(folder).items()
    }
    write_tensors(folder, tensors)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    text = {key: value for key, value in raw.pop("text_config").items() if key not in ("model_type", "dtype")}
    scaling = text.pop("rope_parameters")
    raw.update(text, rope_theta=scaling.pop("rope_theta"), rope_scaling={**scaling, "type": "mrope"})
    raw["vision_config"]["model_type"] = "qwen2_vl"
    path.write_text(json.dumps(raw))
    artifact = build_artifact(folder, tmp_path / "out")  # the library reads them too
    assert artifact.certificate.reference.startswith("transformers, FP32")
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed([*FILES[:2], TEXTS[0]]), wanted)


@pytest.mark.parametrize("hf_class", ["", pytest.param("Qwen2_5_VLModel", marks=pytest.mark.slow)])
def test_the_second_version_is_read(hf_class: str, tmp_path: Path) -> None:
    folder = save_qwen2_vl(tmp_path / "qwen2_5_vl", second=True, hf_class=hf_class)
    artifact = build_artifact(folder, tmp_path / "out")
    assert artifact.certificate.images
    assert artifact.certificate.images.reference.startswith("transformers, FP32")
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed([*FILES, *TEXTS]), library_rows(folder, FILES, TEXTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"text": {"rope_parameters": rope([1, 2, 3], 500.0)}},
        {"text": {"num_key_value_heads": 1}},
        {"text": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}},
        {"vision": {"hidden_act": "gelu"}},
        {"vision": {"patch_size": 6}},
        {"hf_class": "Qwen2VLModel"},
    ],
    ids=["sections", "heads", "windows", "act", "patch", "base class"],
)
def test_settings_are_honoured(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = save_qwen2_vl(tmp_path / "qwen2_vl", **settings)
    found = vectors_of(folder, [*FILES[:3], *TEXTS[:2]], tmp_path / "out")
    assert_close(found, library_rows(folder, FILES[:3], TEXTS[:2]))


def test_prompts_are_turns_of_the_system(checkpoint: Path, model: bei.Model, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "qwen2_vl")
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "Find an image that matches the given text.", "document": ""}},
    )
    with bei.Model(build_artifact(folder, tmp_path / "out", verify=False).path, tune="off") as own:
        queries = own.embed(TEXTS, prompt_name="query")
    assert_close(queries, library_rows(folder, [], TEXTS, "Find an image that matches the given text."))
    assert SYSTEM in model.manifest.prompts["default"]


def test_scores_of_two_tokens_are_built(tmp_path: Path) -> None:
    folder = save_qwen2_vl(tmp_path / "qwen2_vl", text={"max_position_embeddings": 1024}, words=(NO, YES))
    artifact = build_artifact(folder, tmp_path / "out", **RERANKER)
    assert artifact.certificate.passed
    with bei.Model(artifact.path, tune="off") as model:
        ranks = model.rerank("a query", ["a document", FILES[0]])
    assert sorted(rank.index for rank in ranks) == [0, 1]


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("", {"vision_config": None}, "no vision_config"),
        ("", {"text_config": 3}, "text_config.model_type = '3'"),
        ("text_config", {"model_type": "qwen3"}, "text_config.model_type = 'qwen3'"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "vision_config.model_type"),
        ("text_config", {"rope_parameters": rope([1, 1, 1])}, "mrope_section"),
        ("", {"image_token_id": 10**6}, "has image_token_id = 1000000"),
        ("", {"image_token_id": 9}, "has image_token_id = 9"),
        ("vision_config", {"temporal_patch_size": 1}, "temporal_patch_size = 1"),
        ("vision_config", {"spatial_merge_size": 1}, "spatial_merge_size = 1"),
        ("vision_config", {"hidden_size": 32}, "hidden_size = 32"),
        ("", {"auto_map": {"AutoModel": "modeling.Other"}}, "code of its own"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_configs_are_refused_by_name(
    part: str, settings: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "qwen2_vl")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    (raw[part] if part else raw).update(settings)
    path.write_text(json.dumps(raw))
    with pytest.raises(BeiError, match=message) as info:
        build_artifact(folder, tmp_path / "out")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_length": "long"}, "max_length = 'long'"), ({"max_image_tokens": 2.5}, "max_image_tokens")],
    ids=["length", "tokens"],
)
def test_other_configs_of_gme_are_refused_by_name(
    settings: dict[str, Any], message: str, gme: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(gme, tmp_path / "gme")
    change_json(folder / "config.json", **settings)
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": False}, "--no-texts"),
        ({"pooling": "mean"}, "last token's state alone"),
        ({"max_seq_len": 40}, "tokens of an image"),
    ],
    ids=["images alone", "pooling", "length"],
)
def test_other_builds_are_refused_by_name(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(checkpoint, tmp_path / "out", **options)
