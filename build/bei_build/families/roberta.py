"""RoBERTa (Liu et al. 2019, arXiv:1907.11692) and models of its form: XLM-RoBERTa (arXiv:1911.02116), CamemBERT
(arXiv:1911.03894), data2vec for text (arXiv:2202.03555), LUKE for texts without entities (arXiv:2010.01057). Pre-norm
ones: XLM-RoBERTa XL (arXiv:2105.00572), efficient_mlm (arXiv:2202.08005).

BERT, but positions are counted from ``pad_token_id + 1`` over all tokens that are not padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families import bert, jina_v3
from bei_build.families.base import Family, classifier, padding_id
from bei_build.spec.model_spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return bert.bert_like_spec(config, architecture, padding_id(config))


def _xl_spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return bert.pre_norm(_spec_from_config(config, architecture), embeddings_norm=False)


def _pre_norm_spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return bert.pre_norm(_spec_from_config(config, architecture))


def _family(model_type: str, class_prefix: str, prefix: str = "roberta.") -> Family:
    return Family(
        model_type=model_type,
        architectures=bert.roberta_architectures(class_prefix),
        prefix=prefix,
        weights={**bert.WEIGHTS, **bert.ROBERTA_HEAD_WEIGHTS},
        unused=("pooler.", "lm_head.", "embeddings.position_ids"),
        spec_from_config=_spec_from_config,
    )


FAMILY = _family("roberta", "Roberta")
XLM_FAMILY = replace(_family("xlm-roberta", "XLMRoberta"), variant=jina_v3.flash_variant)
CAMEMBERT_FAMILY = _family("camembert", "Camembert")
DATA2VEC_FAMILY = _family("data2vec-text", "Data2VecText", "data2vec_text.")

_XL = _family("xlm-roberta-xl", "XLMRobertaXL")
XLM_XL_FAMILY = replace(
    _XL,
    weights={
        **_XL.weights,
        "layers.{i}.attention_norm": "encoder.layer.{i}.attention.self_attn_layer_norm",
        "layers.{i}.mlp_norm": "encoder.layer.{i}.LayerNorm",
        "final_norm": "encoder.LayerNorm",
    },
    spec_from_config=_xl_spec_from_config,
)

_PRE_NORM = _family("roberta-prelayernorm", "RobertaPreLayerNorm", "roberta_prelayernorm.")
PRE_NORM_FAMILY = replace(
    _PRE_NORM,
    weights={
        **_PRE_NORM.weights,
        "layers.{i}.attention_norm": "encoder.layer.{i}.attention.LayerNorm",
        "layers.{i}.mlp_norm": "encoder.layer.{i}.intermediate.LayerNorm",
        "final_norm": "LayerNorm",
    },
    spec_from_config=_pre_norm_spec_from_config,
)

_LUKE = _family("luke", "Luke", "luke.")
# Layers for attention to entities.
_ENTITY_QUERIES = tuple(
    f"encoder.layer.{index}.attention.self.{name}_query" for index in range(64) for name in ("w2e", "e2w", "e2e")
)
LUKE_FAMILY = replace(
    _LUKE,
    architectures={
        **_LUKE.architectures,
        "LukeForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
    },
    weights={**_LUKE.weights, "pooler": "pooler.dense"},
    unused=(*_LUKE.unused, "entity_embeddings.", "entity_predictions.", *_ENTITY_QUERIES),
)
