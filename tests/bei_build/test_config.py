"""Settings of a build."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bei.config.sources import BUILD_SETTINGS, load
from bei.errors import ConfigError
from bei_build.config import BuildConfig


def test_the_runtime_knows_the_names_of_all_settings() -> None:
    assert {field.name for field in dataclasses.fields(BuildConfig)} == BUILD_SETTINGS


def test_every_setting_has_a_help_text() -> None:
    assert all(field.metadata["help"] for field in dataclasses.fields(BuildConfig))


def test_a_model_is_required() -> None:
    with pytest.raises(ConfigError, match="needs a model: a checkpoint folder, an installed package, or a hub id"):
        BuildConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "tpu"}, "target must be one of auto, cpu, tensorrt, tensorrt-rtx, cuda, cuda-twin, trtllm, not"),
        ({"precision": "fp64"}, "precision must be one of auto, bf16"),
        ({"pooling": "median"}, "pooling must be one of cls, max, mean, .*not 'median'"),
        ({"reference": "onnx"}, "reference must be one of auto, hf, module, engine"),
        ({"min_cosine": 1.5}, "min_cosine must be from -1 to 1, not 1.5"),
        ({"verify_budget": 0.0}, "verify_budget must be above 0 and at most 604,800 seconds, not 0"),
        ({"verify_budget": float("inf")}, "verify_budget must be above 0 and at most 604,800 seconds, not inf"),
        ({"verify": False, "verify_budget": 5.0}, "verify_budget has no meaning without verification: leave it out"),
        ({"verify": False, "verify_retrieval": True}, "verify_retrieval has no meaning without verification"),
        ({"verify": False, "min_cosine": 0.9}, "min_cosine has no meaning without verification"),
        ({"verify": False, "reference": "hf"}, "reference has no meaning without verification"),
        ({"verify": False, "allow_below_threshold": True}, "allow_below_threshold has no meaning without"),
        ({"max_seq_len": 0}, "max_seq_len must be from 1 to 16,777,216 tokens, not 0"),
        ({"max_num_tokens": -1}, "max_num_tokens must be from 1 to"),
        ({"max_batch_size": 0}, "max_batch_size must be from 1 to"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(model="m", **settings)


def test_choices_hold_for_the_environment_too() -> None:
    with pytest.raises(ConfigError, match="pooling must be one of"):
        load(BuildConfig, {"model": "m"}, env={"BEI_POOLING": "average"})
