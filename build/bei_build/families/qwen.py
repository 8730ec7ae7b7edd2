"""Qwen2 (arXiv:2407.10671: biases of query, key, value) and Qwen3 (arXiv:2505.09388: norms of query and key)."""

from __future__ import annotations

from typing import Any

from bei_build.families.decoder import decoder_family, decoder_spec, rms
from bei_build.spec import ModelSpec


def _qwen2_spec(config: Any, architecture: str) -> ModelSpec:
    return decoder_spec(config, architecture, bias=True, windows="by_type")


def _qwen3_spec(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    return decoder_spec(config, architecture, bias=bias, output_bias=bias, qk_norm=rms(config), windows="by_type")


QWEN2_FAMILY = decoder_family("qwen2", "Qwen2", _qwen2_spec)
QWEN3_FAMILY = decoder_family("qwen3", "Qwen3", _qwen3_spec)
