"""DINOv2 (Oquab et al. 2023, arXiv:2304.07193), also with registers (Darcet et al. 2023, arXiv:2309.16588): the last
state of the class token.

LayerScale (arXiv:2103.17239) multiplies the outputs of attention and MLP by stored factors. They are multiplied into
the matrices in front. The position table is resized to the images that the image processor makes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei.artifact.image_processor import MOST_REGISTERS
from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named
from bei_build.families.vision import VisionFamily, attention_of, class_token_model, encoder_layers, patches_of
from bei_build.families.vit import EMBEDDINGS, RANKS
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import MLPSpec
from bei_build.spec.stored_forms import StoredForms

_LAYER = "encoder.layer.{i}"
_WITH_REGISTERS = "Dinov2WithRegistersModel"
_FACTORS = {
    "layer_scale1.lambda1": ("attention.output.dense", "attention.o_proj"),
    "layer_scale2.lambda1": ("mlp.fc2", "mlp.weights_out", "mlp.down_proj"),
}


def _mlp(config: Any) -> MLPSpec:
    inner = int(config.hidden_size * config.mlp_ratio)
    if not config.use_swiglu_ffn:
        return MLPSpec(inner, activation_named(config.hidden_act))
    return MLPSpec((int(inner * 2 / 3) + 7) // 8 * 8, "silu", gated=True)


def _spec(config: Any, architecture: str) -> ModelSpec:
    registers = registers_of(config) if architecture == _WITH_REGISTERS else 0
    side = config.image_size // config.patch_size
    patches = replace(
        patches_of(config, bias=True, class_token=True),
        stored_side=side,
        registers=registers,
        antialias=registers > 0,  # one class resizes its position table with it, the other without
    )
    layers = encoder_layers(config, attention_of(config, bias=config.qkv_bias), _mlp(config))
    return class_token_model(config, "dinov2", architecture, patches, 1 + registers + side**2, layers)


def registers_of(config: Any) -> int:
    """The number of learned rows between the class token and the patches. Raises CheckpointError."""
    count = config.num_register_tokens
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_REGISTERS:
        raise CheckpointError(
            f"config.json has num_register_tokens = {count!r}: it must be a number from 1 to {MOST_REGISTERS}."
        )
    return count


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
        stored_forms=StoredForms(RANKS, factors=_FACTORS),
    ),
    output="pooler_output",
    resizes_positions=True,
)

REGISTERS = {"embeddings.patch.registers": "embeddings.register_tokens"}
REGISTER_RANKS = {"embeddings.register_tokens": 2}

REGISTERS_VISION = replace(
    VISION,
    family=replace(
        VISION.family,
        model_type="dinov2_with_registers",
        architectures={_WITH_REGISTERS: lambda config: ()},
        prefix="dinov2_with_registers.",
        weights={**VISION.family.weights, **REGISTERS},
        reference_class=_WITH_REGISTERS,
        stored_forms=StoredForms({**RANKS, **REGISTER_RANKS}, factors=_FACTORS),
    ),
)
