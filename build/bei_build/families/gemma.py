"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118: soft caps, windows), Gemma 3 text (arXiv:2503.19786: norms of
query and key).

Embeddings are scaled by the square root of the width, norms multiply by 1 + weight; from Gemma 2 on there are norms on
both sides of attention and MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import activation_named, embedder
from bei_build.families.decoder import WEIGHTS, decoder_family, decoder_spec, is_causal, rms, score, window
from bei_build.families.rope import rope_from_config
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec

_OFFSET = 1.0

WEIGHTS_OF_BOTH_NORMS: dict[str, str | tuple[str, ...]] = {
    **WEIGHTS,
    "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_norm": "layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
}


def _check_attention(config: Any) -> None:
    """Refuse a setting that transformers' Gemma and Gemma 2 read in two ways: masks ignore it, and SDPA without a mask
    obeys it."""
    if getattr(config, "use_bidirectional_attention", None) and getattr(config, "is_causal", True):
        raise CheckpointError(
            f"config.json has use_bidirectional_attention, which transformers' {config.model_type} obeys or not, by "
            "its implementation of attention: say --attention bidirectional, or --attention causal."
        )


def _spec(config: Any, architecture: str, *, softcap: float | None, qk_norm: NormSpec | None) -> ModelSpec:
    causal = is_causal(config, architecture)
    per_type = "full_attention" in config.rope_parameters or "sliding_attention" in config.rope_parameters

    def layer(layer_type: str) -> LayerSpec:
        attention = AttentionSpec(
            config.num_attention_heads,
            config.head_dim,
            num_kv_heads=config.num_key_value_heads,
            scale=config.query_pre_attn_scalar**-0.5,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            causal=causal,
            window=window(config, layer_type),
            rope=rope_from_config(config, config.head_dim, layer_type if per_type else None),
            qk_norm=qk_norm,
            softcap=softcap,
        )
        activation = activation_named(config.hidden_activation)
        mlp = MLPSpec(config.intermediate_size, activation, gated=True, bias=False, down_bias=False)
        return LayerSpec(attention, mlp, rms(config, _OFFSET), "both")

    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size, scale=config.hidden_size**0.5),
        layers=tuple(layer(layer_type) for layer_type in config.layer_types),
        final_norm=rms(config, _OFFSET),
    )


def _gemma_spec(config: Any, architecture: str) -> ModelSpec:
    _check_attention(config)
    bias = config.attention_bias
    spec = decoder_spec(config, architecture, bias=bias, output_bias=bias)
    norm = rms(config, _OFFSET)
    return replace(
        spec,
        embeddings=EmbeddingsSpec(config.vocab_size, scale=config.hidden_size**0.5),
        layers=tuple(replace(layer, norm=norm) for layer in spec.layers),
        final_norm=norm,
    )


def _gemma2_spec(config: Any, architecture: str) -> ModelSpec:
    _check_attention(config)
    return _spec(config, architecture, softcap=config.attn_logit_softcapping, qk_norm=None)


def _gemma3_spec(config: Any, architecture: str) -> ModelSpec:
    return _spec(config, architecture, softcap=config.attn_logit_softcapping, qk_norm=rms(config, _OFFSET))


FAMILY = replace(decoder_family("gemma", "Gemma", _gemma_spec), norm_offset=_OFFSET)
GEMMA2_FAMILY = replace(decoder_family("gemma2", "Gemma2", _gemma2_spec, WEIGHTS_OF_BOTH_NORMS), norm_offset=_OFFSET)

_GEMMA3 = decoder_family("gemma3_text", "Gemma3", _gemma3_spec, WEIGHTS_OF_BOTH_NORMS)
GEMMA3_FAMILY = replace(
    _GEMMA3,
    architectures={
        "Gemma3TextModel": embedder,
        "Gemma3ForCausalLM": _GEMMA3.architectures["Gemma3ForCausalLM"],
        "Gemma3TextForSequenceClassification": score,
    },
    norm_offset=_OFFSET,
)
