"""ColQwen2 (Faysse et al. 2024, arXiv:2407.01449): Qwen2-VL (arXiv:2409.12191) with a vector for each token.

A vision transformer reads images of any size, whose patches turn by their rows and columns; four neighbours are merged
to a state, which stands in the place of a word row of a causal Qwen2. There tokens have positions on three axes.

transformers 5 gives an image's tokens in this class the positions of text, 4 and the code that trained the model
those on three axes, which are built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, require
from bei_build.families.decoder import WEIGHTS, decoder_spec
from bei_build.families.rope import plain_rope, rope_from_config
from bei_build.families.vision import VisionFamily
from bei_build.spec.head_layers import DivideRowsSpec, JoinRowsSpec
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    AttentionSpec,
    DenseSpec,
    EmbeddingsSpec,
    LayerSpec,
    MLPSpec,
    NormLayerSpec,
    NormSpec,
    PatchesSpec,
    RopeSpec,
)
from bei_build.spec.stored_forms import StoredForms

MODEL_TYPE = "colqwen2"
_PROJECTION = "embedding_proj_layer"
_WHOLE_TYPE, _TEXT_TYPE, _VISION_TYPE = "qwen2_vl", "qwen2_vl_text", "qwen2_vl_vision"
_SECTIONS = (16, 24, 24)
# Of the patches that are merged, a side: what bei.engine.packing fills steps up to, eight tokens, is whole blocks then.
SIDE = 2
_EPS = 1e-6
# transformers 4 and 5 have another module around the towers.
_WITHIN = ("", "model.")


def _whole(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Qwen2-VL's config. Raises CheckpointError."""
    found = raw.get("vlm_config")
    if not isinstance(found, dict) or not isinstance(found.get("vision_config"), dict):
        raise CheckpointError("config.json has no vlm_config with a vision_config: download the checkpoint again.")
    for part, model_types in ((found, (_WHOLE_TYPE,)), (found["vision_config"], (_VISION_TYPE, _WHOLE_TYPE))):
        if part.get("model_type", _WHOLE_TYPE) not in model_types:
            raise CheckpointError(
                f"config.json has model_type = {part['model_type']!r} in vlm_config; bei's {MODEL_TYPE} family reads "
                f"{_WHOLE_TYPE!r} only."
            )
    return found


def _checked(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The whole config, with what is asked of every model's at its top."""
    whole = _whole(raw)
    text = whole.get("text_config", whole)  # of the first versions, which had no part for it
    if not isinstance(text, dict) or text.get("model_type", _TEXT_TYPE) not in (_TEXT_TYPE, _WHOLE_TYPE):
        raise CheckpointError(f"config.json has a text_config in vlm_config that is not of {_TEXT_TYPE!r}.")
    own = {key: text[key] for key in ("max_position_embeddings", "hidden_size", "vocab_size") if key in text}
    return {"max_position_embeddings": 32_768, **raw, **own}


def _on_axes(config: Any, head_dim: int, layer_type: str) -> RopeSpec:
    """Frequencies in sections, one for each axis."""
    rope = rope_from_config(config, head_dim)
    sections = config.rope_parameters.get("mrope_section", _SECTIONS)
    if not isinstance(sections, list | tuple) or len(sections) != 3 or sum(sections) != len(rope.inv_freq):
        raise CheckpointError(
            f"config.json has mrope_section = {sections!r}: it must be three numbers of frequencies, of the "
            f"{len(rope.inv_freq)} that a head has."
        )
    if rope.long_inv_freq is not None:
        raise CheckpointError("config.json has rope_type = 'longrope', which bei does not read on three axes.")
    return replace(rope, axes=tuple(axis for axis, count in enumerate(sections) for _ in range(count)))


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    whole, text = config.vlm_config, config.vlm_config.text_config
    require(text, "is_causal", True, None)
    require(text, "use_bidirectional_attention", None, False)
    if whole.vision_config.hidden_size != text.hidden_size:
        raise CheckpointError(
            f"config.json has vision_config.hidden_size = {whole.vision_config.hidden_size!r} and text_config."
            f"hidden_size = {text.hidden_size!r}: an image's rows must be as wide as those of words."
        )
    if not 0 <= whole.image_token_id < text.vocab_size:
        raise CheckpointError(
            f"config.json has vlm_config.image_token_id = {whole.image_token_id!r}: it must be the id of the "
            f"tokenizer's <|image_pad|>, from 0 to {text.vocab_size - 1}."
        )
    spec = decoder_spec(text, architecture, bias=True, causal=True, windows="by_type", rope=_on_axes)
    return replace(spec, family=MODEL_TYPE, embeddings=EmbeddingsSpec(text.vocab_size, reads_images=True))


def _token_vectors(config: Any) -> tuple[HeadSpec, ...]:
    layer = DenseSpec(_PROJECTION, config.vlm_config.text_config.hidden_size, config.embedding_dim)
    return (HeadSpec("token_embedding", token_layers=(layer,)),)


def within(arounds: tuple[str, ...], module: str, stored: str | tuple[str, ...]) -> tuple[str, ...]:
    """Possible names of a tensor of ``module``, which stands in one of ``arounds``."""
    names = (stored,) if isinstance(stored, str) else stored
    return tuple(f"{around}{module}{name}" for around in arounds for name in names)


FAMILY = Family(
    model_type=MODEL_TYPE,
    architectures={"ColQwen2ForRetrieval": _token_vectors},
    prefix="vlm.",
    weights={
        **{
            name: within(_WITHIN, "language_model.", stored)
            for name, stored in WEIGHTS.items()
            if name != "lm_head.weight"
        },
        _PROJECTION: _PROJECTION,
    },
    unused=(*within(_WITHIN, "visual.", ""), "lm_head."),
    spec_from_config=_spec_from_config,
    translate=_checked,
    reference_class="ColQwen2ForRetrieval.vlm",
)


def _vision_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_whole(raw)["vision_config"], "architectures": raw["architectures"]}


