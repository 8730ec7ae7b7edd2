"""Decoders whose class in transformers ignores what others read from config.json: it is refused, not applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bei.errors import CheckpointError
from tests.bei_build.reading import read, refused, saved
from tests.checkpoints import change_config


@pytest.mark.parametrize("name", ["Olmo2Model", "GraniteModel"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "sliding_window = 8"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        ({"rope_parameters": {"rope_type": "other", "rope_theta": 100.0}}, "rope_type 'other'|refused by transformers"),
        ({"hidden_act": "quick_gelu"}, "Activation 'quick_gelu' is not supported"),
    ],
    ids=["window", "partial rotation", "rotation", "activation"],
)
def test_what_the_class_ignores_or_computes_otherwise_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(change_config(saved(tmp_path, name), **changes), CheckpointError, message)


@pytest.mark.parametrize("key", ["embedding_multiplier", "attention_multiplier", "residual_multiplier"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_of_granite_must_be_above_zero(key: str, value: float, tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, "GraniteModel"), **{key: value})
    refused(folder, CheckpointError, f"config.json has {key} = {value}: it must be a number above 0")


def test_the_divisor_of_token_scores_must_be_above_zero(tmp_path: Path) -> None:
    folder = change_config(saved(tmp_path, "GraniteForCausalLM"), logits_scaling=0.0)
    refused(folder, CheckpointError, r"logits_scaling = 0\.0: it must be", score_tokens=("t", "he"))
    read(folder).weights().close()  # an embedder does not read it
