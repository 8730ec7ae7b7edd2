"""ColQwen2 and ColQwen2.5 (Faysse et al. 2024, arXiv:2407.01449): Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL
(arXiv:2502.13923) with a vector for each token.

A vision transformer reads images of any size, whose patches turn by their rows and columns; four neighbours are merged
to a state, which stands in the place of a word row of a causal Qwen2. There tokens have positions on three axes. Of
Qwen2.5-VL's tower most layers attend within windows of the image, and its norms and MLPs are the decoder's.

transformers 5 gives an image's tokens in its class the positions of text, 4 and colpali-engine, which trained the
models, those on three axes, which are built. Checkpoints are of transformers' class, or of colpali-engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bei.engine.grid_windows import Windows
from bei.errors import CheckpointError
from bei_build.families.base import Family, HeadsOf, activation_named, require
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
    RopeSpec,
)
from bei_build.spec.patches import PatchesSpec
from bei_build.spec.stored_forms import StoredForms

MODEL_TYPE = "colqwen2"
_PROJECTION = "embedding_proj_layer"
FIRST, SECOND = "qwen2_vl", "qwen2_5_vl"
_OF_ENGINE = ("ColQwen2", "ColQwen2_5")
_SECTIONS = (16, 24, 24)
# Of the patches that are merged, a side: what bei.engine.packing fills steps up to, eight tokens, is whole blocks then.
SIDE = 2
_EPS = 1e-6
# transformers 4 and 5 have another module around the towers; of colpali-engine's classes there was none at first, as of
# Qwen2-VL's.
WITHIN = ("", "model.")
_OWN_PROJECTION, _OWN_WIDTH = "custom_text_proj", 128
OWN_LANGUAGE = ("model.language_model.", "language_model.", "model.")
# Names of colpali-engine's tensors as those of transformers' class.
_RENAMED = {
    r"^(model\.)?visual\.": "vlm.visual.",
    r"^(model\.language_model|language_model|model)\.(?!visual\.)": "vlm.language_model.",
    rf"^{_OWN_PROJECTION}\.": f"{_PROJECTION}.",
}


def _whole(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Qwen2-VL's config. Raises CheckpointError."""
    found = raw.get("vlm_config")
    if not isinstance(found, dict) or not isinstance(found.get("vision_config"), dict):
        raise CheckpointError("config.json has no vlm_config with a vision_config: download the checkpoint again.")
    whole = found.get("model_type", FIRST)
    own = found["vision_config"].get("model_type", whole)
    for kind, of_kinds in ((whole, (FIRST, SECOND)), (own, (f"{whole}_vision", whole))):
        if kind not in of_kinds:
            raise CheckpointError(
                f"config.json has model_type = {kind!r} in vlm_config; bei's {MODEL_TYPE} family reads "
                f"{' or '.join(map(repr, of_kinds))} there."
            )
    return found


