"""DINOv2 (Oquab et al. 2023, arXiv:2304.07193): the last state of the class token.

LayerScale (arXiv:2103.17239) multiplies the outputs of attention and MLP by stored factors. They are multiplied into
the matrices in front. The position table is resized to the images that the image processor makes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import Family, activation_named
from bei_build.families.vision import VisionFamily, patches_of
from bei_build.families.vit import EMBEDDINGS, RANKS
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec
from bei_build.spec.stored_forms import StoredForms

_LAYER = "encoder.layer.{i}"


def _mlp(config: Any) -> MLPSpec:
    inner = int(config.hidden_size * config.mlp_ratio)
    if not config.use_swiglu_ffn:
        return MLPSpec(inner, activation_named(config.hidden_act))
    return MLPSpec((int(inner * 2 / 3) + 7) // 8 * 8, "silu", gated=True)


def _spec(config: Any, architecture: str) -> ModelSpec:
    num_heads, norm = config.num_attention_heads, NormSpec(config.layer_norm_eps)
    head_dim = config.hidden_size // num_heads
    attention = AttentionSpec(num_heads, head_dim, num_heads, scale=head_dim**-0.5, bias=config.qkv_bias)
    side = config.image_size // config.patch_size
    patches = replace(patches_of(config, bias=True, class_token=True), stored_side=side)
    return ModelSpec(
        family="dinov2",
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(0, 1 + side**2, patches=patches),
        layers=(LayerSpec(attention, _mlp(config), norm, placement="pre"),) * config.num_hidden_layers,
        final_norm=norm,
        heads=(HeadSpec("embedding", ("cls",)),),
    )


VISION = VisionFamily(
    Family(
        model_type="dinov2",
        architectures={"Dinov2Model": lambda config: ()},
        prefix="dinov2.",
        weights={
            **EMBEDDINGS,
            "layers.{i}.attention.query": (f"{_LAYER}.attention.attention.query", f"{_LAYER}.attention.q_proj"),
            "layers.{i}.attention.key": (f"{_LAYER}.attention.attention.key", f"{_LAYER}.attention.k_proj"),
            "layers.{i}.attention.value": (f"{_LAYER}.attention.attention.value", f"{_LAYER}.attention.v_proj"),
            "layers.{i}.attention.output": (f"{_LAYER}.attention.output.dense", f"{_LAYER}.attention.o_proj"),
            "layers.{i}.attention_norm": f"{_LAYER}.norm1",
            "layers.{i}.mlp.gate": (f"{_LAYER}.mlp.weights_in", f"{_LAYER}.mlp.gate_proj"),
            "layers.{i}.mlp.up": (f"{_LAYER}.mlp.fc1", f"{_LAYER}.mlp.weights_in", f"{_LAYER}.mlp.up_proj"),
            "layers.{i}.mlp.down": (f"{_LAYER}.mlp.fc2", f"{_LAYER}.mlp.weights_out", f"{_LAYER}.mlp.down_proj"),
            "layers.{i}.mlp_norm": f"{_LAYER}.norm2",
            "final_norm": "layernorm",
        },
        unused=("embeddings.mask_token", "classifier."),
        spec_from_config=_spec,
        reference_class="Dinov2Model",
        stored_forms=StoredForms(
            RANKS,
            factors={
                "layer_scale1.lambda1": ("attention.output.dense", "attention.o_proj"),
                "layer_scale2.lambda1": ("mlp.fc2", "mlp.weights_out", "mlp.down_proj"),
            },
        ),
    ),
    output="pooler_output",
    resizes_positions=True,
)
