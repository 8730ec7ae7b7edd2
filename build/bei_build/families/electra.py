"""ELECTRA (Clark et al. 2020, arXiv:2003.10555): BERT whose embeddings may be narrower than its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import Family, classifier, embedder, masked_lm, token_classifier
from bei_build.families.bert import WEIGHTS, bert_like_spec
from bei_build.spec.model_spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    spec = bert_like_spec(config, architecture)
    width = config.embedding_size if config.embedding_size != config.hidden_size else None
    return replace(spec, embeddings=replace(spec.embeddings, width=width))


FAMILY = Family(
    model_type="electra",
    architectures={
        "ElectraModel": embedder,
        "ElectraForPreTraining": embedder,
        "ElectraForMaskedLM": masked_lm(activation="gelu", width=lambda config: int(config.embedding_size)),
        "ElectraForSequenceClassification": classifier("classifier.dense", "classifier.out", activation="gelu"),
        "ElectraForTokenClassification": token_classifier(),
    },
    prefix="electra.",
    weights={
        **WEIGHTS,
        "embeddings.projection": "embeddings_project",
        "classifier.dense": "classifier.dense",
        "classifier.out": "classifier.out_proj",
        "mlm.dense": "generator_predictions.dense",
        "mlm.norm": "generator_predictions.LayerNorm",
        "mlm.decoder.weight": ("generator_lm_head.weight", "embeddings.word_embeddings.weight"),
        "mlm.decoder.bias": "generator_lm_head.bias",
    },
    unused=("discriminator_predictions.", "generator_", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
)
