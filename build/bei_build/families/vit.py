"""ViT (Dosovitskiy et al. 2020, arXiv:2010.11929; also DINO's checkpoints): the last state of the class token.

The pooler of ``ViTModel``, a layer that some checkpoints have no trained numbers of, is not built.
"""

from __future__ import annotations

from typing import Any

from bei_build.families.base import Family
from bei_build.families.vision import VisionFamily, attention_of, class_token_model, encoder_layers, patches_of
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.stored_forms import StoredForms

# Those of transformers 5 second.
_LAYER, _NEW_LAYER = "encoder.layer.{i}", "layers.{i}"

# Also DINOv2's: names outside of the layers, and their ranks without the leading axes of 1.
EMBEDDINGS = {
    "embeddings.patch": "embeddings.patch_embeddings.projection",
    "embeddings.patch.class_row": "embeddings.cls_token",
    "embeddings.position.weight": "embeddings.position_embeddings",
}
RANKS = {"embeddings.cls_token": 1, "embeddings.position_embeddings": 2}


def _spec(config: Any, architecture: str) -> ModelSpec:
    patches = patches_of(config, bias=True, class_token=True)
    count = 1 + (config.image_size // config.patch_size) ** 2
    layers = encoder_layers(config, attention_of(config, bias=config.qkv_bias))
    return class_token_model(config, "vit", architecture, patches, count, layers)


VISION = VisionFamily(
    Family(
        model_type="vit",
        architectures={"ViTModel": lambda config: ()},
        prefix="vit.",
        weights={
            **EMBEDDINGS,
            "layers.{i}.attention.query": (f"{_LAYER}.attention.attention.query", f"{_NEW_LAYER}.attention.q_proj"),
            "layers.{i}.attention.key": (f"{_LAYER}.attention.attention.key", f"{_NEW_LAYER}.attention.k_proj"),
            "layers.{i}.attention.value": (f"{_LAYER}.attention.attention.value", f"{_NEW_LAYER}.attention.v_proj"),
            "layers.{i}.attention.output": (f"{_LAYER}.attention.output.dense", f"{_NEW_LAYER}.attention.o_proj"),
            "layers.{i}.attention_norm": (f"{_LAYER}.layernorm_before", f"{_NEW_LAYER}.layernorm_before"),
            "layers.{i}.mlp.up": (f"{_LAYER}.intermediate.dense", f"{_NEW_LAYER}.mlp.fc1"),
            "layers.{i}.mlp.down": (f"{_LAYER}.output.dense", f"{_NEW_LAYER}.mlp.fc2"),
            "layers.{i}.mlp_norm": (f"{_LAYER}.layernorm_after", f"{_NEW_LAYER}.layernorm_after"),
            "final_norm": "layernorm",
        },
        unused=("pooler.", "embeddings.mask_token", "classifier."),
        spec_from_config=_spec,
        reference_class="ViTModel",
        stored_forms=StoredForms(RANKS),
    ),
    output="last_hidden_state",
)
