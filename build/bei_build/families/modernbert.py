"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): pre-norm, rotary, gated MLP, local and global attention.

Its decoder (Ettin, arXiv:2507.11412) has the same layers, and windows of half the width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import Family, activation_named, embedder, masked_lm
from bei_build.families.decoder import is_causal, last_token_embedder, window
from bei_build.families.rope import rope_from_config
from bei_build.spec.head_layers import HeadLayer
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec, DenseSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormLayerSpec, NormSpec


def _norm(config: Any) -> NormSpec:
    return NormSpec(config.norm_eps, bias=config.norm_bias)


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    num_heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def layer(index: int, layer_type: str) -> LayerSpec:
        attention = AttentionSpec(
            num_heads,
            head_dim,
            num_kv_heads=num_heads,
            scale=head_dim**-0.5,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=config.sliding_window if layer_type == "sliding_attention" else None,
            rope=rope_from_config(config, head_dim, layer_type),
        )
        mlp = MLPSpec(
            config.intermediate_size,
            activation_named(config.hidden_activation),
            gated=True,
            bias=config.mlp_bias,
            down_bias=config.mlp_bias,
        )
        return LayerSpec(attention, mlp, _norm(config), "pre", attention_norm=index > 0)

    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size, norm=_norm(config)),
        layers=tuple(layer(index, layer_type) for index, layer_type in enumerate(config.layer_types)),
        final_norm=_norm(config),
    )


def _prediction_head(config: Any) -> tuple[HeadLayer, ...]:
    width = config.hidden_size
    activation = activation_named(config.classifier_activation)
    return (
        DenseSpec("head.dense", width, width, config.classifier_bias, activation),
        NormLayerSpec("head.norm", width, _norm(config)),
    )


def _classifier(config: Any) -> tuple[HeadSpec, ...]:
    layers = (*_prediction_head(config), DenseSpec("classifier", config.hidden_size, config.num_labels))
    return (HeadSpec("logits", (config.classifier_pooling,), layers=layers),)


def _token_classifier(config: Any) -> tuple[HeadSpec, ...]:
    layers = (*_prediction_head(config), DenseSpec("classifier", config.hidden_size, config.num_labels))
    return (HeadSpec("token_logits", token_layers=layers),)


def _masked_lm(config: Any) -> tuple[HeadSpec, ...]:
    (head,) = masked_lm(_norm(config), activation_named(config.classifier_activation))(config)
    decoder = DenseSpec("mlm.decoder", config.hidden_size, config.vocab_size, config.decoder_bias)
    return (HeadSpec(head.output, head.pooling, (*_prediction_head(config), decoder), head.layers),)


def _decoder_spec(config: Any, architecture: str) -> ModelSpec:
    """The encoder's layers with causal attention."""
    spec, causal = _spec_from_config(config, architecture), is_causal(config, architecture)
    layers = zip(spec.layers, config.layer_types, strict=True)

    def masked(layer: LayerSpec, layer_type: str) -> LayerSpec:
        return layer.with_attention(causal=causal, window=window(config, layer_type))

    return replace(spec, layers=tuple(masked(layer, layer_type) for layer, layer_type in layers))


def _decoder_classifier(config: Any) -> tuple[HeadSpec, ...]:
    classifier = DenseSpec("classifier", config.hidden_size, config.num_labels, config.classifier_bias)
    layers = (*_prediction_head(config), classifier)
    return (HeadSpec("logits", ("last",), layers=layers, passed_id=config.pad_token_id),)


FAMILY = Family(
    model_type="modernbert",
    architectures={
        "ModernBertModel": embedder,
        "ModernBertForMaskedLM": _masked_lm,
        "ModernBertForSequenceClassification": _classifier,
        "ModernBertForTokenClassification": _token_classifier,
    },
    prefix="model.",
    weights={
        "embeddings.word": "embeddings.tok_embeddings",
        "embeddings.norm": "embeddings.norm",
        "layers.{i}.attention.query": "layers.{i}.attn.Wqkv",
        "layers.{i}.attention.key": "layers.{i}.attn.Wqkv",
        "layers.{i}.attention.value": "layers.{i}.attn.Wqkv",
        "layers.{i}.attention.output": "layers.{i}.attn.Wo",
        "layers.{i}.attention_norm": "layers.{i}.attn_norm",
        "layers.{i}.mlp.gate": "layers.{i}.mlp.Wi",
        "layers.{i}.mlp.up": "layers.{i}.mlp.Wi",
        "layers.{i}.mlp.down": "layers.{i}.mlp.Wo",
        "layers.{i}.mlp_norm": "layers.{i}.mlp_norm",
        "final_norm": "final_norm",
        "head.dense": "head.dense",
        "head.norm": "head.norm",
        "classifier": "classifier",
        "mlm.decoder.weight": ("decoder.weight", "embeddings.tok_embeddings.weight"),
        "mlm.decoder.bias": "decoder.bias",
    },
    unused=("head.", "decoder."),
    spec_from_config=_spec_from_config,
)

DECODER_FAMILY = Family(
    model_type="modernbert-decoder",
    architectures={
        "ModernBertDecoderModel": last_token_embedder,
        "ModernBertDecoderForCausalLM": last_token_embedder,
        "ModernBertDecoderForSequenceClassification": _decoder_classifier,
    },
    prefix="model.",
    weights={
        **{name: stored for name, stored in FAMILY.weights.items() if not name.startswith("mlm.")},
        "layers.{i}.attention.query": "layers.{i}.attn.q_proj",
        "layers.{i}.attention.key": "layers.{i}.attn.k_proj",
        "layers.{i}.attention.value": "layers.{i}.attn.v_proj",
    },
    unused=("lm_head.", "decoder."),
    spec_from_config=_decoder_spec,
    attention_keys=("is_causal",),
)
