"""Qwen2 (arXiv:2407.10671: biases of query, key, value) and Qwen3 (arXiv:2505.09388: norms of query and key)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.decoder import decoder_family, decoder_spec, rms
from bei_build.spec import DenseSpec, HeadSpec, ModelSpec


def _qwen2_spec(config: Any, architecture: str) -> ModelSpec:
    return decoder_spec(config, architecture, bias=True, windows="by_type")


def _qwen3_spec(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    return decoder_spec(config, architecture, bias=bias, output_bias=bias, qk_norm=rms(config), windows="by_type")


def _reward(config: Any) -> tuple[HeadSpec, ...]:
    """Qwen2.5-Math-RM (arXiv:2409.12122, remote code): two linear layers on the last token's state, one score."""
    width = config.hidden_size
    layers = (DenseSpec("reward.0", width, width, activation="relu"), DenseSpec("reward.2", width, 1))
    return (HeadSpec("logits", ("last",), layers=layers),)


_QWEN2 = decoder_family("qwen2", "Qwen2", _qwen2_spec)
QWEN2_FAMILY = replace(
    _QWEN2,
    architectures={**_QWEN2.architectures, "Qwen2ForRewardModel": _reward},
    weights={**_QWEN2.weights, "reward.0": "score.0", "reward.2": "score.2"},
    remote_classes=("Qwen2ForRewardModel",),
)
QWEN3_FAMILY = decoder_family("qwen3", "Qwen3", _qwen3_spec)
