"""DeBERTa, v2 and v3 (He et al., arXiv:2006.03654, arXiv:2111.09543): BERT with disentangled attention.

The first version has no buckets, and projections of its own for positions; the larger models of v2 have a convolution
after their first layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, HeadsOf, activation_named, embedder, masked_lm, require, token_classifier
from bei_build.families.bert import WEIGHTS, bert_like_spec
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import ConvolutionSpec, DenseSpec, DisentangledSpec, NormSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "relative_attention", True)
    require(config, "talking_head", False)
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
    attention = spec.attentions[0]
    attention = replace(attention, scale=(attention.head_dim * (1 + len(terms))) ** -0.5, disentangled=positions)
    embeddings = spec.embeddings
    if not getattr(config, "position_biased_input", True):
        embeddings = replace(embeddings, max_positions=0)
    layers = tuple(replace(layer, attention=attention) for layer in spec.layers)
    return replace(spec, embeddings=embeddings, layers=layers, convolution=_convolution(config))


def _convolution(config: Any) -> ConvolutionSpec | None:
    size = getattr(config, "conv_kernel_size", 0)
    if not size:
        return None
    require(config, "conv_groups", 1)
    if size % 2 == 0 or size < 0:
        raise CheckpointError(f"config.json has conv_kernel_size = {size}: it must be odd.")
    activation = activation_named(getattr(config, "conv_act", "tanh"))
    return ConvolutionSpec(size, activation, NormSpec(config.layer_norm_eps))


def _first_spec_from_config(config: Any, architecture: str) -> ModelSpec:
    spec = _spec_from_config(config, architecture)
    (layer, *_) = spec.layers
    positions = spec.attentions[0].disentangled
    assert positions is not None
    layer = layer.with_attention(key_bias=False, disentangled=replace(positions, key_bias=False))
    return replace(spec, layers=(layer,) * len(spec.layers))


def _classifier(config: Any) -> tuple[HeadSpec, ...]:
    """transformers' ContextPooler and a linear layer."""
    pooler = DenseSpec(
        "pooler", config.hidden_size, config.hidden_size, activation=activation_named(config.pooler_hidden_act)
    )
    return (
        HeadSpec("logits", ("cls",), layers=(pooler, DenseSpec("classifier", config.hidden_size, config.num_labels))),
    )


_HEADS: dict[str, HeadsOf] = {
    "Model": embedder,
    "ForMaskedLM": masked_lm(),
    "ForSequenceClassification": _classifier,
    "ForTokenClassification": token_classifier(),
}

FAMILY = Family(
    model_type="deberta-v2",
    architectures={f"DebertaV2{suffix}": heads for suffix, heads in _HEADS.items()},
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
        "convolution": "encoder.conv.conv",
        "convolution.norm": "encoder.conv.LayerNorm",
        "pooler": "pooler.dense",
        # The second names are those of the class without ``legacy``.
        "mlm.dense": ("cls.predictions.transform.dense", "lm_predictions.lm_head.dense"),
        "mlm.norm": ("cls.predictions.transform.LayerNorm", "lm_predictions.lm_head.LayerNorm"),
        "mlm.decoder.weight": ("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
        "mlm.decoder.bias": ("cls.predictions.decoder.bias", "cls.predictions.bias", "lm_predictions.lm_head.bias"),
    },
    unused=("pooler.", "lm_predictions.", "cls.", "mask_predictions.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
)

_ATTENTION = "encoder.layer.{i}.attention.self"
FIRST_FAMILY = replace(
    FAMILY,
    model_type="deberta",
    architectures={f"Deberta{suffix}": heads for suffix, heads in _HEADS.items()},
    weights={
        **FAMILY.weights,
        "layers.{i}.attention.query": f"{_ATTENTION}.in_proj",
        "layers.{i}.attention.key": f"{_ATTENTION}.in_proj",
        "layers.{i}.attention.value": f"{_ATTENTION}.in_proj",
        "layers.{i}.attention.query.bias": f"{_ATTENTION}.q_bias",
        "layers.{i}.attention.value.bias": f"{_ATTENTION}.v_bias",
        "layers.{i}.attention.position_key": f"{_ATTENTION}.pos_proj",
        "layers.{i}.attention.position_query": f"{_ATTENTION}.pos_q_proj",
    },
    joined_by_head=True,
    spec_from_config=_first_spec_from_config,
)
