"""DeBERTa v2 and v3 (He et al., arXiv:2006.03654, arXiv:2111.09543): BERT with disentangled attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, embedder, require, token_classifier
from bei_build.families.bert import WEIGHTS, bert_like_spec
from bei_build.spec import DenseSpec, DisentangledSpec, HeadSpec, ModelSpec, NormSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "relative_attention", True)
    require(config, "conv_kernel_size", 0)
    require(config, "embedding_size", config.hidden_size)
    spec = bert_like_spec(config, architecture)
    longest = config.max_relative_positions if config.max_relative_positions > 0 else config.max_position_embeddings
    buckets = getattr(config, "position_buckets", -1)
    terms = set(config.pos_att_type or ())
    if terms - {"c2p", "p2c"}:
        raise CheckpointError(f"config.json has pos_att_type {config.pos_att_type!r}; supported: c2p and p2c.")
    positions = DisentangledSpec(
        span=buckets if buckets > 0 else longest,
        buckets=buckets > 0,
        max_distance=longest,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        share_keys=getattr(config, "share_att_key", False),
        norm=NormSpec(config.layer_norm_eps) if "layer_norm" in getattr(config, "norm_rel_ebd", "none") else None,
    )
    attention = spec.layers[0].attention
    attention = replace(attention, scale=(attention.head_dim * (1 + len(terms))) ** -0.5, disentangled=positions)
    embeddings = spec.embeddings
    if not getattr(config, "position_biased_input", True):
        embeddings = replace(embeddings, max_positions=0)
    return replace(
        spec, embeddings=embeddings, layers=tuple(replace(layer, attention=attention) for layer in spec.layers)
    )


def _classifier(config: Any) -> tuple[HeadSpec, ...]:
    """transformers' ContextPooler and a linear layer."""
    pooler = DenseSpec(
        "pooler", config.hidden_size, config.hidden_size, activation=activation_named(config.pooler_hidden_act)
    )
    return (
        HeadSpec("logits", ("cls",), layers=(pooler, DenseSpec("classifier", config.hidden_size, config.num_labels))),
    )


FAMILY = Family(
    model_type="deberta-v2",
    architectures={
        "DebertaV2Model": embedder,
        "DebertaV2ForSequenceClassification": _classifier,
        "DebertaV2ForTokenClassification": token_classifier(),
    },
    prefix="deberta.",
    weights={
        **WEIGHTS,
        "relative_positions": "encoder.rel_embeddings",
        "relative_positions_norm": "encoder.LayerNorm",
        "layers.{i}.attention.query": "encoder.layer.{i}.attention.self.query_proj",
        "layers.{i}.attention.key": "encoder.layer.{i}.attention.self.key_proj",
        "layers.{i}.attention.value": "encoder.layer.{i}.attention.self.value_proj",
        "layers.{i}.attention.position_key": "encoder.layer.{i}.attention.self.pos_key_proj",
        "layers.{i}.attention.position_query": "encoder.layer.{i}.attention.self.pos_query_proj",
        "pooler": "pooler.dense",
    },
    unused=("pooler.", "lm_predictions.", "cls.", "mask_predictions.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
)
