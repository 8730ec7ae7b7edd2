"""OLMo 2 (arXiv:2501.00656): Llama with norms on the outputs of attention and MLP, and over all heads of query and key.

OLMo 3 (arXiv:2512.13961) has layers with windows, which have rotary frequencies of their own.
"""

from __future__ import annotations

from typing import Any

from bei_build.families.decoder import (
    NO_TOKEN_LABELS,
    WEIGHTS,
    Rope,
    Windows,
    decoder_family,
    decoder_spec,
    output_norms,
    rms,
)
from bei_build.families.rope import rope_from_config
from bei_build.spec.model_spec import ModelSpec

# Also the names of EXAONE 4.
OUTPUT_NORM_WEIGHTS: dict[str, str | tuple[str, ...]] = {
    **WEIGHTS,
    "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
}


def _spec(config: Any, architecture: str, windows: Windows, rope: Rope | None) -> ModelSpec:
    bias = config.attention_bias
    spec = decoder_spec(
        config,
        architecture,
        bias=bias,
        output_bias=bias,
        qk_norm=rms(config),
        qk_norm_joint=True,
        windows=windows,
        rope=rope,
    )
    return output_norms(spec)


def _olmo2_spec(config: Any, architecture: str) -> ModelSpec:
    return _spec(config, architecture, "none", None)


def _olmo3_spec(config: Any, architecture: str) -> ModelSpec:
    return _spec(config, architecture, "by_type", rope_from_config)


FAMILY = decoder_family("olmo2", "Olmo2", _olmo2_spec, OUTPUT_NORM_WEIGHTS, NO_TOKEN_LABELS)
OLMO3_FAMILY = decoder_family("olmo3", "Olmo3", _olmo3_spec, OUTPUT_NORM_WEIGHTS, NO_TOKEN_LABELS)
