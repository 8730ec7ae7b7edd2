"""BERT (Devlin et al. 2018, arXiv:1810.04805): learned positions, token types, post-norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei_build.families.base import (
    Family,
    HeadsOf,
    activation_named,
    classifier,
    embedder,
    late_interaction,
    masked_lm,
    require,
    token_classifier,
)
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import Activation, AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec

WEIGHTS = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{i}.attention.query": "encoder.layer.{i}.attention.self.query",
    "layers.{i}.attention.key": "encoder.layer.{i}.attention.self.key",
    "layers.{i}.attention.value": "encoder.layer.{i}.attention.self.value",
    "layers.{i}.attention.output": "encoder.layer.{i}.attention.output.dense",
    "layers.{i}.attention_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "layers.{i}.mlp.up": "encoder.layer.{i}.intermediate.dense",
    "layers.{i}.mlp.down": "encoder.layer.{i}.output.dense",
    "layers.{i}.mlp_norm": "encoder.layer.{i}.output.LayerNorm",
    "classifier": "classifier",
}
# Heads of RoBERTa's classes, whose names several families share.
ROBERTA_HEAD_WEIGHTS: Mapping[str, str | tuple[str, ...]] = {
    "classifier.dense": "classifier.dense",
    "classifier.out": "classifier.out_proj",
    "mlm.dense": "lm_head.dense",
    "mlm.norm": "lm_head.layer_norm",
    "mlm.decoder.weight": ("lm_head.decoder.weight", "embeddings.word_embeddings.weight"),
    "mlm.decoder.bias": ("lm_head.decoder.bias", "lm_head.bias"),
}


def roberta_architectures(class_prefix: str) -> dict[str, HeadsOf]:
    """The classes of a family with RoBERTa's heads."""
    heads = {
        "Model": embedder,
        "ForMaskedLM": masked_lm(activation="gelu"),
        "ForSequenceClassification": classifier("classifier.dense", "classifier.out", activation="tanh"),
        "ForTokenClassification": token_classifier(),
    }
    return {f"{class_prefix}{suffix}": head for suffix, head in heads.items()}


def bert_like_spec(config: Any, architecture: str, uncounted_id: int | None = None) -> ModelSpec:
    """The spec of a BERT-shaped config. With ``uncounted_id`` u, the n-th token other than u has row u + n of the
    position table, and u itself row u (transformers: create_position_ids_from_input_ids)."""
    require(config, "position_embedding_type", "absolute")
    return absolute_spec(config, architecture, uncounted_id)


def absolute_spec(
    config: Any, architecture: str, uncounted_id: int | None, activation: Activation | None = None
) -> ModelSpec:
    """The spec of a BERT-shaped config as in ``bert_like_spec``, for any type of positions in the config;
    ``activation`` overrides the config's."""
    require(config, "is_decoder", False)
    position_offset = uncounted_id or 0
    norm = NormSpec(config.layer_norm_eps)
    num_heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    layer = LayerSpec(
        attention=AttentionSpec(num_heads, head_dim, num_kv_heads=num_heads, scale=head_dim**-0.5),
        mlp=MLPSpec(config.intermediate_size, activation or activation_named(config.hidden_act)),
        norm=norm,
    )
    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings - position_offset,
            position_offset=position_offset,
            uncounted_id=uncounted_id,
            type_vocab_size=getattr(config, "type_vocab_size", 0),
            norm=norm,
        ),
        layers=(layer,) * config.num_hidden_layers,
    )


def pre_norm(spec: ModelSpec, *, embeddings_norm: bool = True) -> ModelSpec:
    """``spec`` with the norms of its layers in front, and one after the last layer; ``embeddings_norm``: keep the norm
    of the embeddings."""
    layer = replace(spec.layers[0], placement="pre")
    embeddings = spec.embeddings if embeddings_norm else replace(spec.embeddings, norm=None)
    return replace(spec, embeddings=embeddings, layers=(layer,) * len(spec.layers), final_norm=layer.norm)


FAMILY = Family(
    model_type="bert",
    architectures={
        "BertModel": embedder,
        "Contriever": embedder,  # facebook/contriever's own class: BertModel, and a mean
        "BertForPreTraining": embedder,
        "BertForMaskedLM": masked_lm(),
        "BertForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "BertForTokenClassification": token_classifier(),
        "HF_ColBERT": late_interaction("colbert"),  # the original ColBERT's class
    },
    prefix="bert.",
    weights={
        **WEIGHTS,
        "pooler": "pooler.dense",
        "colbert": "linear",
        "mlm.dense": "cls.predictions.transform.dense",
        "mlm.norm": "cls.predictions.transform.LayerNorm",
        "mlm.decoder.weight": ("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
        "mlm.decoder.bias": ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    },
    unused=("pooler.", "cls.", "embeddings.position_ids"),
    spec_from_config=bert_like_spec,
)
