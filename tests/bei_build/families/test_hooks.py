"""Settings of a family beyond configs and names: its reference class, shared tensors, texts of any length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bei.errors import CheckpointError, VerificationError
from bei_build.checkpoint import read as reading
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.families import bert, llama
from bei_build.families.base import UNLIMITED, Family
from bei_build.reference.hf_model import HFReference
from bei_build.weights.model_weights import ModelWeights
from tests.bei_build.targets.tiny import case_named
from tests.support.builds import random_encodings
from tests.support.checkpoints import change_config, read_tensors, write_tensors
from tests.support.zoo import save_case

KEY = "layers.{i}.attention.key"


def read(folder: Path, family: Family, **changes: object) -> Checkpoint:
    """The checkpoint read with ``changes`` to ``family``."""
    checkpoint = read_checkpoint(locate(str(folder)))
    assert checkpoint.family is family
    return replace(checkpoint, family=replace(family, **changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_case(tmp_path_factory.mktemp("bert"), case_named("BertModel"))


def test_a_family_names_the_class_of_its_reference(folder: Path) -> None:
    checkpoint = read(folder, bert.FAMILY, reference_class="BertModel")
    encodings = random_encodings([5], checkpoint.spec.embeddings.vocab_size)
    with checkpoint.weights() as weights:
        (row,) = HFReference(checkpoint, weights).run(encodings, ["embedding"])["embedding"]
    assert row.shape == (checkpoint.spec.hidden_size,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("AutoModelForSeq2SeqLM", "AutoModelForSeq2SeqLM does not load the checkpoint"),
        ("BertForTokenClassification", "BertForTokenClassification failed on a text"),
    ],
)
def test_what_the_reference_raises_says_what_to_do(name: str, message: str, folder: Path) -> None:
    checkpoint = read(folder, bert.FAMILY, reference_class=name)
    encodings = random_encodings([5], checkpoint.spec.embeddings.vocab_size)
    with (
        checkpoint.weights() as weights,
        pytest.raises(VerificationError, match=rf"{message} .*--reference engine .*reference_class"),
    ):
        HFReference(checkpoint, weights).run(encodings, ["embedding"])


def test_a_tensor_without_an_index_is_read_by_every_layer(folder: Path, tmp_path: Path) -> None:
    """The keys of all layers are one tensor, which each layer reads whole."""
    tensors = read_tensors(folder)
    shared = {
        name.replace("encoder.layer.0.", "shared."): tensor
        for name, tensor in tensors.items()
        if "attention.self.key" in name and ".0." in name
    }
    others = {name: tensor for name, tensor in tensors.items() if "attention.self.key" not in name}
    write_tensors(tmp_path, {**others, **shared})
    family = replace(bert.FAMILY, weights={**bert.FAMILY.weights, KEY: "shared.attention.self.key"})
    spec = read_checkpoint(locate(str(folder))).spec
    with ModelWeights(spec, family, tmp_path, {}) as weights:
        keys = [weights.read(f"layers.{index}.attention.key.weight") for index in range(len(spec.layers))]
    assert keys[0].shape == (spec.hidden_size, spec.hidden_size)
    assert all(np.array_equal(key, keys[0]) for key in keys)


def test_layers_that_share_weights_count_them_once(folder: Path) -> None:
    spec = read_checkpoint(locate(str(folder))).spec
    shared = replace(spec, weights_of=(0, 0, 1))
    assert {name.split(".")[1] for name, _ in shared.weights() if name.startswith("layers.")} == {"0", "1"}
    assert shared.weight_read_as("layers.2.mlp.up.weight") == "layers.1.mlp.up.weight"
    assert spec.weight_read_as("layers.2.mlp.up.weight") == "layers.2.mlp.up.weight"
    assert shared.num_parameters < spec.num_parameters


def test_a_model_without_a_position_limit_takes_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_case(tmp_path, case_named("LlamaModel"))
    family = replace(llama.FAMILY, position_limit=False)
    monkeypatch.setattr(reading, "family_of", lambda *_: family)
    assert read_checkpoint(locate(str(folder))).max_seq_len == UNLIMITED
    assert read_checkpoint(locate(str(folder)), max_seq_len=1234).max_seq_len == 1234


def test_a_config_that_lacks_its_position_limit_is_refused(tmp_path: Path) -> None:
    folder = save_case(tmp_path, case_named("LlamaModel"))
    change_config(folder, max_position_embeddings="many")
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        read_checkpoint(locate(str(folder)))
