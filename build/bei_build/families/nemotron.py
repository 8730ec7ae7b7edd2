"""Nemotron-4 and Minitron (arXiv:2402.16819, 2407.14679): LayerNorm that multiplies by 1 + weight, a plain MLP with
squared ReLU, and partial rotations of heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.decoder import decoder_family, decoder_spec, rope_of_all
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import NormSpec

_OFFSET = 1.0


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    return decoder_spec(
        config,
        architecture,
        bias=bias,
        output_bias=bias,
        mlp_bias=config.mlp_bias,
        gated=False,
        norm=NormSpec(config.norm_eps, offset=_OFFSET),
        rope=rope_of_all(partial=True),
    )


FAMILY = replace(decoder_family("nemotron", "Nemotron", _spec_from_config), norm_offset=_OFFSET)
