"""DINOv3's vision transformer (Simeoni et al. 2025, arXiv:2508.10104): DINOv2 with registers, whose patches have no
position table: queries and keys turn by the places of their middles in the image, whatever its size.
"""

from __future__ import annotations

from dataclasses import replace
from math import pi
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, positive_number, require
from bei_build.families.dinov2 import REGISTER_RANKS, REGISTERS, registers_of
from bei_build.families.vision import VisionFamily, attention_of, class_token_model, encoder_layers, patches_of
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import MLPSpec, RopeSpec
from bei_build.spec.stored_forms import StoredForms

_LAYER = "layer.{i}"


def _rotations(config: Any, num_leading: int) -> RopeSpec:
    """Whole turns from edge to edge, in head_dim / 4 frequencies for rows and for columns."""
    head_dim, side = config.hidden_size // config.num_attention_heads, config.image_size // config.patch_size
    if head_dim % 4:
        raise CheckpointError(
            f"config.json gives heads a width of {head_dim}: DINOv3 turns quarters of it, so 4 must divide it."
        )
    base, count = positive_number(config, "rope_theta"), head_dim // 4
    bands = tuple(2 * pi * base ** -(band / count) for band in range(count))
    return RopeSpec((*bands, *bands), grid=(side, side), num_leading=num_leading, centred=True)


def _spec(config: Any, architecture: str) -> ModelSpec:
    require(config, "value_bias", config.query_bias)
    require(config, "key_bias", False, config.query_bias)
    patches = replace(patches_of(config, bias=True, class_token=True), registers=registers_of(config))
    attention = attention_of(
        config,
        bias=config.query_bias,
        key_bias=config.key_bias,
        output_bias=config.proj_bias,
        rope=_rotations(config, patches.num_leading),
    )
    mlp = MLPSpec(
        config.intermediate_size,
        activation_named(config.hidden_act),
        gated=config.use_gated_mlp,
        bias=config.mlp_bias,
        down_bias=config.mlp_bias,
    )
    layers = encoder_layers(config, attention, mlp)
    return class_token_model(config, "dinov3", architecture, patches, 0, layers)


VISION = VisionFamily(
    Family(
        model_type="dinov3_vit",
        architectures={"DINOv3ViTModel": lambda config: ()},
        prefix="model.",  # of layers; transformers leaves it out in files
        weights={
            "embeddings.patch": "embeddings.patch_embeddings",
            "embeddings.patch.class_row": "embeddings.cls_token",
            **REGISTERS,
            "layers.{i}.attention.query": f"{_LAYER}.attention.q_proj",
            "layers.{i}.attention.key": f"{_LAYER}.attention.k_proj",
            "layers.{i}.attention.value": f"{_LAYER}.attention.v_proj",
            "layers.{i}.attention.output": f"{_LAYER}.attention.o_proj",
            "layers.{i}.attention_norm": f"{_LAYER}.norm1",
            "layers.{i}.mlp.gate": f"{_LAYER}.mlp.gate_proj",
            "layers.{i}.mlp.up": f"{_LAYER}.mlp.up_proj",
            "layers.{i}.mlp.down": f"{_LAYER}.mlp.down_proj",
            "layers.{i}.mlp_norm": f"{_LAYER}.norm2",
            "final_norm": "norm",
        },
        unused=("embeddings.mask_token",),
        spec_from_config=_spec,
        reference_class="DINOv3ViTModel",
        stored_forms=StoredForms(
            {"embeddings.cls_token": 1, **REGISTER_RANKS},
            factors={
                "layer_scale1.lambda1": ("attention.o_proj",),
                "layer_scale2.lambda1": ("mlp.down_proj",),
            },
        ),
    ),
    output="pooler_output",
    resizes_positions=True,
)
