"""The builder's reference runs one text at a time; the tests' oracle runs padded batches. They must agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.errors import VerificationError
from bei_build import memory
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.reference import hf_model
from bei_build.reference.hf_model import HFReference
from tests.support.builds import random_encodings
from tests.support.checkpoints import FAMILIES, MAX_TOKENS, POOLINGS, Dense, Normalize, add_modules, save_checkpoint
from tests.support.oracle import hf_embed
from tests.support.zoo import CASES, save_case

LENGTHS = [1, MAX_TOKENS, 7, 20]


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_equals_the_oracle_for_every_family_and_pooling(family: str, tmp_path: Path) -> None:
    folder = add_modules(save_checkpoint(tmp_path, family), tuple(POOLINGS))
    checkpoint = read_checkpoint(locate(str(folder)))
    encodings = random_encodings(LENGTHS, checkpoint.spec.embeddings.vocab_size)
    if family in ("roberta", "xlm-roberta"):  # no padding inside a text: these would count positions around it
        for encoding in encodings:
            encoding.input_ids[encoding.input_ids == 1] = 2
    with checkpoint.weights() as weights:
        actual = np.stack(HFReference(checkpoint, weights).run(encodings, ["embedding"])["embedding"])
    assert actual.dtype == np.float32
    assert np.abs(actual - hf_embed(folder, encodings, tuple(POOLINGS))).max() <= 1e-5


@pytest.mark.parametrize("activation", ["Tanh", "Identity", "ReLU", "GELU", "SiLU"])
def test_reference_equals_the_oracle_behind_a_tail(activation: str, tmp_path: Path) -> None:
    tail: list[Dense | Normalize] = [Dense(24, activation), Normalize(), Dense(8, activation, bias=False)]
    folder = add_modules(save_checkpoint(tmp_path), ("mean",), tail)
    checkpoint = read_checkpoint(locate(str(folder)))
    encodings = random_encodings(LENGTHS, checkpoint.spec.embeddings.vocab_size, pairs=True)
    with checkpoint.weights() as weights:
        actual = np.stack(HFReference(checkpoint, weights).run(encodings, ["embedding"])["embedding"])
    assert np.abs(actual - hf_embed(folder, encodings, ("mean",), tail)).max() <= 1e-5


def test_reference_computes_in_fp32_whatever_the_checkpoint_stores(tmp_path: Path) -> None:
    import torch

    folder = save_checkpoint(tmp_path, dtype=torch.float16)
    checkpoint = read_checkpoint(locate(str(folder)))
    encodings = random_encodings(LENGTHS, checkpoint.spec.embeddings.vocab_size)
    with checkpoint.weights() as weights:
        actual = np.stack(HFReference(checkpoint, weights).run(encodings, ["embedding"])["embedding"])
    assert np.abs(actual - hf_embed(folder, encodings)).max() <= 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_widened_module_by_module_give_the_same_bits(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    checkpoint = read_checkpoint(locate(str(save_checkpoint(tmp_path, family, dtype=getattr(torch, dtype)))))
    encodings = random_encodings(LENGTHS, checkpoint.spec.embeddings.vocab_size)
    with checkpoint.weights() as weights:
        whole = HFReference(checkpoint, weights).run(encodings, ["embedding"])["embedding"]
        monkeypatch.setattr(hf_model, "WIDEN_FROM_BYTES", 0)
        loaded = count_loads(monkeypatch)
        widened = HFReference(checkpoint, weights)
        rows = widened.run(encodings, ["embedding"])["embedding"]
    assert loaded == [getattr(torch, dtype)]
    assert {parameter.dtype for parameter in widened._model.parameters()} == {getattr(torch, dtype)}
    np.testing.assert_array_equal(np.stack(rows), np.stack(whole))


def test_what_would_be_rounded_is_loaded_as_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's code keeps a scale in the type of its weights."""
    import torch

    case = next(case for case in CASES if case.architecture == "Gemma3TextModel")
    folder = save_case(tmp_path, replace(case, stored=torch.bfloat16))
    checkpoint = read_checkpoint(locate(str(folder)))
    monkeypatch.setattr(hf_model, "WIDEN_FROM_BYTES", 0)
    loaded = count_loads(monkeypatch)
    with checkpoint.weights() as weights:
        HFReference(checkpoint, weights)
        assert loaded == [torch.bfloat16, torch.float32]
        monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
        with pytest.raises(VerificationError, match=r"a copy of the model in FP32, takes .* GB of memory"):
            HFReference(checkpoint, weights)


def test_a_module_that_gets_a_rounded_input_says_so() -> None:
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(torch.bfloat16)
    hf_model.widen_modules(layers)
    assert layers(torch.ones(1, 2)).dtype == torch.float32
    with pytest.raises(TypeError, match=r"Linear gets torch\.bfloat16"):
        layers(torch.ones(1, 2, dtype=torch.bfloat16))
    assert {parameter.dtype for parameter in layers.parameters()} == {torch.bfloat16}


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the types in which models are loaded from now on."""
    load_model, loaded = hf_model.load_model, list[Any]()

    def load(checkpoint: Any, implementation: str, dtype: Any, *more: Any) -> Any:
        loaded.append(dtype)
        return load_model(checkpoint, implementation, dtype, *more)

    monkeypatch.setattr(hf_model, "load_model", load)
    return loaded
