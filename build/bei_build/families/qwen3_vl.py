"""Qwen3-VL as an embedder and a reranker (arXiv:2601.04720): Qwen3 with images among its tokens.

The image tower is like Qwen2-VL's, but for a position table, which is resized to each image, and DeepStack: states
behind some of its layers, merged like the last ones, are added to the states of the decoder behind its first layers.
The axes of positions take turns among the frequencies. The last token's state is the vector of a text, or of an image;
of a pair it gives the scores of two tokens, yes and no.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, require
from bei_build.families.colqwen2 import SIDE, VISION_WEIGHTS, patch_rotations, within
from bei_build.families.decoder import WEIGHTS, decoder_spec, last_token_embedder, rms
from bei_build.families.rope import rope_from_config
from bei_build.families.vision import VisionFamily
from bei_build.spec.head_layers import DivideRowsSpec, HeadLayer, JoinRowsSpec, JoinStatesSpec
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    AttentionSpec,
    DenseSpec,
    EmbeddingsSpec,
    LayerSpec,
    MLPSpec,
    NormLayerSpec,
    NormSpec,
    RopeSpec,
)
from bei_build.spec.patches import PatchesSpec
from bei_build.spec.stored_forms import StoredForms

MODEL_TYPE = "qwen3_vl"
_TEXT_TYPE, _VISION_TYPE = "qwen3_vl_text", "qwen3_vl_vision"
_SECTIONS = (24, 20, 20)
_EPS = 1e-6
_CLASSES = ("Qwen3VLForConditionalGeneration", "Qwen3VLModel")
# Mergers of intermediate states that names are made for; a tower has three.
_MOST_MERGERS = 16


def _part(raw: Mapping[str, Any], name: str, *model_types: str) -> Mapping[str, Any]:
    """The config ``name`` of ``raw``. Raises CheckpointError."""
    found = raw.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"config.json has no {name}: download the checkpoint again.")
    if found.get("model_type", model_types[0]) not in model_types:
        raise CheckpointError(
            f"config.json has {name}.model_type = {found['model_type']!r}; bei's {MODEL_TYPE} family reads "
            f"{model_types[0]!r} only."
        )
    return found


def _checked(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The whole config, with what is asked of every model's at its top."""
    text = _part(raw, "text_config", _TEXT_TYPE)
    _part(raw, "vision_config", _VISION_TYPE, MODEL_TYPE)
    own = {key: text[key] for key in ("max_position_embeddings", "hidden_size", "vocab_size") if key in text}
    return {"max_position_embeddings": 128_000, **raw, **own}


def _on_axes(config: Any, head_dim: int, layer_type: str) -> RopeSpec:
    """Frequencies of which every third turns by rows, and every third by columns, as far as their sections reach."""
    rope = rope_from_config(config, head_dim)
    sections = config.rope_parameters.get("mrope_section", _SECTIONS)
    count = len(rope.inv_freq)
    if not isinstance(sections, list | tuple) or len(sections) != 3 or not all(0 <= one <= count for one in sections):
        raise CheckpointError(f"config.json has mrope_section = {sections!r}: it must be three numbers of frequencies.")
    if rope.long_inv_freq is not None:
        raise CheckpointError("config.json has rope_type = 'longrope', which bei does not read on three axes.")
    axes = [0] * count
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], count), 3):
            axes[place] = axis
    return replace(rope, axes=tuple(axes))


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    text, vision = config.text_config, config.vision_config
    require(text, "is_causal", True, None)
    require(text, "use_bidirectional_attention", None, False)
    if vision.out_hidden_size != text.hidden_size:
        raise CheckpointError(
            f"config.json has vision_config.out_hidden_size = {vision.out_hidden_size!r} and text_config.hidden_size = "
            f"{text.hidden_size!r}: an image's rows must be as wide as those of words."
        )
    if not 0 <= config.image_token_id < text.vocab_size:
        raise CheckpointError(
            f"config.json has image_token_id = {config.image_token_id!r}: it must be the id of the tokenizer's "
            f"<|image_pad|>, from 0 to {text.vocab_size - 1}."
        )
    bias = text.attention_bias
    spec = decoder_spec(text, architecture, bias=bias, output_bias=bias, qk_norm=rms(text), causal=True, rope=_on_axes)
    layers = len(vision.deepstack_visual_indexes)
    if layers > len(spec.layers):
        raise CheckpointError(f"config.json has {layers} deepstack_visual_indexes, more than the decoder has layers.")
    embeddings = EmbeddingsSpec(text.vocab_size, reads_images=True, image_layers=layers)
    return replace(spec, family=MODEL_TYPE, embeddings=embeddings)


