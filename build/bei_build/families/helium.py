"""Helium (Kyutai 2025): Llama whose neighbouring components of a head rotate together."""

from __future__ import annotations

from typing import Any

from bei_build.families.decoder import decoder_family, decoder_spec, rope_of_all
from bei_build.spec.model_spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    rope = rope_of_all(interleaved=True)
    return decoder_spec(config, architecture, bias=config.attention_bias, mlp_bias=config.mlp_bias, rope=rope)


FAMILY = decoder_family("helium", "Helium", _spec_from_config)
