"""NomicBERT with biases and experts against an implementation in torch: transformers' class has neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bei.core import PackedBatch
from bei.errors import CheckpointError, ConfigError, WeightsError
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.reference import hf_model as hf
from tests.bei_build.families.nomic import EXPERTS, HIDDEN, VOCABULARY, Oracle, save
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import add_modules, read_tensors, write_tensors
from tests.support.cpus import BF16

LENGTHS = [5, 33, 1, 64, 17]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_normalize_expert_weights": True},
        {"moe_top_k": 1},
        {"moe_top_k": 3, "moe_normalize_expert_weights": True, "moe_every_n_layers": 3},
        {"moe_top_k": EXPERTS},
        {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False},
        {"num_experts": 0},
        {"num_experts": 0, "activation_function": "swiglu"},
        {"num_experts": 0, "activation_function": "geglu", "mlp_fc1_bias": False},
    ],
    ids=str,
)
def test_vectors_are_those_of_the_original_code(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = save(tmp_path / "nomic", **changes)
    add_modules(folder, ("mean",), hidden=HIDDEN)
    oracle, texts = Oracle(folder), random_encodings(LENGTHS, VOCABULARY)
    expected = torch.stack([oracle.states(text).mean(0) for text in texts])
    with running(build_artifact(folder, tmp_path / "artifact", verify=False)) as engine:
        np.testing.assert_allclose(embed(engine, texts), expected.numpy(), atol=2e-4)


@pytest.mark.parametrize(
    ("changed", "least"), [({"moe_normalize_expert_weights": True}, 1e-2), ({"moe_top_k": 1}, 1e-2)], ids=str
)
def test_the_tolerance_tells_the_routers_settings_apart(changed: dict[str, Any], least: float, tmp_path: Path) -> None:
    """The control of the test above: the same weights read with another setting."""
    texts = random_encodings(LENGTHS, VOCABULARY)
    right = Oracle(save(tmp_path / "right"))
    wrong = Oracle(save(tmp_path / "wrong", **changed))
    for text in texts:
        assert (right.states(text).mean(0) - wrong.states(text).mean(0)).abs().max() > least


_AS_TRANSFORMERS = {
    **{"num_experts": 0, "activation_function": "swiglu"},
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
}


@pytest.mark.parametrize("changes", [{}, _AS_TRANSFORMERS], ids=["experts and biases", "neither"])
def test_a_classifier_reads_the_pooled_first_token(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {**changes, "id2label": {"0": "low", "1": "high"}}
    folder = save(tmp_path / "n", "bert.", architectures=["NomicBertForSequenceClassification"], **changes)
    oracle, texts = Oracle(folder, "bert."), random_encodings(LENGTHS, VOCABULARY)
    with running(build_artifact(folder, tmp_path / "artifact", verify=False)) as engine:
        actual = engine.run(PackedBatch.from_encodings(texts))["logits"]
    for row, text in zip(actual, texts, strict=True):
        pooled = torch.tanh(oracle.linear("pooler.dense", oracle.states(text)[0]))
        np.testing.assert_allclose(row, oracle.linear("classifier", pooled).numpy(), atol=2e-4)


def test_who_else_is_in_the_batch_changes_nothing(tmp_path: Path) -> None:
    """Sums of the experts' outputs have a fixed order, whichever tokens each expert has."""
    texts = random_encodings([*LENGTHS, 2, 9], VOCABULARY)
    with running(build_artifact(save(tmp_path / "nomic"), tmp_path / "artifact", verify=False)) as engine:
        together = embed(engine, texts)
        assert (embed(engine, texts) == together).all()
        for row, text in zip(together, texts, strict=True):
            np.testing.assert_allclose(embed(engine, [text])[0], row, atol=1e-5)


@pytest.mark.parametrize("precision", [BF16, pytest.param("int8", marks=pytest.mark.slow)])
def test_it_is_close_in_fewer_bits(precision: str, tmp_path: Path) -> None:
    artifact = build_artifact(save(tmp_path / "nomic"), tmp_path / "artifact", precision=precision)
    certificate = json.loads((artifact.path / "certificate.json").read_text())
    assert certificate["thresholds"]["mean"] <= certificate["outputs"][0]["cosine_mean"] < 1.0


def test_it_is_verified_with_a_second_writing_of_its_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' class accepts the config and leaves out experts and biases."""
    folder = save(tmp_path / "nomic")
    certificate = build_artifact(folder, tmp_path / "artifact").certificate
    assert certificate.reference == "bei's PyTorch module, FP32, one text at a time"
    assert (certificate.kind, certificate.reference_is_independent) == ("self-consistency", False)
    assert certificate.passed
    monkeypatch.setattr(hf, "is_available", lambda: False)
    certificate = build_artifact(folder, tmp_path / "without").certificate
    assert "engine, FP32" in certificate.reference
    with pytest.raises(ConfigError, match=r"transformers has no NomicBertModel\. Use --reference engine"):
        build_artifact(folder, tmp_path / "other", reference="hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_choice_router": True}, "expert_choice_router = True.*only False"),
        ({"num_shared_experts": 1}, "num_shared_experts = 1.*only 0"),
        ({"ffn_div": 2}, "ffn_div = 2.*only 1"),
        ({"moe_normalize_expert_weights": 2}, "moe_normalize_expert_weights = 2.*only False or None or 1"),
        ({"moe_top_k": 9}, "8 experts, moe_top_k 9"),
        ({"moe_top_k": 0}, "8 experts, moe_top_k 0"),
        ({"moe_top_k": None}, "8 experts, moe_top_k None, .*supports only moe_top_k from 1"),
        ({"num_experts": "8"}, 'num_experts = "8": correct it to a whole number'),
        ({"moe_every_n_layers": 1}, "moe_every_n_layers 1"),
        ({"moe_every_n_layers": "2"}, "moe_every_n_layers '2'"),
        ({"activation_function": "swiglu"}, "activation_function = 'swiglu'.*only 'gelu'"),
        ({"use_rms_norm": True}, "use_rms_norm = True"),
    ],
    ids=str,
)
def test_other_settings_of_its_experts_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(locate(str(save(tmp_path, **changes))))


def test_experts_of_another_width_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    tensors = read_tensors(folder)
    name = "encoder.layers.1.mlp.experts.mlp.w1"
    write_tensors(folder, {**tensors, name: tensors[name][:-1]})
    with pytest.raises(WeightsError, match=rf"{name} has shape \[191, 32\], but config.json implies \[192, 32\]"):
        read_checkpoint(locate(str(folder))).weights()
