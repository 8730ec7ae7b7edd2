"""T5's encoder (Raffel et al. 2019, arXiv:1910.10683), and mT5's (arXiv:2010.11934): relative biases in place of
positions, matrices without biases, unscaled scores. The decoder is ignored."""

from __future__ import annotations

from typing import Any

from bei_build.families.base import Family, activation_named, embedder, require
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec, RelativeBiasSpec

_ATTENTION = "encoder.block.{i}.layer.0"
_MLP = "encoder.block.{i}.layer.1"


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "is_decoder", False)
    norm = NormSpec(config.layer_norm_epsilon, kind="rms", bias=False)
    attention = AttentionSpec(
        config.num_heads,
        config.d_kv,
        num_kv_heads=config.num_heads,
        scale=1.0,
        bias=False,
        output_bias=False,
        relative_bias=RelativeBiasSpec(config.relative_attention_num_buckets, config.relative_attention_max_distance),
    )
    activation = activation_named(config.dense_act_fn)
    mlp = MLPSpec(config.d_ff, activation, gated=config.is_gated_act, bias=False, down_bias=False)
    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.d_model,
        embeddings=EmbeddingsSpec(config.vocab_size),
        layers=(LayerSpec(attention, mlp, norm, "pre"),) * config.num_layers,
        final_norm=norm,
    )


def _family(model_type: str, class_prefix: str) -> Family:
    return Family(
        model_type=model_type,
        architectures={f"{class_prefix}{suffix}": embedder for suffix in ("EncoderModel", "ForConditionalGeneration")},
        prefix="",
        weights={
            "embeddings.word": ("shared", "encoder.embed_tokens"),
            "relative_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            "layers.{i}.attention.query": f"{_ATTENTION}.SelfAttention.q",
            "layers.{i}.attention.key": f"{_ATTENTION}.SelfAttention.k",
            "layers.{i}.attention.value": f"{_ATTENTION}.SelfAttention.v",
            "layers.{i}.attention.output": f"{_ATTENTION}.SelfAttention.o",
            "layers.{i}.attention_norm": f"{_ATTENTION}.layer_norm",
            # In a gated MLP wi_0 is the gate, and wi_1 its factor.
            "layers.{i}.mlp.gate": f"{_MLP}.DenseReluDense.wi_0",
            "layers.{i}.mlp.up": (f"{_MLP}.DenseReluDense.wi", f"{_MLP}.DenseReluDense.wi_1"),
            "layers.{i}.mlp.down": f"{_MLP}.DenseReluDense.wo",
            "layers.{i}.mlp_norm": f"{_MLP}.layer_norm",
            "final_norm": "encoder.final_layer_norm",
        },
        unused=("decoder.", "lm_head."),
        spec_from_config=_spec_from_config,
        reference_class=f"{class_prefix}EncoderModel",
        position_limit=False,
        usual_length=512,  # the length in training
        asks_about_prompts=True,  # INSTRUCTOR
    )


FAMILY = _family("t5", "T5")
MT5_FAMILY = _family("mt5", "MT5")
