"""Activations by transformers' names: each is built as transformers computes it, or refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel
from transformers.activations import ACT2FN

from bei.errors import CheckpointError
from bei_build.families.base import _ACTIVATIONS, activation_named
from bei_build.torch_graph.model import packed_model
from tests.bei_build.torch_graph.rig import of_the_graph, of_the_module
from tests.support.builds import random_encodings
from tests.support.checkpoints import change_config, read_tensors, save_checkpoint, write_tensors
from tests.support.reading import read, refused

TOLERANCE = 2e-4
# With parameters of their own, or of mechanisms that bei does not build.
REFUSED = {"laplace", "prelu", "sqrtsoftplus", "xielu"}
# Rows of the same length: the class needs no mask.
LENGTHS = (12, 12, 12)


def test_every_name_of_transformers_is_built_or_refused() -> None:
    assert set(_ACTIVATIONS) | REFUSED == set(ACT2FN)
    assert not set(_ACTIVATIONS) & REFUSED


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_others_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = change_config(save_checkpoint(tmp_path), hidden_act=name)
    refused(folder, CheckpointError, f"Activation '{name}' is not supported. Supported: gelu, gelu_10, ")


def spread(folder: Path) -> Path:
    """Make the inputs of a BERT's activations reach from below -10 to above 10, where their forms differ."""
    tensors = read_tensors(folder)
    return write_tensors(
        folder, {name: 12.0 * it if "intermediate.dense" in name else it for name, it in tensors.items()}
    )


@pytest.mark.parametrize("name", sorted(_ACTIVATIONS))
def test_graph_and_module_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    folder = change_config(spread(save_checkpoint(tmp_path / "model")), hidden_act=name)
    checkpoint = read(folder, pooling="mean")
    encodings = random_encodings(LENGTHS, checkpoint.spec.embeddings.vocab_size)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    entered: list[torch.Tensor] = []
    for layer in model.encoder.layer:
        layer.intermediate.dense.register_forward_hook(lambda _module, _args, output: entered.append(output))
    with torch.no_grad():
        ids = torch.from_numpy(np.stack([encoding.input_ids for encoding in encodings]).astype(np.int64))
        expected = model(ids).last_hidden_state.mean(1).numpy()
    reached = torch.cat([states.flatten() for states in entered])
    assert len(entered) == 2
    assert reached.min() < -10
    assert reached.max() > 10
    with checkpoint.weights() as weights:
        graph = of_the_graph(checkpoint.spec, weights.read, checkpoint.max_seq_len, encodings, tmp_path / "graph")
        module = of_the_module(packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len), encodings)
    np.testing.assert_allclose(np.stack(graph["embedding"]), expected, atol=TOLERANCE)
    np.testing.assert_allclose(np.stack(module["embedding"]), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["", None, 3, "GELU"])
def test_what_is_no_name_of_transformers_is_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(CheckpointError, match=r"is not supported\. Supported: gelu, gelu_10"):
        activation_named(name)
