"""EmbeddingGemma 2: the text model of a checkpoint that has towers for images and audio too, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import EmbeddingGemma2TextModel

from bei.errors import CheckpointError, ConfigError
from tests.hub_matrix.stored import beside_towers
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import add_modules, change_config, read_tensors, write_tensors
from tests.support.reading import read, refused, saved

CASE = "EmbeddingGemma2TextModel"


def test_the_text_model_is_found_beside_towers(tmp_path: Path) -> None:
    """A repository of ``EmbeddingGemma2Model`` with sentence-transformers' files, against transformers' class."""
    text = saved(tmp_path / "text", CASE)
    folder = saved(tmp_path / "whole", CASE)
    beside_towers(folder)
    add_modules(folder, ("mean",), hidden=24)
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.certificate.reference.startswith("transformers, FP32")
    assert artifact.manifest.dimension("embedding") == 24
    assert artifact.manifest.spec.attention == "bidirectional"
    encodings = random_encodings((1, 40, 2, 17), 100)
    with running(artifact) as engine:
        found = embed(engine, encodings)
    model = EmbeddingGemma2TextModel.from_pretrained(text, attn_implementation="eager")
    for row, encoding in zip(found, encodings, strict=True):
        with torch.inference_mode():
            states = model(torch.from_numpy(encoding.input_ids).long()[None]).last_hidden_state[0]
        np.testing.assert_allclose(row, states.mean(0).numpy(), atol=2e-4)


def test_fp16_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", CASE)
    with pytest.raises(ConfigError, match="larger than FP16 can hold: build with --precision bf16 or fp32"):
        build_artifact(folder, tmp_path / "artifact", target="cuda-twin", precision="fp16")


def test_a_config_without_its_text_model_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", CASE)
    beside_towers(folder)
    refused(change_config(folder, text_config=None), CheckpointError, "lacks text_config")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention", "conv", "full_attention"]}, "type 'conv'"),
        ({"hidden_activation": "laplace"}, "Activation 'laplace'"),
        ({"num_attention_heads": 2}, "has shape"),
    ],
)
def test_what_the_family_does_not_describe_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    refused(change_config(saved(tmp_path / "checkpoint", CASE), **changes), CheckpointError, message)


def test_a_layer_without_its_number_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", CASE)
    tensors = read_tensors(folder)
    del tensors["layers.1.layer_scalar"]
    refused(write_tensors(folder, tensors), CheckpointError, "layer_scalar")


def test_widths_of_single_layers_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", CASE)
    assert json.loads((folder / "config.json").read_text())["per_layer_config"]
    attentions = read(folder).spec.attentions
    found = [(one.head_dim, one.num_kv_heads, one.window) for one in attentions]
    assert found == [(12, 2, 8), (12, 2, 8), (16, 1, None)]