FAMILY = Family(
    model_type=MODEL_TYPE,
    architectures=dict.fromkeys(_CLASSES, last_token_embedder),
    prefix="model.",
    weights={
        **{name: within(("",), "language_model.", stored) for name, stored in WEIGHTS.items()},
        # Absent where it is tied to the embeddings.
        "lm_head.weight": ("lm_head.weight", "language_model.embed_tokens.weight"),
    },
    unused=("visual.", "lm_head."),
    spec_from_config=_spec_from_config,
    translate=_checked,
    reference_class="AutoModel",
)


def _vision_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_part(raw, "vision_config", _VISION_TYPE, MODEL_TYPE), "architectures": raw["architectures"]}


def _vision_spec(config: Any, architecture: str) -> ModelSpec:
    require(config, "in_channels", 3)
    require(config, "temporal_patch_size", 2)
    require(config, "spatial_merge_size", SIDE)
    width, out, size, count = (
        config.hidden_size,
        config.out_hidden_size,
        config.patch_size,
        config.num_position_embeddings,
    )
    if not isinstance(size, int) or out % SIDE**2 or isqrt(count) ** 2 != count or not count:
        raise CheckpointError(
            f"vision_config has patch_size = {size!r}, out_hidden_size = {out!r} and num_position_embeddings = "
            f"{count!r}: bei reads a patch_size that is one number, a width that 4 divides, and the table of a square."
        )
    indexes = tuple(config.deepstack_visual_indexes)
    if sorted({*indexes}) != [*indexes] or not all(0 <= index < config.depth for index in indexes):
        raise CheckpointError(
            f"vision_config has deepstack_visual_indexes = {[*indexes]!r}: they must ascend below depth = "
            f"{config.depth}."
        )
    if len(indexes) > _MOST_MERGERS:
        raise CheckpointError(f"vision_config has {len(indexes)} deepstack_visual_indexes, more than {_MOST_MERGERS}.")
    head_dim, norm, merged = width // config.num_heads, NormSpec(_EPS), SIDE**2 * width
    attention = AttentionSpec(
        config.num_heads, head_dim, config.num_heads, head_dim**-0.5, rope=patch_rotations(config, head_dim)
    )
    mlp = MLPSpec(config.intermediate_size, activation_named(config.hidden_act))

    def merge(name: str) -> tuple[HeadLayer, HeadLayer]:
        return DenseSpec(f"{name}.up", merged, merged, activation="gelu"), DenseSpec(f"{name}.down", merged, out)

    taps = tuple(
        (index, (JoinRowsSpec(SIDE**2), NormLayerSpec(f"{name}.norm", merged, norm), *merge(name)))
        for index, name in ((index, f"further.{number}") for number, index in enumerate(indexes))
    )
    states: tuple[HeadLayer, ...] = (
        NormLayerSpec("merger.norm", width, norm),
        JoinRowsSpec(SIDE**2),
        *merge("merger"),
        *((JoinStatesSpec(taps),) if taps else ()),
        DivideRowsSpec(SIDE**2),
    )
    patches = PatchesSpec(
        size,
        bias=True,
        class_token=False,
        scales=(1.0, 1.0, 1.0),
        shifts=(0.0, 0.0, 0.0),
        stored_side=isqrt(count),
        fits_images=True,
        block_side=SIDE,
        aligned=True,
    )
    return ModelSpec(
        family=MODEL_TYPE,
        architecture=architecture,
        hidden_size=width,
        embeddings=EmbeddingsSpec(0, count, patches=patches),
        layers=(LayerSpec(attention, mlp, norm, placement="pre"),) * config.depth,
        heads=(HeadSpec("image_features", token_layers=states),),
    )


_OWN_NAMES = {
    "embeddings.position": "pos_embed",
    "layers.{i}.mlp.up": "blocks.{i}.mlp.linear_fc1",
    "layers.{i}.mlp.down": "blocks.{i}.mlp.linear_fc2",
    "merger.norm": "merger.norm",
    "merger.up": "merger.linear_fc1",
    "merger.down": "merger.linear_fc2",
    **{
        f"further.{number}.{name}": f"deepstack_merger_list.{number}.{stored}"
        for number in range(_MOST_MERGERS)
        for name, stored in (("norm", "norm"), ("up", "linear_fc1"), ("down", "linear_fc2"))
    },
}

VISION = VisionFamily(
    Family(
        model_type=_VISION_TYPE,
        architectures=dict.fromkeys(_CLASSES, lambda config: ()),
        prefix="model.",
        weights={name: within(("",), "visual.", stored) for name, stored in {**VISION_WEIGHTS, **_OWN_NAMES}.items()},
        unused=("language_model.", "lm_head."),
        spec_from_config=_vision_spec,
        translate=_vision_part,
        reference_class="AutoModel",
        # The two frames of a film that a patch spans are one and the same image.
        stored_forms=StoredForms(summed={"patch_embed.proj.weight": 2}),
    ),
    output="last_hidden_state",
    is_read_by_decoder=True,
    has_processor=False,  # not without a library for films
    # Of the model's own code, scripts/qwen3_vl_embedding.py.
    usual_blocks=(4, 1800),
)
