"""The spec as data: dimensions, and weights counted against the Hugging Face model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModel

from bei_build.checkpoint import locate, read_checkpoint
from bei_build.spec import DenseSpec, NormalizeSpec
from tests.checkpoints import FAMILIES, HIDDEN, save_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_hf_model_but_for_pooler_and_unused_positions(family: str, tmp_path: Path) -> None:
    spec = read_checkpoint(locate(str(save_checkpoint(tmp_path, family)))).spec
    model = AutoModel.from_pretrained(tmp_path)
    expected = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("pooler."))
    assert spec.num_parameters == expected - spec.embeddings.position_offset * HIDDEN
    names = [name for name, _ in spec.weights()]
    assert len(names) == len(set(names))


def test_the_tail_decides_the_dimension(bert: Path) -> None:
    spec = read_checkpoint(locate(str(bert))).spec
    assert spec.embedding_dimension == HIDDEN
    assert replace(spec, pooling=("mean", "cls", "max")).embedding_dimension == 3 * HIDDEN
    tail = (DenseSpec(HIDDEN, 24, True, "tanh"), NormalizeSpec(), DenseSpec(24, 8, False, "identity"), NormalizeSpec())
    assert replace(spec, tail=tail).embedding_dimension == 8
    shapes = {"tail.0.weight": (24, HIDDEN), "tail.0.bias": (24,), "tail.2.weight": (8, 24)}
    assert dict(replace(spec, tail=tail).tail_weights()) == shapes
