"""Decoders whose class in transformers ignores what others read from config.json: it is refused, not applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bei.errors import CheckpointError
from tests.bei_build.reading import refused, saved
from tests.checkpoints import change_config


@pytest.mark.parametrize("name", ["Olmo2Model"])
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
