"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): Llama with LayerNorm, a plain MLP, biases and a window."""

from __future__ import annotations

from typing import Any

from bei_build.families.decoder import WEIGHTS, decoder_family, decoder_spec
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import NormSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    bias, norm = config.use_bias, NormSpec(config.norm_epsilon)
    return decoder_spec(
        config,
        architecture,
        bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        gated=False,
        norm=norm,
        windows="all",
    )


FAMILY = decoder_family(
    "starcoder2",
    "Starcoder2",
    _spec_from_config,
    {**WEIGHTS, "layers.{i}.mlp.up": "layers.{i}.mlp.c_fc", "layers.{i}.mlp.down": "layers.{i}.mlp.c_proj"},
)
