"""EmbeddingGemma 2's text model (Google 2026): Gemma 4's layers without a causal mask, narrow and wide ones, each with
vectors of tokens of its own, and a linear layer on every token's state.

Images, video and audio are encoded by towers beside it, which are not built: texts alone are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named
from bei_build.families.decoder import rms
from bei_build.families.gemma import WEIGHTS_OF_BOTH_NORMS
from bei_build.families.rope import rope_from_config
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    AttentionSpec,
    DenseSpec,
    EmbeddingsSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
)

_MODEL_TYPE = "embedding_gemma2_text"
_TYPES = "sliding_attention", "full_attention"


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model, as its own class reads it."""
    if raw.get("model_type") == _MODEL_TYPE:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json of EmbeddingGemma 2 lacks text_config.")
    return {**text, "architectures": raw["architectures"]}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    norm, width = rms(config), config.hidden_size_per_layer_input
    activation = activation_named(config.hidden_activation)

    def layer(index: int, layer_type: str) -> LayerSpec:
        if layer_type not in _TYPES:
            raise CheckpointError(f"config.json has a layer of type {layer_type!r}; supported: {', '.join(_TYPES)}.")
        own = config.per_layer_config[index]
        attention = AttentionSpec(
            config.num_attention_heads,
            own.head_dim,
            num_kv_heads=own.num_key_value_heads,
            scale=1.0,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=int(config.sliding_window) if layer_type == "sliding_attention" else None,
            rope=rope_from_config(config, own.head_dim, layer_type),
            qk_norm=norm,
            value_norm=NormSpec(config.rms_norm_eps, kind="rms", bias=False, weight=False),
        )
        mlp = MLPSpec(config.intermediate_size, activation, gated=True, bias=False, down_bias=False)
        own_input = LayerInputSpec(width, activation)
        return LayerSpec(attention, mlp, norm, "both", layer_input=own_input, scaled=True)

    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size, scale=config.hidden_size**0.5),
        layers=tuple(layer(index, layer_type) for index, layer_type in enumerate(config.layer_types)),
        # The class divides by the width's root before the norm; the norm undoes that but for its eps.
        layer_inputs=LayerInputsSpec(width, NormSpec(config.rms_norm_eps * config.hidden_size, kind="rms", bias=False)),
        final_norm=norm,
    )


def _projected(config: Any) -> tuple[HeadSpec, ...]:
    """Every token's state through a linear layer, then the mean."""
    layer = DenseSpec("embedding_projection", config.hidden_size, config.embedding_dim, bias=False)
    return (HeadSpec("embedding", ("mean",), token_layers=(layer,)),)


FAMILY = Family(
    model_type=_MODEL_TYPE,
    aliases=("embedding_gemma2",),
    architectures={"EmbeddingGemma2Model": _projected, "EmbeddingGemma2TextModel": _projected},
    prefix="language_model.",
    weights={
        **{name: stored for name, stored in WEIGHTS_OF_BOTH_NORMS.items() if name not in ("score", "lm_head.weight")},
        "layers.{i}.layer_input.gate": "layers.{i}.ple_block.per_layer_input_gate",
        "layers.{i}.layer_input.output": "layers.{i}.ple_block.per_layer_projection",
        "layers.{i}.layer_input_post_norm": "layers.{i}.ple_block.post_per_layer_input_norm",
        "layers.{i}.scale.weight": "layers.{i}.layer_scalar",
        "layer_inputs.projection": "ple.per_layer_model_projection",
        "layer_inputs.norm": "ple.per_layer_projection_norm",
        "embedding_projection": "embedding_projection",
    },
    unused=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    spec_from_config=_spec_from_config,
    translate=_text_config,
    reference_class="EmbeddingGemma2TextModel",
    reference_names={r"^language_model\.": ""},
    reference_heads=("embedding_projection",),
    overflows_fp16=True,
)
