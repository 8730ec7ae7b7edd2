"""Settings of a GGUF file's metadata: sizes that no model has, and values of another type, are refused by name."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.errors import CheckpointError, WeightsError
from bei_build.checkpoint.gguf_folder import laid_out
from bei_build.checkpoint.gguf_settings import config_of, llama3_scaling
from bei_build.checkpoint.locate import locate
from bei_build.weights.gguf_file import GgufHeader, StoredTensor
from bei_build.weights.gguf_store import GgufStore
from tests.support.gguf_files import zeros_file

_SHAPE = {
    "embedding_length": 32,
    "block_count": 2,
    "attention.head_count": 4,
    "feed_forward_length": 48,
    "context_length": 64,
}
_ENCODER = {**_SHAPE, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False}
_DECODER = {**_SHAPE, "attention.layer_norm_rms_epsilon": 1e-6}
_TENSORS: Mapping[str, tuple[int, ...]] = {"token_embd.weight": (10, 32)}


def _header(arch: str, settings: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] = _TENSORS) -> GgufHeader:
    metadata = {key if key.startswith("tokenizer.") else f"{arch}.{key}": value for key, value in settings.items()}
    stored = {name: StoredTensor(shape, 0, 0) for name, shape in tensors.items()}
    return GgufHeader({"general.architecture": arch, **metadata}, stored, 0, 32)


@pytest.mark.parametrize(
    ("arch", "settings", "said"),
    [
        ("gemma3", {**_DECODER, "block_count": 10_000_000}, "block_count = 10000000, and models have from 1 to 2,000"),
        ("gemma3", {**_DECODER, "attention.sliding_window": 0}, "attention.sliding_window = 0, and models"),
        ("llama", {**_DECODER, "attention.key_length": 1 << 30}, "attention.key_length = 1073741824, and models"),
        ("llama", {**_DECODER, "rope.dimension_count": 1 << 30}, "rope.dimension_count = 1073741824, and models"),
        ("bert", {**_ENCODER, "context_length": -1}, "context_length = -1, and models"),
        ("bert", {**_ENCODER, "embedding_length": 0}, "embedding_length = 0, and models"),
        (
            "modern-bert",
            {**_ENCODER, "attention.sliding_window": 8, "attention.sliding_window_pattern": 0},
            "sliding_window_pattern = 0, and models",
        ),
        ("bert", {**_ENCODER, "tokenizer.ggml.model": ["a"]}, "tokenizer.ggml.model = .*must be of type str"),
        (
            "bert",
            {**_ENCODER, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.padding_token_id": "1"},
            "padding_token_id is '1': it must be a number below 100",
        ),
    ],
)
def test_sizes_that_no_model_has_and_values_of_another_type_are_refused(
    arch: str, settings: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        config_of(_header(arch, settings))


def test_a_classifier_of_more_labels_than_any_model_is_refused_before_they_are_named() -> None:
    settings = {**_ENCODER, "tokenizer.ggml.model": "gpt2"}
    with pytest.raises(CheckpointError, match="has 1,000,001 scores"):
        config_of(_header("bert", settings, {**_TENSORS, "cls.output.weight": (1_000_001, 32)}))


def test_rotations_of_another_width_than_their_factors_take_no_memory() -> None:
    tracemalloc.start()
    try:
        assert llama3_scaling(np.ones(4, np.float32), 10000.0, 1 << 20) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def _file(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Path:
    path.write_bytes(zeros_file({"general.architecture": "bert", **metadata}, tensors))
    return path


def test_a_number_of_parts_that_is_a_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"split\.count = 'two': it must be of type int"):
        GgufStore(_file(tmp_path / "m.gguf", {"split.count": "two"}, {}))


def test_a_dense_module_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    shapes = {**_TENSORS, "dense_2.weight": (32,)}
    file = _file(tmp_path / "m.gguf", {"bert.pooling_type": 1, "bert.embedding_length": 32}, shapes)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "bert", "hidden_size": 32}))
    with pytest.raises(CheckpointError, match=r"dense_2\.weight in the GGUF file has shape \[32\], and is no matrix"):
        laid_out(locate(str(file)))


def test_factors_of_rotations_in_a_model_without_any_are_refused(tmp_path: Path) -> None:
    metadata = {f"bert.{key}": value for key, value in _ENCODER.items()} | {"tokenizer.ggml.model": "bert"}
    file = _file(tmp_path / "m.gguf", metadata, {"token_types.weight": (1, 8), "rope_freqs.weight": (1, 8)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight are none of Llama 3's"):
        laid_out(locate(str(file)))
