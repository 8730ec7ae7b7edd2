"""The whole path, checkpoint to running engine, against the Hugging Face model: every family, pooling and tail."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.artifact.manifest import Artifact
from bei.core import Encoding
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import (
    FAMILIES,
    HIDDEN,
    MAX_TOKENS,
    POOLINGS,
    Dense,
    Normalize,
    add_modules,
    save_checkpoint,
)
from tests.support.cpus import needs_bf16
from tests.support.oracle import hf_embed

TOLERANCE = 1e-4
LENGTHS = [1, MAX_TOKENS, 2, 17, 16, 5, 33]  # shortest, longest, and both sides of a bucket in one batch
CONCATENATED = ("cls", "max", "mean", "weighted_mean")


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def assert_parity(
    artifact: Artifact,
    checkpoint: Path,
    pooling: Sequence[str],
    tail: Sequence[Dense | Normalize] = (),
    encodings: Sequence[Encoding] | None = None,
) -> None:
    encodings = encodings or random_encodings(LENGTHS, artifact.manifest.spec.vocab_size)
    with running(artifact) as engine:
        actual = embed(engine, encodings)
    expected = hf_embed(checkpoint, encodings, pooling, tail)
    assert actual.shape == expected.shape == (len(encodings), artifact.manifest.dimension("embedding"))
    assert np.abs(actual - expected).max() <= TOLERANCE


@pytest.mark.parametrize("pooling", POOLINGS)
def test_engine_equals_the_hf_model_for_every_family_and_pooling(
    checkpoint: Path, pooling: str, tmp_path: Path
) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "artifact", pooling=pooling, verify=False)
    assert artifact.manifest.embedding is not None
    assert artifact.manifest.embedding.pooling == pooling
    assert_parity(artifact, checkpoint, [pooling])


@pytest.mark.parametrize("booleans", [True, False], ids=["booleans", "pooling_mode"])
def test_engine_equals_the_hf_model_for_concatenated_poolings(checkpoint: Path, booleans: bool, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    add_modules(folder, CONCATENATED, booleans=booleans)
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.dimension("embedding") == len(CONCATENATED) * HIDDEN
    assert_parity(artifact, folder, CONCATENATED)


@pytest.mark.parametrize(
    "tail",
    [
        [Dense(24, "Tanh")],
        [Dense(40, "Identity", bias=False)],
        [Normalize(), Dense(16, "ReLU")],
        [Dense(24, "GELU"), Normalize(), Dense(8, "SiLU", bias=False)],
    ],
    ids=lambda tail: "-".join(type(layer).__name__ for layer in tail),
)
def test_engine_equals_the_hf_model_behind_a_tail(tail: list[Dense | Normalize], tmp_path: Path) -> None:
    folder = add_modules(save_checkpoint(tmp_path / "checkpoint"), ("mean", "cls"), tail, booleans=False)
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.embedding is not None
    assert artifact.manifest.embedding.normalize is False
    assert_parity(artifact, folder, ("mean", "cls"), tail)


def test_a_final_normalize_module_is_left_to_the_runtime(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "checkpoint"))
    add_modules(folder, ("mean",), [Normalize(), Dense(16), Normalize()])
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.embedding is not None
    assert artifact.manifest.embedding.normalize is True
    assert_parity(artifact, folder, ("mean",), [Normalize(), Dense(16)])


def test_token_types_of_pairs_reach_the_model(bert_artifact: Artifact, bert: Path) -> None:
    vocab_size = bert_artifact.manifest.spec.vocab_size
    pairs = random_encodings(LENGTHS, vocab_size, pairs=True)
    assert_parity(bert_artifact, bert, ["mean"], encodings=pairs)
    with running(bert_artifact) as engine:
        singles = embed(engine, random_encodings(LENGTHS, vocab_size))
        assert np.abs(embed(engine, pairs) - singles).max() > 0.1  # or the line above would prove nothing


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh"])
def test_engine_equals_the_hf_model_for_every_activation(activation: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", hidden_act=activation)
    assert_parity(build_artifact(folder, tmp_path / "artifact", verify=False), folder, ["mean"])


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("bert", {"type_vocab_size": 1}),
        ("roberta", {"type_vocab_size": 2}),
        ("roberta", {"pad_token_id": 4, "max_position_embeddings": MAX_TOKENS + 5}),
        ("bert", {"num_attention_heads": 1, "num_hidden_layers": 1}),
        ("bert", {"layer_norm_eps": 1e-2}),
        ("distilbert", {"sinusoidal_pos_embds": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_engine_equals_the_hf_model_for_less_common_configs(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", family, **config)
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.max_seq_len == MAX_TOKENS
    assert_parity(artifact, folder, ["mean"])


@pytest.mark.parametrize(("precision", "least"), [pytest.param("bf16", 0.999, marks=needs_bf16), ("int8", 0.95)])
def test_lower_precisions_stay_close_to_the_hf_model(
    precision: str, least: float, checkpoint: Path, tmp_path: Path
) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "artifact", precision=precision)
    encodings = random_encodings(LENGTHS, artifact.manifest.spec.vocab_size)
    with running(artifact) as engine:
        actual = embed(engine, encodings)
    expected = hf_embed(checkpoint, encodings)
    cosines = (actual * expected).sum(1) / np.linalg.norm(actual, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() >= least
    assert np.abs(actual - expected).max() > 1e-5  # it is not FP32 under another name