def _checked(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The whole config, with what is asked of every model's at its top."""
    whole = _whole(raw)
    text = whole.get("text_config", whole)  # of the first versions, which had no part for it
    kind = whole.get("model_type", FIRST)
    if not isinstance(text, dict) or text.get("model_type", kind) not in (f"{kind}_text", kind):
        raise CheckpointError(f"config.json has a text_config in vlm_config that is not of '{kind}_text'.")
    own = {key: text[key] for key in ("max_position_embeddings", "hidden_size", "vocab_size") if key in text}
    return {"max_position_embeddings": 32_768, **raw, **own}


def on_axes(config: Any, head_dim: int, layer_type: str) -> RopeSpec:
    """Frequencies in sections, one for each axis. Raises CheckpointError."""
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
    return spec_of(config.vlm_config, architecture, MODEL_TYPE, at="vlm_config.")


def spec_of(
    whole: Any, architecture: str, family: str, *, at: str = "", rope: Callable[[Any, int, str], RopeSpec] = on_axes
) -> ModelSpec:
    """The decoder of Qwen2-VL's config ``whole``, which config.json has ``at`` a place. Raises CheckpointError."""
    text = whole.text_config
    require(text, "is_causal", True, None)
    require(text, "use_bidirectional_attention", None, False)
    key = "hidden_size" if whole.model_type == FIRST else "out_hidden_size"
    if (width := getattr(whole.vision_config, key)) != text.hidden_size:
        raise CheckpointError(
            f"config.json has vision_config.{key} = {width!r} and text_config.hidden_size = {text.hidden_size!r}: an "
            "image's rows must be as wide as those of words."
        )
    if not 0 <= whole.image_token_id < text.vocab_size:
        raise CheckpointError(
            f"config.json has {at}image_token_id = {whole.image_token_id!r}: it must be the id of the "
            f"tokenizer's <|image_pad|>, from 0 to {text.vocab_size - 1}."
        )
    spec = decoder_spec(text, architecture, bias=True, causal=True, windows="by_type", rope=rope)
    return replace(spec, family=family, embeddings=EmbeddingsSpec(text.vocab_size, reads_images=True))


def _token_vectors(name: str) -> HeadsOf:
    def heads(config: Any) -> tuple[HeadSpec, ...]:
        layer = DenseSpec(name, config.vlm_config.text_config.hidden_size, config.embedding_dim)
        return (HeadSpec("token_embedding", token_layers=(layer,)),)

    return heads


def within(arounds: tuple[str, ...], module: str, stored: str | tuple[str, ...]) -> tuple[str, ...]:
    """Possible names of a tensor of ``module``, which stands in one of ``arounds``."""
    names = (stored,) if isinstance(stored, str) else stored
    return tuple(f"{around}{module}{name}" for around in arounds for name in names)


FAMILY = Family(
    model_type=MODEL_TYPE,
    architectures={"ColQwen2ForRetrieval": _token_vectors(_PROJECTION)},
    prefix="vlm.",
    weights={
        **{
            name: within(WITHIN, "language_model.", stored)
            for name, stored in WEIGHTS.items()
            if name != "lm_head.weight"
        },
        _PROJECTION: _PROJECTION,
    },
    unused=(*within(WITHIN, "visual.", ""), "lm_head."),
    spec_from_config=_spec_from_config,
    translate=_checked,
    reference_class="ColQwen2ForRetrieval.vlm",
)


def _from_engine(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of colpali-engine's class, which is that of the model it extends, as transformers' class has it."""
    whole = {key: value for key, value in raw.items() if key != "architectures"}
    own = {"architectures": raw["architectures"], "model_type": MODEL_TYPE, "embedding_dim": _OWN_WIDTH}
    return _checked({**own, "vlm_config": whole})


ENGINE_FAMILY = Family(
    model_type=MODEL_TYPE,
    aliases=(FIRST, SECOND),
    architectures=dict.fromkeys(_OF_ENGINE, _token_vectors(_OWN_PROJECTION)),
    prefix="",
    weights={
        **{name: within(OWN_LANGUAGE, "", stored) for name, stored in WEIGHTS.items() if name != "lm_head.weight"},
        _OWN_PROJECTION: _OWN_PROJECTION,
    },
    unused=(*within(("vlm.", *WITHIN), "visual.", ""), "lm_head."),  # the first is transformers' own name
    spec_from_config=_spec_from_config,
    translate=_from_engine,
    reference_class="ColQwen2ForRetrieval.vlm",
    reference_names=_RENAMED,
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


def vision_spec(config: Any, architecture: str) -> ModelSpec:
    """Qwen2-VL's tower. Raises CheckpointError."""
    mlp = MLPSpec(int(config.embed_dim * config.mlp_ratio), activation_named(config.hidden_act))
    layer = LayerSpec(_attention(config, config.embed_dim), mlp, NormSpec(_EPS), placement="pre")
    return _tower(config, architecture, (layer,) * config.depth, config.embed_dim, config.hidden_size)


def windowed_spec(config: Any, architecture: str) -> ModelSpec:
    """Qwen2.5-VL's: windows, but in the layers of ``fullatt_block_indexes``. Raises CheckpointError."""
    width, size, whole = config.hidden_size, config.window_size, config.fullatt_block_indexes
    if not isinstance(config.patch_size, int) or not isinstance(size, int) or size < SIDE * config.patch_size:
        raise CheckpointError(
            f"vision_config has window_size = {size!r} and patch_size = {config.patch_size!r}: bei reads numbers of "
            "pixels, and windows of at least two patches a side."
        )
    if not all(isinstance(index, int) and 0 <= index < config.depth for index in whole):
        raise CheckpointError(
            f"vision_config has fullatt_block_indexes = {[*whole]!r}: they must be numbers of layers, below depth = "
            f"{config.depth}."
        )
    mlp = MLPSpec(config.intermediate_size, activation_named(config.hidden_act), gated=True)
    layer = LayerSpec(_attention(config, width), mlp, NormSpec(_EPS, "rms"), placement="pre")
    windowed = layer.with_attention(image_windows=Windows(size // SIDE // config.patch_size, SIDE))
    layers = tuple(layer if index in whole else windowed for index in range(config.depth))
    return _tower(config, architecture, layers, width, config.out_hidden_size)


def _attention(config: Any, width: int) -> AttentionSpec:
    head_dim = width // config.num_heads
    rope = patch_rotations(config, head_dim)
    return AttentionSpec(config.num_heads, head_dim, config.num_heads, head_dim**-0.5, rope=rope)


def _tower(config: Any, architecture: str, layers: tuple[LayerSpec, ...], width: int, out: int) -> ModelSpec:
    """``layers`` of ``width`` between patches and the merger, which gives states of ``out`` numbers."""
    require(config, "in_channels", 3)
    require(config, "temporal_patch_size", 2)
    require(config, "spatial_merge_size", SIDE)
    size = config.patch_size
    if not isinstance(size, int) or out % SIDE**2:
        raise CheckpointError(
            f"vision_config has patch_size = {size!r} and hidden_size = {out!r}: bei reads a patch_size that is one "
            "number, and a width that 4 divides."
        )
    merged, norm = SIDE**2 * width, layers[0].norm
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
        layers=layers,
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

GATED_WEIGHTS = {
    **{name: stored for name, stored in VISION_WEIGHTS.items() if ".mlp." not in name},
    **{f"layers.{{i}}.mlp.{part}": f"{_BLOCK}.mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def _second_of(tower: Family) -> Family:
    """``tower`` of Qwen2.5-VL."""
    weights = {name: within(WITHIN, "visual.", stored) for name, stored in GATED_WEIGHTS.items()}
    return replace(tower, model_type=f"{SECOND}_vision", weights=weights, spec_from_config=windowed_spec)


_TOWER: Family = Family(
    model_type=f"{FIRST}_vision",
    architectures={"ColQwen2ForRetrieval": lambda config: ()},
    prefix="vlm.",
    weights={name: within(WITHIN, "visual.", stored) for name, stored in VISION_WEIGHTS.items()},
    unused=(*within(WITHIN, "language_model.", ""), "lm_head.", f"{_PROJECTION}."),
    spec_from_config=vision_spec,
    translate=_vision_part,
    reference_class="ColQwen2ForRetrieval",
    # The two frames of a film that a patch spans are one and the same image.
    stored_forms=StoredForms(summed={"patch_embed.proj.weight": 2}),
    variant=lambda raw: _second_of(_TOWER) if _whole(raw).get("model_type") == SECOND else None,
)
_ENGINE_TOWER: Family = replace(
    _TOWER,
    architectures=dict.fromkeys(_OF_ENGINE, lambda config: ()),
    prefix="",
    unused=(
        *(f"{around}{part}." for around in OWN_LANGUAGE for part in ("layers", "embed_tokens", "norm")),
        *("lm_head.", f"{_OWN_PROJECTION}."),
    ),
    translate=lambda raw: _vision_part(_from_engine(raw)),
    reference_names=_RENAMED,
    variant=lambda raw: _second_of(_ENGINE_TOWER) if raw.get("model_type") == SECOND else None,
)
VISION = VisionFamily(_TOWER, output="embeddings", is_read_by_decoder=True)
ENGINE_VISION = VisionFamily(_ENGINE_TOWER, output="embeddings", is_read_by_decoder=True, has_processor=False)
