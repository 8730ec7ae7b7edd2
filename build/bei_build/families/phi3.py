"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219): Llama with joined projections, partial and LongRoPE rotations."""

from __future__ import annotations

from bei_build.families.decoder import WEIGHTS, decoder_family, decoder_spec

FAMILY = decoder_family(
    "phi3",
    "Phi3",
    decoder_spec,
    weights={
        **WEIGHTS,
        "layers.{i}.attention.query": "layers.{i}.self_attn.qkv_proj",
        "layers.{i}.attention.key": "layers.{i}.self_attn.qkv_proj",
        "layers.{i}.attention.value": "layers.{i}.self_attn.qkv_proj",
        "layers.{i}.mlp.gate": "layers.{i}.mlp.gate_up_proj",
        "layers.{i}.mlp.up": "layers.{i}.mlp.gate_up_proj",
    },
)
