"""EmbeddingGemma 2 (Google 2026): Gemma 4's layers without a causal mask, narrow and wide ones, each with vectors of
tokens of its own, and a linear layer on every token's state; and Gemma 4's image tower beside them.

The tower's layers are like the text model's, on patches, which turn by their columns and rows and have a row of a
table for each of both. The means of square blocks of patches, through a norm and a linear layer, stand in the place of
scaled word rows. Video and audio are not read: the audio tower is not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, require
from bei_build.families.decoder import rms
from bei_build.families.gemma import WEIGHTS_OF_BOTH_NORMS
from bei_build.families.rope import plain_rope, rope_from_config
from bei_build.families.vision import VisionFamily
from bei_build.spec.head_layers import DivideRowsSpec, HeadLayer, MeanRowsSpec
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    AttentionSpec,
    DenseSpec,
    EmbeddingsSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LayerSpec,
    MLPSpec,
    NormLayerSpec,
    NormSpec,
    RopeSpec,
)
from bei_build.spec.patches import PatchesSpec

MODEL_TYPE = "embedding_gemma2_text"
_WHOLE_TYPE, _VISION_TYPE = "embedding_gemma2", "gemma4_vision"
_TYPES = "sliding_attention", "full_attention"
# transformers' default.
_IMAGE_TOKEN = 258_880


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model, as its own class reads it."""
    if raw.get("model_type") == MODEL_TYPE:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json of EmbeddingGemma 2 lacks text_config.")
    own = {"architectures": raw["architectures"]}
    if raw.get("vision_config") is not None:
        own["image_token_id"] = raw.get("image_token_id", _IMAGE_TOKEN)
    return {**text, **own}


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
        embeddings=EmbeddingsSpec(
            config.vocab_size, scale=config.hidden_size**0.5, reads_images=hasattr(config, "image_token_id")
        ),
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
    model_type=MODEL_TYPE,
    aliases=(_WHOLE_TYPE,),
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


def _vision_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The image tower's config, with the width of what the text model reads."""
    vision, text = raw.get("vision_config"), _text_config(raw)
    if not isinstance(vision, dict) or vision.get("model_type", _VISION_TYPE) != _VISION_TYPE:
        found = vision.get("model_type") if isinstance(vision, dict) else vision
        raise CheckpointError(
            f"config.json has vision_config.model_type = {str(found)[:80]!r}; bei's {_WHOLE_TYPE} family reads "
            f"{_VISION_TYPE!r} only."
        )
    return {**vision, "projection_dim": text.get("hidden_size", 512), "architectures": raw["architectures"]}


def _vision_spec(config: Any, architecture: str) -> ModelSpec:
    require(config, "use_clipped_linears", False)
    require(config, "standardize", False)
    size, side, count = config.patch_size, config.pooling_kernel_size, config.position_embedding_size
    # Of kernels of one patch the class leaves out the patches that it should keep.
    if not all(isinstance(one, int) and one >= least for one, least in ((size, 1), (side, 2), (count, 1))):
        raise CheckpointError(
            f"vision_config has patch_size = {size!r}, pooling_kernel_size = {side!r} and position_embedding_size = "
            f"{count!r}: bei reads numbers above 0, and kernels of two patches a side or more."
        )
    norm, width, activation = rms(config), config.hidden_size, activation_named(config.hidden_activation)
    attention = AttentionSpec(
        config.num_attention_heads,
        config.head_dim,
        num_kv_heads=config.num_key_value_heads,
        scale=1.0,
        bias=False,
        output_bias=False,
        rope=_patch_rotations(config, side),
        qk_norm=norm,
        value_norm=NormSpec(config.rms_norm_eps, kind="rms", bias=False, weight=False),
    )
    mlp = MLPSpec(config.intermediate_size, activation, gated=True, bias=False, down_bias=False)
    # The class multiplies by the width's root before the norm, which undoes that but for its eps.
    last = NormSpec(config.rms_norm_eps / width, kind="rms", bias=False, weight=False)
    states: tuple[HeadLayer, ...] = (
        NormLayerSpec("projection_norm", width, last),
        DenseSpec("projection", width, config.projection_dim, bias=False),
    )
    patches = PatchesSpec(
        size,
        bias=False,
        class_token=False,
        scales=(2.0, 2.0, 2.0),
        shifts=(-1.0, -1.0, -1.0),
        fits_images=True,
        flat="pixels",
        block_side=side,
        axial=True,
    )
    return ModelSpec(
        family=_WHOLE_TYPE,
        architecture=architecture,
        hidden_size=width,
        embeddings=EmbeddingsSpec(0, count, patches=patches),
        layers=(LayerSpec(attention, mlp, norm, "both"),) * config.num_hidden_layers,
        heads=(HeadSpec("image_features", token_layers=(MeanRowsSpec(side**2), *states, DivideRowsSpec(side**2))),),
    )


def _patch_rotations(config: Any, side: int) -> RopeSpec:
    """Of each head the first half turns by a patch's column, and the other by its row."""
    kind = config.rope_parameters.get("rope_type")
    if kind != "axial" or config.head_dim % 4:
        raise CheckpointError(
            f"vision_config has rope_type = {kind!r} and head_dim = {config.head_dim}: bei reads 'axial', and a "
            "multiple of 4."
        )
    theta = config.rope_parameters["rope_theta"]
    frequencies = plain_rope(theta, config.head_dim // 2).inv_freq
    axes = tuple(axis for axis in (2, 1) for _ in frequencies)
    return RopeSpec(frequencies * 2, axes=axes, block_side=side, num_parts=2)


_LAYER = "vision_tower.encoder.layers.{i}"
VISION = VisionFamily(
    Family(
        model_type=_VISION_TYPE,
        architectures={"EmbeddingGemma2Model": lambda config: ()},
        prefix="",
        weights={
            "embeddings.patch": "vision_tower.patch_embedder.input_proj",
            "embeddings.axial_position.weight": "vision_tower.patch_embedder.position_embedding_table",
            **{
                f"layers.{{i}}.attention.{name}": f"{_LAYER}.self_attn.{stored}_proj.linear"
                for name, stored in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
            },
            **{
                f"layers.{{i}}.attention.{name}_norm": f"{_LAYER}.self_attn.{name[0]}_norm" for name in ("query", "key")
            },
            **{f"layers.{{i}}.mlp.{name}": f"{_LAYER}.mlp.{name}_proj.linear" for name in ("gate", "up", "down")},
            "layers.{i}.attention_norm": f"{_LAYER}.input_layernorm",
            "layers.{i}.attention_post_norm": f"{_LAYER}.post_attention_layernorm",
            "layers.{i}.mlp_norm": f"{_LAYER}.pre_feedforward_layernorm",
            "layers.{i}.mlp_post_norm": f"{_LAYER}.post_feedforward_layernorm",
            "projection": "embed_vision.embedding_projection",
        },
        unused=("language_model.", "audio_tower.", "embed_audio."),
        spec_from_config=_vision_spec,
        translate=_vision_part,
        reference_class="EmbeddingGemma2Model",
        overflows_fp16=True,
    ),
    output="last_hidden_state",
    is_read_by_decoder=True,
    has_processor=False,  # not without libraries for audio and video
    whole=lambda raw: {**raw, "audio_config": None},
)
