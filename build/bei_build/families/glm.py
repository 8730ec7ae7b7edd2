"""GLM-4 of 2024 (arXiv:2406.12793) and of 2025 (Glm4: norms on both sides): Llama with gate and up in one tensor.

Neighbouring components of half a head rotate together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.decoder import decoder_family, decoder_spec, rope_of_all, with_layers
from bei_build.families.phi3 import JOINED_MLP_WEIGHTS
from bei_build.spec.model_spec import ModelSpec

_GLM4_WEIGHTS = {
    **JOINED_MLP_WEIGHTS,
    "layers.{i}.attention_post_norm": "layers.{i}.post_self_attn_layernorm",
    "layers.{i}.mlp_post_norm": "layers.{i}.post_mlp_layernorm",
}


def _glm_spec(config: Any, architecture: str) -> ModelSpec:
    rope = rope_of_all(partial=True, interleaved=True)
    return decoder_spec(config, architecture, bias=config.attention_bias, rope=rope)


def _glm4_spec(config: Any, architecture: str) -> ModelSpec:
    return with_layers(_glm_spec(config, architecture), lambda _, layer: replace(layer, placement="both"))


FAMILY = decoder_family("glm", "Glm", _glm_spec, JOINED_MLP_WEIGHTS)
GLM4_FAMILY = decoder_family("glm4", "Glm4", _glm4_spec, _GLM4_WEIGHTS)
