"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT without token types, other names."""

from __future__ import annotations

from typing import Any

from bei_build.families.base import Family, activation_named, classifier, embedder, masked_lm, token_classifier
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec

_NORM = NormSpec(1e-12)  # transformers hard-codes it: DistilBertConfig has no layer_norm_eps


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    head_dim = config.dim // config.n_heads
    layer = LayerSpec(
        attention=AttentionSpec(config.n_heads, head_dim, num_kv_heads=config.n_heads, scale=head_dim**-0.5),
        mlp=MLPSpec(config.hidden_dim, activation_named(config.activation)),
        norm=_NORM,
    )
    return ModelSpec(
        family="distilbert",
        architecture=architecture,
        hidden_size=config.dim,
        embeddings=EmbeddingsSpec(
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            norm=_NORM,
        ),
        layers=(layer,) * config.n_layers,
    )


FAMILY = Family(
    model_type="distilbert",
    architectures={
        "DistilBertModel": embedder,
        "DistilBertForMaskedLM": masked_lm(_NORM),
        "DistilBertForSequenceClassification": classifier("pre_classifier", "classifier", activation="relu"),
        "DistilBertForTokenClassification": token_classifier(),
    },
    prefix="distilbert.",
    weights={
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.position": "embeddings.position_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.{i}.attention.query": "transformer.layer.{i}.attention.q_lin",
        "layers.{i}.attention.key": "transformer.layer.{i}.attention.k_lin",
        "layers.{i}.attention.value": "transformer.layer.{i}.attention.v_lin",
        "layers.{i}.attention.output": "transformer.layer.{i}.attention.out_lin",
        "layers.{i}.attention_norm": "transformer.layer.{i}.sa_layer_norm",
        "layers.{i}.mlp.up": "transformer.layer.{i}.ffn.lin1",
        "layers.{i}.mlp.down": "transformer.layer.{i}.ffn.lin2",
        "layers.{i}.mlp_norm": "transformer.layer.{i}.output_layer_norm",
        "pre_classifier": "pre_classifier",
        "classifier": "classifier",
        "mlm.dense": "vocab_transform",
        "mlm.norm": "vocab_layer_norm",
        "mlm.decoder.weight": ("vocab_projector.weight", "embeddings.word_embeddings.weight"),
        "mlm.decoder.bias": "vocab_projector.bias",
    },
    unused=("vocab_", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
)
