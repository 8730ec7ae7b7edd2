"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT with relative position biases; positions are counted as in
RoBERTa."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import Family, require
from bei_build.families.bert import ROBERTA_HEAD_WEIGHTS, WEIGHTS, bert_like_spec, roberta_architectures
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import RelativeBiasSpec

# Fixed in transformers: the padding index, the number of buckets, and the distance where they end.
_PADDING_ID = 1
_NUM_BUCKETS = 32
_MAX_DISTANCE = 128


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    spec = bert_like_spec(config, architecture, _PADDING_ID)
    require(config, "relative_attention_num_buckets", _NUM_BUCKETS)
    bias = RelativeBiasSpec(_NUM_BUCKETS, _MAX_DISTANCE)
    layers = tuple(layer.with_attention(relative_bias=bias) for layer in spec.layers)
    return replace(spec, layers=layers)


FAMILY = Family(
    model_type="mpnet",
    architectures=roberta_architectures("MPNet"),
    prefix="mpnet.",
    weights={
        **WEIGHTS,
        "relative_bias": "encoder.relative_attention_bias",
        "layers.{i}.attention.query": "encoder.layer.{i}.attention.attn.q",
        "layers.{i}.attention.key": "encoder.layer.{i}.attention.attn.k",
        "layers.{i}.attention.value": "encoder.layer.{i}.attention.attn.v",
        "layers.{i}.attention.output": "encoder.layer.{i}.attention.attn.o",
        "layers.{i}.attention_norm": "encoder.layer.{i}.attention.LayerNorm",
        **ROBERTA_HEAD_WEIGHTS,
    },
    unused=("pooler.", "lm_head.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
)
