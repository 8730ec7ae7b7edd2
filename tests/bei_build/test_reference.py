"""The builder's reference runs one text at a time; the tests' oracle runs padded batches. They must agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bei_build.checkpoint import read_checkpoint
from bei_build.location import locate
from bei_build.reference import HFReference
from tests.bei_build.builds import random_encodings
from tests.bei_build.oracle import hf_embed
from tests.checkpoints import FAMILIES, MAX_TOKENS, POOLINGS, Dense, Normalize, add_modules, save_checkpoint

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
