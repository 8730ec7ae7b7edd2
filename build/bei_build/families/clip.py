"""CLIP (Radford et al. 2021, arXiv:2103.00020): a causal encoder of texts, pooled at their ends, and a vision
transformer, pooled at its class token.

A family reads one of the two towers, and ignores the other's config and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, require
from bei_build.families.vision import VisionFamily, encoder_layers, patches_of, vision_part
from bei_build.spec.head_layers import HeadLayer
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    AttentionSpec,
    DenseSpec,
    EmbeddingsSpec,
    LayerSpec,
    MLPSpec,
    NormLayerSpec,
    NormSpec,
    Pooling,
)

_LAYER = "encoder.layers.{i}"
_UNPROJECTED = "CLIPVisionModel"
# Configs before transformers 4.31 say 2, whatever the vocabulary: their models pool at the largest id, which was that
# of the end token.
_UNKNOWN_END = 2


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "is_decoder", False)
    require(config, "is_causal", True, None)  # the class would not mask later tokens
    norm = NormSpec(config.layer_norm_eps)
    num_heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    layer = LayerSpec(
        AttentionSpec(num_heads, head_dim, num_kv_heads=num_heads, scale=head_dim**-0.5, causal=True),
        MLPSpec(config.intermediate_size, activation_named(config.hidden_act)),
        norm,
        placement="pre",
    )
    return ModelSpec(
        family="clip",
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size, config.max_position_embeddings),
        layers=(layer,) * config.num_hidden_layers,
        final_norm=norm,
        marked_id=config.eos_token_id,
    )


def _of_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a whole model's config, which has the width of both towers' embeddings."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        if raw.get("model_type") == "clip":
            raise CheckpointError("config.json has no text_config: download the checkpoint again.")
        return raw
    own = {key: raw[key] for key in ("projection_dim", "architectures", "model_type") if key in raw}
    return {**text, **_override(raw, "text"), **own}


def _override(raw: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """What wins over a part of a whole model's config, its defaults too: a key of early versions of transformers
    (``CLIPConfig.__post_init__``)."""
    from transformers import CLIPTextConfig, CLIPVisionConfig

    given = raw.get(f"{part}_config_dict")
    if not isinstance(given, dict):
        return {}
    config: dict[str, Any] = (CLIPTextConfig if part == "text" else CLIPVisionConfig)(**given).to_dict()
    return config


def _pooling(config: Any) -> tuple[Pooling, ...]:
    return ("largest_id",) if config.eos_token_id == _UNKNOWN_END else ("first_marked",)


def _embedder(config: Any) -> tuple[HeadSpec, ...]:
    return (HeadSpec("embedding", _pooling(config)),)


def _projected(config: Any) -> tuple[HeadSpec, ...]:
    layer = DenseSpec("projection", config.hidden_size, config.projection_dim, bias=False)
    return (HeadSpec("embedding", _pooling(config), layers=(layer,)),)


# Also SigLIP's.
LAYERS = {
    "layers.{i}.attention.query": f"{_LAYER}.self_attn.q_proj",
    "layers.{i}.attention.key": f"{_LAYER}.self_attn.k_proj",
    "layers.{i}.attention.value": f"{_LAYER}.self_attn.v_proj",
    "layers.{i}.attention.output": f"{_LAYER}.self_attn.out_proj",
    "layers.{i}.attention_norm": f"{_LAYER}.layer_norm1",
    "layers.{i}.mlp.up": f"{_LAYER}.mlp.fc1",
    "layers.{i}.mlp.down": f"{_LAYER}.mlp.fc2",
    "layers.{i}.mlp_norm": f"{_LAYER}.layer_norm2",
}

FAMILY = Family(
    model_type="clip_text_model",
    aliases=("clip",),
    architectures={
        "CLIPTextModelWithProjection": _projected,
        "CLIPTextModel": _embedder,
        "CLIPModel": _projected,
    },
    prefix="text_model.",
    weights={
        "embeddings.word": "embeddings.token_embedding",
        "embeddings.position": "embeddings.position_embedding",
        **LAYERS,
        "final_norm": "final_layer_norm",
        "projection": "text_projection",
    },
    unused=("vision_model.", "visual_projection.", "logit_scale", "text_projection.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
    translate=_of_text,
    reference_class="CLIPTextModelWithProjection.text_model",
)


def _vision_spec(config: Any, architecture: str) -> ModelSpec:
    norm = NormSpec(config.layer_norm_eps)
    width, out = config.hidden_size, config.projection_dim
    layers: tuple[HeadLayer, ...] = (NormLayerSpec("post_norm", width, norm),)
    if architecture != _UNPROJECTED:
        layers += (DenseSpec("projection", width, out, bias=False),)
    return ModelSpec(
        family="clip",
        architecture=architecture,
        hidden_size=width,
        embeddings=EmbeddingsSpec(
            0,
            1 + (config.image_size // config.patch_size) ** 2,
            norm=norm,
            patches=patches_of(config, bias=False, class_token=True),
        ),
        layers=encoder_layers(config),
        heads=(HeadSpec("embedding", ("cls",), layers=layers),),
    )


def _of_image(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The image part of a whole model's config, with the width of both towers' embeddings."""
    vision = raw.get("vision_config")
    if isinstance(vision, dict):
        raw = {**raw, "vision_config": {**vision, **_override(raw, "vision")}}
    return vision_part(raw, "projection_dim")


VISION = VisionFamily(
    Family(
        model_type="clip_vision_model",
        architectures={"CLIPModel": lambda config: (), "CLIPVisionModelWithProjection": lambda config: ()},
        prefix="vision_model.",
        weights={
            "embeddings.patch": "embeddings.patch_embedding",
            "embeddings.patch.class_row": "embeddings.class_embedding",
            "embeddings.position": "embeddings.position_embedding",
            "embeddings.norm": "pre_layrnorm",
            **LAYERS,
            "post_norm": "post_layernorm",
            "projection": "visual_projection",
        },
        unused=("text_model.", "text_projection.", "logit_scale", "embeddings.position_ids"),
        spec_from_config=_vision_spec,
        translate=_of_image,
        reference_class="CLIPVisionModelWithProjection",
    ),
    output="image_embeds",
)

# The tower before its projection.
UNPROJECTED_VISION = VisionFamily(
    replace(
        VISION.family,
        architectures={_UNPROJECTED: lambda config: ()},
        unused=(*VISION.family.unused, "visual_projection."),
        reference_class=_UNPROJECTED,
    ),
    output="pooler_output",
)
