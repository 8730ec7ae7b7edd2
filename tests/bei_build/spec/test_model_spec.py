"""The spec as data: dimensions, and weights counted against the Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModel

from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import DenseSpec, NormalizeSpec
from tests.support.checkpoints import FAMILIES, HIDDEN, save_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_hf_model_but_for_pooler_and_unused_positions(family: str, tmp_path: Path) -> None:
    spec = read_checkpoint(locate(str(save_checkpoint(tmp_path, family)))).spec
    model = AutoModel.from_pretrained(tmp_path)
    expected = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("pooler."))
    assert spec.num_parameters == expected - spec.embeddings.position_offset * HIDDEN
    names = [name for name, _ in spec.weights()]
    assert len(names) == len(set(names))


def test_poolings_and_layers_decide_the_dimension_of_a_head(bert: Path) -> None:
    assert read_checkpoint(locate(str(bert))).spec.dimensions == {"embedding": HIDDEN}
    assert HeadSpec("embedding", ("mean", "cls", "max")).dimension(HIDDEN) == 3 * HIDDEN
    assert HeadSpec("token_embedding").dimension(HIDDEN) == HIDDEN
    layers = (
        DenseSpec("tail.0", HIDDEN, 24, True, "tanh"),
        NormalizeSpec(),
        DenseSpec("tail.2", 24, 8, False),
        NormalizeSpec(),
    )
    shapes = {"tail.0.weight": (24, HIDDEN), "tail.0.bias": (24,), "tail.2.weight": (8, 24)}
    for head in (HeadSpec("embedding", ("mean",), layers=layers), HeadSpec("token_embedding", token_layers=layers)):
        assert head.dimension(HIDDEN) == 8
        assert dict(head.weights()) == shapes
