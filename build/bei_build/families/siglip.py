"""SigLIP (Zhai et al. 2023, arXiv:2303.15343) and SigLIP 2 (arXiv:2502.14786): a bidirectional encoder of texts, pooled
at their last token, and a vision transformer, pooled by an attention head.

SigLIP 2 of fixed image sizes has SigLIP's classes. That of images in their own proportions (NaFlex) has classes of its
own: patches come as rows of numbers, and the position table is resized to each image.

Texts were filled up with padding to the longest one in training, and the padding was attended: their last token is the
last one of the padding. As in CLIP's family, one of the two towers is read, and the other's config and tensors are
ignored. Scale and bias of the loss are not read: they do not change vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, require
from bei_build.families.clip import LAYERS
from bei_build.families.vision import VisionFamily, encoder_layers, patches_of, vision_part
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionPoolSpec, DenseSpec, EmbeddingsSpec, NormSpec
from bei_build.spec.patches import PatchesSpec

_NAFLEX = "siglip2_vision_model"


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return ModelSpec(
        family="siglip",
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size, config.max_position_embeddings),
        layers=encoder_layers(config),
        final_norm=NormSpec(config.layer_norm_eps),
    )


def _of_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a whole model's config."""
    if raw.get("model_type") not in ("siglip", "siglip2"):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json has no text_config: download the checkpoint again.")
    return {**text, "architectures": raw["architectures"], "model_type": raw["model_type"]}


def _projected(config: Any) -> tuple[HeadSpec, ...]:
    layer = DenseSpec("projection", config.hidden_size, config.projection_size)
    return (HeadSpec("embedding", ("last",), layers=(layer,)),)


FAMILY = Family(
    model_type="siglip_text_model",
    aliases=("siglip",),
    architectures={"SiglipModel": _projected, "SiglipTextModel": _projected},
    prefix="text_model.",
    weights={
        "embeddings.word": "embeddings.token_embedding",
        "embeddings.position": "embeddings.position_embedding",
        **LAYERS,
        "final_norm": "final_layer_norm",
        "projection": "head",
    },
    unused=("vision_model.", "logit_scale", "logit_bias", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
    translate=_of_text,
    reference_class="SiglipTextModel",
    fills_texts=True,
)


NAFLEX_FAMILY = replace(
    FAMILY,
    model_type="siglip2_text_model",
    aliases=("siglip2",),
    architectures={"Siglip2Model": _projected, "Siglip2TextModel": _projected},
    reference_class="Siglip2TextModel",
)


def _vision_spec(config: Any, architecture: str) -> ModelSpec:
    if not config.vision_use_head:
        raise CheckpointError(
            "vision_config has vision_use_head = false: the model gives states of patches, and no vector of an image."
        )
    norm, width = NormSpec(config.layer_norm_eps), config.hidden_size
    pool = AttentionPoolSpec(
        "attention_pool",
        width,
        config.num_attention_heads,
        config.intermediate_size,
        activation_named(config.hidden_act),
        norm,
    )
    patches = (
        _naflex_patches(config) if config.model_type == _NAFLEX else patches_of(config, bias=True, class_token=False)
    )
    side = patches.stored_side or config.image_size // config.patch_size
    return ModelSpec(
        family="siglip",
        architecture=architecture,
        hidden_size=width,
        embeddings=EmbeddingsSpec(0, side**2, patches=patches),
        layers=encoder_layers(config),
        final_norm=norm,
        heads=(HeadSpec("embedding", ("attention",), attention_pool=pool),),
    )


def _naflex_patches(config: Any) -> PatchesSpec:
    require(config, "num_channels", 3)
    size, count = config.patch_size, config.num_patches
    if not isinstance(size, int) or not isinstance(count, int) or isqrt(count) ** 2 != count or not count:
        raise CheckpointError(
            f"vision_config has patch_size = {size!r} and num_patches = {count!r}: bei reads patches and tables that "
            "are squares, each as one number."
        )
    return PatchesSpec(
        size,
        bias=True,
        class_token=False,
        scales=(1.0, 1.0, 1.0),
        shifts=(0.0, 0.0, 0.0),
        stored_side=isqrt(count),
        fits_images=True,
        flat="pixels",
    )


VISION = VisionFamily(
    Family(
        model_type="siglip_vision_model",
        architectures={"SiglipModel": lambda config: (), "SiglipVisionModel": lambda config: ()},
        prefix="vision_model.",
        weights={
            "embeddings.patch": "embeddings.patch_embedding",
            "embeddings.position": "embeddings.position_embedding",
            **LAYERS,
            "final_norm": "post_layernorm",
            "attention_pool.probe": "head.probe",
            "attention_pool.input.weight": "head.attention.in_proj_weight",
            "attention_pool.input.bias": "head.attention.in_proj_bias",
            "attention_pool.output": "head.attention.out_proj",
            "attention_pool.norm": "head.layernorm",
            "attention_pool.mlp.up": "head.mlp.fc1",
            "attention_pool.mlp.down": "head.mlp.fc2",
        },
        unused=("text_model.", "logit_scale", "logit_bias", "embeddings.position_ids"),
        spec_from_config=_vision_spec,
        translate=vision_part,
        reference_class="SiglipVisionModel",
    ),
    output="pooler_output",
)

NAFLEX_VISION = replace(
    VISION,
    family=replace(
        VISION.family,
        model_type=_NAFLEX,
        architectures={"Siglip2Model": lambda config: (), "Siglip2VisionModel": lambda config: ()},
        reference_class="Siglip2VisionModel",
    ),
)