def patch_rotations(config: Any, head_dim: int) -> RopeSpec:
    """Rotations of patches by their rows and columns. Raises CheckpointError."""
    parameters = config.rope_parameters or {}
    if parameters.get("rope_type", "axial") != "axial" or head_dim % 4:
        raise CheckpointError(
            f"vision_config has rope_parameters = {parameters!r} and heads of width {head_dim}: bei reads 'axial' "
            "ones, and a width that 4 divides."
        )
    bands = plain_rope(parameters.get("rope_theta", 10_000.0), head_dim // 2).inv_freq
    axes = (1,) * len(bands) + (2,) * len(bands)
    return RopeSpec((*bands, *bands), axes=axes, block_side=SIDE)


def _vision_spec(config: Any, architecture: str) -> ModelSpec:
    require(config, "in_channels", 3)
    require(config, "temporal_patch_size", 2)
    require(config, "spatial_merge_size", SIDE)
    width, out, size, head_dim = (
        config.embed_dim,
        config.hidden_size,
        config.patch_size,
        config.embed_dim // config.num_heads,
    )
    if not isinstance(size, int) or out % SIDE**2:
        raise CheckpointError(
            f"vision_config has patch_size = {size!r} and hidden_size = {out!r}: bei reads a patch_size that is one "
            "number, and a width that 4 divides."
        )
    attention = AttentionSpec(
        config.num_heads,
        head_dim,
        config.num_heads,
        head_dim**-0.5,
        rope=patch_rotations(config, head_dim),
    )
    mlp, norm = MLPSpec(int(width * config.mlp_ratio), activation_named(config.hidden_act)), NormSpec(_EPS)
    merged = SIDE**2 * width
    return ModelSpec(
        family=MODEL_TYPE,
        architecture=architecture,
        hidden_size=width,
        embeddings=EmbeddingsSpec(
            0,
            patches=PatchesSpec(
                size,
                bias=False,
                class_token=False,
                scales=(1.0, 1.0, 1.0),
                shifts=(0.0, 0.0, 0.0),
                fits_images=True,
                block_side=SIDE,
            ),
        ),
        layers=(LayerSpec(attention, mlp, norm, placement="pre"),) * config.depth,
        heads=(
            HeadSpec(
                "image_features",
                token_layers=(
                    NormLayerSpec("merger.norm", width, norm),
                    JoinRowsSpec(SIDE**2),
                    DenseSpec("merger.up", merged, merged, activation="gelu"),
                    DenseSpec("merger.down", merged, out),
                    DivideRowsSpec(SIDE**2),
                ),
            ),
        ),
    )


_BLOCK = "blocks.{i}"
VISION_WEIGHTS = {
    "embeddings.patch": "patch_embed.proj",
    "layers.{i}.attention.query": f"{_BLOCK}.attn.qkv",
    "layers.{i}.attention.key": f"{_BLOCK}.attn.qkv",
    "layers.{i}.attention.value": f"{_BLOCK}.attn.qkv",
    "layers.{i}.attention.output": f"{_BLOCK}.attn.proj",
    "layers.{i}.attention_norm": f"{_BLOCK}.norm1",
    "layers.{i}.mlp.up": f"{_BLOCK}.mlp.fc1",
    "layers.{i}.mlp.down": f"{_BLOCK}.mlp.fc2",
    "layers.{i}.mlp_norm": f"{_BLOCK}.norm2",
    "merger.norm": "merger.ln_q",
    "merger.up": "merger.mlp.0",
    "merger.down": "merger.mlp.2",
}

VISION = VisionFamily(
    Family(
        model_type=_VISION_TYPE,
        architectures={"ColQwen2ForRetrieval": lambda config: ()},
        prefix="vlm.",
        weights={name: within(_WITHIN, "visual.", stored) for name, stored in VISION_WEIGHTS.items()},
        unused=(*within(_WITHIN, "language_model.", ""), "lm_head.", f"{_PROJECTION}."),
        spec_from_config=_vision_spec,
        translate=_vision_part,
        reference_class="ColQwen2ForRetrieval",
        # The two frames of a film that a patch spans are one and the same image.
        stored_forms=StoredForms(summed={"patch_embed.proj.weight": 2}),
    ),
    output="embeddings",
    is_read_by_decoder=True,
)
