"""RemBERT (Chung et al. 2020, arXiv:2010.12821): BERT with narrow embeddings and wide predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families import bert
from bei_build.families.base import Family, classifier, embedder, masked_lm, token_classifier
from bei_build.families.bert import bert_like_spec
from bei_build.spec.model_spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    spec = bert_like_spec(config, architecture)
    # Projected even where the widths are equal.
    return replace(spec, embeddings=replace(spec.embeddings, width=config.input_embedding_size))


FAMILY = Family(
    model_type="rembert",
    architectures={
        "RemBertModel": embedder,
        "RemBertForMaskedLM": masked_lm(width=lambda config: int(config.output_embedding_size)),
        "RemBertForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "RemBertForTokenClassification": token_classifier(),
    },
    prefix="rembert.",
    weights={
        **bert.WEIGHTS,
        "embeddings.projection": "encoder.embedding_hidden_mapping_in",
        "pooler": "pooler.dense",
        "mlm.dense": "cls.predictions.dense",
        "mlm.norm": "cls.predictions.LayerNorm",
        "mlm.decoder": "cls.predictions.decoder",
    },
    unused=("pooler.", "cls.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
)
