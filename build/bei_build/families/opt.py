"""OPT (Zhang et al. 2022, arXiv:2205.01068): learned positions, LayerNorm, a plain MLP, biases."""

from __future__ import annotations

from typing import Any

from bei_build.families.base import Family, activation_named, require
from bei_build.families.decoder import NO_TOKEN_LABELS, architectures, is_causal
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec

_POSITION_OFFSET = 2  # the first two rows of the table are never used


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "word_embed_proj_dim", config.hidden_size)  # OPT-350M projects its embeddings
    heads, hidden, bias = config.num_attention_heads, config.hidden_size, config.enable_bias
    has_weights, is_first = config.layer_norm_elementwise_affine, config.do_layer_norm_before
    norm = NormSpec(1e-5, bias=has_weights, weight=has_weights)  # torch's default: the config has no key for its eps
    attention = AttentionSpec(
        heads,
        hidden // heads,
        heads,
        scale=(hidden // heads) ** -0.5,
        bias=bias,
        output_bias=bias,
        causal=is_causal(config, architecture),
    )
    mlp = MLPSpec(config.ffn_dim, activation_named(config.activation_function), bias=bias, down_bias=bias)
    layer = LayerSpec(attention, mlp, norm, "pre" if is_first else "post")
    embeddings = EmbeddingsSpec(
        config.vocab_size, max_positions=config.max_position_embeddings, position_offset=_POSITION_OFFSET
    )
    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=hidden,
        embeddings=embeddings,
        layers=(layer,) * config.num_hidden_layers,
        final_norm=norm if is_first and not config._remove_final_layer_norm else None,
    )


FAMILY = Family(
    model_type="opt",
    architectures=architectures("OPT", NO_TOKEN_LABELS),
    prefix="model.",
    weights={
        "embeddings.word": "decoder.embed_tokens",
        "embeddings.position": "decoder.embed_positions",
        "layers.{i}.attention.query": "decoder.layers.{i}.self_attn.q_proj",
        "layers.{i}.attention.key": "decoder.layers.{i}.self_attn.k_proj",
        "layers.{i}.attention.value": "decoder.layers.{i}.self_attn.v_proj",
        "layers.{i}.attention.output": "decoder.layers.{i}.self_attn.out_proj",
        "layers.{i}.attention_norm": "decoder.layers.{i}.self_attn_layer_norm",
        "layers.{i}.mlp.up": "decoder.layers.{i}.fc1",
        "layers.{i}.mlp.down": "decoder.layers.{i}.fc2",
        "layers.{i}.mlp_norm": "decoder.layers.{i}.final_layer_norm",
        "final_norm": "decoder.final_layer_norm",
        "score": "score",
        "lm_head.weight": ("lm_head.weight", "decoder.embed_tokens.weight"),
    },
    unused=("lm_head.", "score."),
    spec_from_config=_spec_from_config,
    attention_keys=("is_causal",),
)
