"""RoBERTa (Liu et al. 2019, arXiv:1907.11692), XLM-RoBERTa (arXiv:1911.02116) and CamemBERT (arXiv:1911.03894).

BERT, but positions are counted from ``pad_token_id + 1`` (transformers: create_position_ids_from_input_ids).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families import bert, jina_v3
from bei_build.families.base import Family, HeadsOf, classifier, embedder, masked_lm, token_classifier
from bei_build.spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return bert.bert_like_spec(config, architecture, position_offset=config.pad_token_id + 1)


def _family(model_type: str, class_prefix: str) -> Family:
    heads: dict[str, HeadsOf] = {
        "Model": embedder,
        "ForMaskedLM": masked_lm(activation="gelu"),
        "ForSequenceClassification": classifier("classifier.dense", "classifier.out", activation="tanh"),
        "ForTokenClassification": token_classifier(),
    }
    return Family(
        model_type=model_type,
        architectures={f"{class_prefix}{suffix}": head for suffix, head in heads.items()},
        prefix="roberta.",
        weights={
            **bert.WEIGHTS,
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


FAMILY = _family("roberta", "Roberta")
XLM_FAMILY = replace(_family("xlm-roberta", "XLMRoberta"), variant=jina_v3.flash_variant)
CAMEMBERT_FAMILY = _family("camembert", "Camembert")
