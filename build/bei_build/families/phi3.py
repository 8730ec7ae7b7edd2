"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219): Llama with joined projections, partial and LongRoPE rotations."""

from __future__ import annotations

from typing import Any

from bei_build.families.decoder import WEIGHTS, decoder_family, decoder_spec, rope_of_all
from bei_build.spec.model_spec import ModelSpec

# Gate and up are one tensor.
JOINED_MLP_WEIGHTS: dict[str, str | tuple[str, ...]] = {
    **WEIGHTS,
    "layers.{i}.mlp.gate": "layers.{i}.mlp.gate_up_proj",
    "layers.{i}.mlp.up": "layers.{i}.mlp.gate_up_proj",
}
_WEIGHTS = {
    **JOINED_MLP_WEIGHTS,
    "layers.{i}.attention.query": "layers.{i}.self_attn.qkv_proj",
    "layers.{i}.attention.key": "layers.{i}.self_attn.qkv_proj",
    "layers.{i}.attention.value": "layers.{i}.self_attn.qkv_proj",
}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return decoder_spec(config, architecture, windows="all", rope=rope_of_all(partial=True))


FAMILY = decoder_family("phi3", "Phi3", _spec_from_config, _WEIGHTS)
