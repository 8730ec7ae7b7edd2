"""OLMo 2 (arXiv:2501.00656): Llama with norms on what attention and MLP give, and over all heads of query and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.decoder import WEIGHTS, decoder_family, decoder_spec, rms
from bei_build.spec import ModelSpec

_WEIGHTS = {
    **WEIGHTS,
    "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    spec = decoder_spec(config, architecture, bias=bias, output_bias=bias, qk_norm=rms(config), qk_norm_joint=True)
    return replace(spec, layers=tuple(replace(layer, placement="output") for layer in spec.layers))


FAMILY = decoder_family("olmo2", "Olmo2", _spec_from_config, _WEIGHTS)
