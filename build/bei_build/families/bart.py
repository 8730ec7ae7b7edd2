"""BART (Lewis et al. 2019, arXiv:1910.13461) and the pre-norm mBART (Liu et al. 2020, arXiv:2001.08210): an encoder,
and a decoder that reads the same text shifted by one token. Positions start at row 2 of their tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from bei.errors import CheckpointError
from bei_build.families.base import Family, HeadsOf, activation_named, embedder, require
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec, DecoderSpec, DenseSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec

_POSITION_OFFSET = 2
_NORM = NormSpec(eps=1e-5)  # torch's default, which transformers does not override


def _bart_spec(config: Any, architecture: str) -> ModelSpec:
    _require_token(config, "decoder_start_token_id")
    return _spec(config, architecture, "post", config.decoder_start_token_id)


def _mbart_spec(config: Any, architecture: str) -> ModelSpec:
    _require_token(config, "pad_token_id")
    return _spec(config, architecture, "pre", start_id=None)


def _spec(config: Any, architecture: str, placement: Literal["post", "pre"], start_id: int | None) -> ModelSpec:
    _require_token(config, "eos_token_id")
    require(config, "is_causal", True, None)  # the class would not mask later tokens
    activation = activation_named(config.activation_function)
    attention = _attention(config, config.decoder_attention_heads)
    encoder_layer = LayerSpec(
        _attention(config, config.encoder_attention_heads),
        MLPSpec(config.encoder_ffn_dim, activation),
        _NORM,
        placement,
    )
    decoder_layer = LayerSpec(
        replace(attention, causal=True),
        MLPSpec(config.decoder_ffn_dim, activation),
        _NORM,
        placement,
        cross_attention=attention,
    )
    embeddings = EmbeddingsSpec(
        config.vocab_size,
        max_positions=config.max_position_embeddings,
        position_offset=_POSITION_OFFSET,
        norm=_NORM,
        scale=math.sqrt(config.d_model) if config.scale_embedding else 1.0,
    )
    final_norm = _NORM if placement == "pre" else None
    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.d_model,
        embeddings=embeddings,
        layers=(encoder_layer,) * config.encoder_layers,
        final_norm=final_norm,
        decoder=DecoderSpec(
            embeddings,
            (decoder_layer,) * config.decoder_layers,
            start_id,
            padding_id=config.pad_token_id if start_id is None else None,
            final_norm=final_norm,
        ),
        marked_id=config.eos_token_id,
    )


def _require_token(config: Any, key: str) -> None:
    if not isinstance(index := getattr(config, key), int):
        raise CheckpointError(f"config.json has {key} = {index!r}: it must be the id of one token.")


def _attention(config: Any, num_heads: int) -> AttentionSpec:
    head_dim = config.d_model // num_heads
    return AttentionSpec(num_heads, head_dim, num_kv_heads=num_heads, scale=head_dim**-0.5)


def _classifier(config: Any) -> tuple[HeadSpec, ...]:
    """Two linear layers on the state of the last end-of-sentence token."""
    width = config.d_model
    dense = DenseSpec("classifier.dense", width, width, activation="tanh")
    return (
        HeadSpec("logits", ("last_marked",), layers=(dense, DenseSpec("classifier.out", width, config.num_labels))),
    )


_SIDES = {"": "encoder", "decoder.": "decoder"}
_LAYER = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "mlp_norm": "final_layer_norm",
}
_CROSS = {
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key": "encoder_attn.k_proj",
    "cross_attention.value": "encoder_attn.v_proj",
    "cross_attention.output": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
}


def _family(model_type: str, class_prefix: str, spec_from_config: Any) -> Family:
    weights: dict[str, str | tuple[str, ...]] = {
        "embeddings.word": ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "classifier.dense": "classification_head.dense",
        "classifier.out": "classification_head.out_proj",
    }
    for ours, theirs in _SIDES.items():
        weights[f"{ours}embeddings.position"] = f"{theirs}.embed_positions"
        weights[f"{ours}embeddings.norm"] = f"{theirs}.layernorm_embedding"
        weights[f"{ours}final_norm"] = f"{theirs}.layer_norm"
        for part, stored in (_LAYER | _CROSS if ours else _LAYER).items():
            weights[f"{ours}layers.{{i}}.{part}"] = f"{theirs}.layers.{{i}}.{stored}"
    architectures: dict[str, HeadsOf] = {"Model": embedder, "ForSequenceClassification": _classifier}
    return Family(
        model_type=model_type,
        architectures={f"{class_prefix}{suffix}": heads for suffix, heads in architectures.items()},
        prefix="model.",
        weights=weights,
        unused=("final_logits_bias", "lm_head."),
        spec_from_config=spec_from_config,
    )


FAMILY = _family("bart", "Bart", _bart_spec)
MBART_FAMILY = _family("mbart", "MBart", _mbart_spec)
