"""ALBERT (Lan et al. 2019, arXiv:1909.11942): BERT whose layers share their weights, with narrow embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, classifier, embedder, masked_lm, require, token_classifier
from bei_build.families.bert import bert_like_spec
from bei_build.spec.model_spec import ModelSpec

_LAYER = "encoder.albert_layer_groups.{i}.albert_layers.0"


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "inner_group_num", 1)
    num_groups, num_layers = config.num_hidden_groups, config.num_hidden_layers
    if not 1 <= num_groups <= num_layers:
        raise CheckpointError(
            f"config.json has num_hidden_groups = {num_groups} for {num_layers} layers: each group must have a layer."
        )
    spec = bert_like_spec(config, architecture)
    return replace(
        spec,
        # Projected even where the widths are equal.
        embeddings=replace(spec.embeddings, width=config.embedding_size),
        # Floating-point division, as in transformers.
        weights_of=tuple(int(index / (num_layers / num_groups)) for index in range(num_layers)),
    )


FAMILY = Family(
    model_type="albert",
    architectures={
        "AlbertModel": embedder,
        "AlbertForPreTraining": embedder,
        "AlbertForMaskedLM": masked_lm(width=lambda config: int(config.embedding_size)),
        "AlbertForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "AlbertForTokenClassification": token_classifier(),
    },
    prefix="albert.",
    weights={
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.position": "embeddings.position_embeddings",
        "embeddings.type": "embeddings.token_type_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "embeddings.projection": "encoder.embedding_hidden_mapping_in",
        "layers.{i}.attention.query": f"{_LAYER}.attention.query",
        "layers.{i}.attention.key": f"{_LAYER}.attention.key",
        "layers.{i}.attention.value": f"{_LAYER}.attention.value",
        "layers.{i}.attention.output": f"{_LAYER}.attention.dense",
        "layers.{i}.attention_norm": f"{_LAYER}.attention.LayerNorm",
        "layers.{i}.mlp.up": f"{_LAYER}.ffn",
        "layers.{i}.mlp.down": f"{_LAYER}.ffn_output",
        "layers.{i}.mlp_norm": f"{_LAYER}.full_layer_layer_norm",
        "pooler": "pooler",
        "classifier": "classifier",
        "mlm.dense": "predictions.dense",
        "mlm.norm": "predictions.LayerNorm",
        "mlm.decoder.weight": ("predictions.decoder.weight", "embeddings.word_embeddings.weight"),
        "mlm.decoder.bias": ("predictions.decoder.bias", "predictions.bias"),
    },
    unused=("pooler.", "predictions.", "sop_classifier.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
)
