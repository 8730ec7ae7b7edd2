"""Tensors of GGUF files: those of the checkpoint, and those that transformers' own reader finds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tests.support.checkpoints import read_tensors, write_tensors
from tests.support.gguf_files import save_gguf
from tests.support.reading import read
from tests.support.zoo import CASES, Case, save_case

_BY_NAME = {case.name: case for case in CASES}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _saved(folder: Path, name: str, **settings: Any) -> Path:
    case = _BY_NAME[name]
    save_case(folder, Case(case.family, case.architecture, {**case.settings, **settings}, case.tokenizer))
    tensors = read_tensors(folder)
    for position in (name for name in tensors if "position_embeddings" in name and "RoBERTa" in case.family):
        tensors[position][:2] = (
            0  # that of padding, which is never trained, and one before it; the converter drops them
        )
    return write_tensors(folder, tensors)


# The architecture, a case of the zoo, settings for it, and what the converter writes for this architecture.
_FILES: tuple[tuple[str, str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("bert", "BertModel", {}, {}),
    ("bert", "DistilBertModel", {}, {}),
    ("bert", "RobertaModel", {}, {}),
    ("bert", "XLMRobertaModel", {}, {}),
    ("bert", "XLMRobertaForSequenceClassification", {}, {"bert.pooling_type": 4}),
    ("nomic-bert", "NomicBertModel", {}, {}),
    ("modern-bert", "ModernBertModel", {}, {}),
    ("llama", "LlamaModel", {}, {}),
    ("llama", "LlamaModel-llama3_rope_and_biases", {}, {}),
    ("llama", "MistralModel", {"sliding_window": None}, {}),
    ("qwen2", "Qwen2Model", {}, {}),
    ("qwen3", "Qwen3Model", {}, {}),
    ("gemma3", "Gemma3TextModel", {}, {}),
)


@pytest.mark.parametrize(
    ("arch", "name", "settings", "metadata"), _FILES, ids=[f"{arch}-{name}" for arch, name, _, _ in _FILES]
)
def test_a_gguf_beside_the_settings_has_the_checkpoint_s_weights(
    tmp_path: Path, arch: str, name: str, settings: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    source = _saved(tmp_path / "source", name, **settings)
    folder = tmp_path / "gguf"
    save_gguf(source, folder / "some-model.gguf", arch, metadata)
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    _check_same(source, folder)


def _check_same(source: Path, made: Path, tolerance: float = 2e-7) -> None:
    one, other = read(source), read(made)
    assert one.spec == other.spec
    assert one.tokenizer.to_str() == other.tokenizer.to_str()
    with one.weights() as stored, other.weights() as found:
        for weight, _ in one.spec.weights():
            np.testing.assert_allclose(found.read(weight), stored.read(weight), rtol=0, atol=tolerance, err_msg=weight)


_EMBEDDER = {"llama": "LlamaModel", "qwen2": "Qwen2Model", "qwen3": "Qwen3Model", "gemma3": "Gemma3TextModel"}


@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "Q4_0"])
@pytest.mark.parametrize("arch", _EMBEDDER)
def test_dequantized_weights_are_those_that_transformers_reads(tmp_path: Path, arch: str, kind: str) -> None:
    source = _saved(tmp_path / "source", _EMBEDDER[arch])
    file = save_gguf(source, tmp_path / "model.gguf", arch, {"general.name": "tiny"}, kind=kind)
    for path in source.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = transformers.AutoConfig.from_pretrained(source)
    theirs = transformers.AutoModel.from_pretrained(tmp_path, gguf_file=file.name, config=config, dtype="float32")
    checkpoint = read(file)
    with checkpoint.weights() as weights:
        assert kind in weights.stored_types
        assert weights.dequantized == ((kind,) if kind != "BF16" else ())
        found = dict(weights.stored_tensors())
    wanted = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    assert found.keys() - {"lm_head.weight"} == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=1e-6, err_msg=name)
