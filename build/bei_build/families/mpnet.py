"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT with relative position biases; positions are counted as in
RoBERTa."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import Family, classifier, embedder, masked_lm, require, token_classifier
from bei_build.families.bert import WEIGHTS, bert_like_spec
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
    layers = tuple(replace(layer, attention=replace(layer.attention, relative_bias=bias)) for layer in spec.layers)
    return replace(spec, layers=layers)


FAMILY = Family(
    model_type="mpnet",
    architectures={
        "MPNetModel": embedder,
        "MPNetForMaskedLM": masked_lm(activation="gelu"),
        "MPNetForSequenceClassification": classifier("classifier.dense", "classifier.out", activation="tanh"),
        "MPNetForTokenClassification": token_classifier(),
    },
    prefix="mpnet.",
    weights={
        **WEIGHTS,
        "relative_bias": "encoder.relative_attention_bias",
        "layers.{i}.attention.query": "encoder.layer.{i}.attention.attn.q",
        "layers.{i}.attention.key": "encoder.layer.{i}.attention.attn.k",
        "layers.{i}.attention.value": "encoder.layer.{i}.attention.attn.v",
        "layers.{i}.attention.output": "encoder.layer.{i}.attention.attn.o",
        "layers.{i}.attention_norm": "encoder.layer.{i}.attention.LayerNorm",
        "classifier.dense": "classifier.dense",
        "classifier.out": "classifier.out_proj",
        "mlm.dense": "lm_head.dense",
        "mlm.norm": "lm_head.layer_norm",
        "mlm.decoder.weight": ("lm_head.decoder.weight", "embeddings.word_embeddings.weight"),
        "mlm.decoder.bias": ("lm_head.decoder.bias", "lm_head.bias"),
    },
    unused=("pooler.", "lm_head.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
)
