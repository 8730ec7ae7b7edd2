"""Phi-1, 1.5 and 2 (arXiv:2306.11644, 2309.05463): attention and a plain MLP both read one LayerNorm.

Heads rotate in part, and every matrix has a bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.decoder import WEIGHTS, decoder_family, decoder_spec, rope_of_all, with_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import NormSpec

_OWN_WEIGHTS = {
    "layers.{i}.attention.query_norm": "layers.{i}.self_attn.q_layernorm",
    "layers.{i}.attention.key_norm": "layers.{i}.self_attn.k_layernorm",
    "layers.{i}.attention.output": "layers.{i}.self_attn.dense",
    "layers.{i}.mlp.up": "layers.{i}.mlp.fc1",
    "layers.{i}.mlp.down": "layers.{i}.mlp.fc2",
    "final_norm": "final_layernorm",
}
# Scores of tokens have biases here, which reading rows of the matrix would leave out.
_WEIGHTS = {name: stored for name, stored in {**WEIGHTS, **_OWN_WEIGHTS}.items() if not name.startswith("lm_head")}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    norm = NormSpec(config.layer_norm_eps)
    spec = decoder_spec(
        config,
        architecture,
        bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        norm=norm,
        qk_norm=norm if config.qk_layernorm else None,
        rope=rope_of_all(partial=True),
    )
    return with_layers(spec, lambda _, layer: replace(layer, parallel=True))


FAMILY = decoder_family("phi", "Phi", _spec_from_config, _WEIGHTS)
