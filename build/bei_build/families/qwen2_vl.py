"""Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923) as embedders of texts and images: gme-Qwen2-VL
(arXiv:2412.16855), DSE (arXiv:2406.11251), Ops-MM-embedding; and as a reranker, jina-reranker-m0.

Image tower and decoder are those of ColQwen2. The last token's state is the vector of a text, of an image, or of both.

gme's own code gives its decoder no positions, and the class of transformers that it was written for then counts an
image's tokens as those of a text. It is built so where config.json names that code; other models have positions on
three axes, as transformers' class counts them.

jina-reranker-m0's own code (modeling.py, JinaVLForRanking) reads a pair in a text that ends in a token of no text, and
has two linear layers on its state, whose score it shifts before the sigmoid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family
from bei_build.families.colqwen2 import (
    FIRST,
    GATED_WEIGHTS,
    OWN_LANGUAGE,
    SECOND,
    VISION_WEIGHTS,
    WITHIN,
    on_axes,
    spec_of,
    vision_spec,
    windowed_spec,
    within,
)
from bei_build.families.decoder import WEIGHTS, last_token_embedder
from bei_build.families.rope import rope_from_config
from bei_build.families.vision import VisionFamily
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import DenseSpec, RopeSpec
from bei_build.spec.stored_forms import StoredForms

MODEL_TYPES = (FIRST, SECOND)
RANKER = "JinaVLForRanking"
_GME = "GmeQwen2VL"
_CLASSES = {
    FIRST: ("Qwen2VLForConditionalGeneration", "Qwen2VLModel", _GME, RANKER),
    SECOND: ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLModel"),
}
# Keys beside those of the text, in configs of the first versions, which had no part for it.
_OF_THE_WHOLE = (
    *("model_type", "architectures", "auto_map", "vision_config", "transformers_version", "torch_dtype", "dtype"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings"),
    *("min_image_tokens", "max_image_tokens", "max_length"),
)
# Of gme's own code (modeling_gme_qwen2vl.py), where config.json has none: tokens of an image, and of what is read.
_GME_BLOCKS = {"min_image_tokens": 256, "max_image_tokens": 1280}
_GME_LENGTH = 1800
# Of jina-reranker-m0's own code: tokens of an image, and of a pair, and what it takes off a score.
_RANKER_BLOCKS, _RANKER_LENGTH, _RANKER_BIAS = (4, 768), 10_240, 2.65


def _checked(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with a part for the text, and what is asked of every model's at its top. Raises CheckpointError."""
    kind, vision = raw["model_type"], raw.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError("config.json has no vision_config: download the checkpoint again.")
    text = raw.get("text_config") or {key: value for key, value in raw.items() if key not in _OF_THE_WHOLE}
    for name, part, end in (("text_config", text, "text"), ("vision_config", vision, "vision")):
        own = part.get("model_type", kind) if isinstance(part, dict) else part
        if own not in (kind, f"{kind}_{end}"):
            raise CheckpointError(
                f"config.json has {name}.model_type = {str(own)[:80]!r}; bei's {kind} family reads {kind}_{end} there."
            )
    own_keys = {key: text[key] for key in ("max_position_embeddings", "hidden_size", "vocab_size") if key in text}
    # Of each part transformers has a class for this type alone.
    parts = {"text_config": {**text, "model_type": f"{kind}_text"}}
    parts["vision_config"] = {**vision, "model_type": f"{kind}_vision"}
    return {"max_position_embeddings": 32_768, **raw, **parts, **own_keys}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return spec_of(config, architecture, config.model_type)


def is_gme(raw: Mapping[str, Any]) -> bool:
    """True of a config.json that names gme's own code."""
    places, classes = raw.get("auto_map"), raw.get("architectures")
    named = [str(place).rsplit(".", 1)[-1] for place in places.values()] if isinstance(places, dict) else []
    return _GME in named or (isinstance(classes, list) and _GME in classes)


def _gme_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    length = raw.get("max_length", _GME_LENGTH)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise CheckpointError(f"config.json has max_length = {length!r}: it must be the most tokens of an input.")
    return {**_checked(raw), "usual_length": length}


def _gme_spec(config: Any, architecture: str) -> ModelSpec:
    def as_text(config: Any, head_dim: int, layer_type: str) -> RopeSpec:
        on_axes(config, head_dim, layer_type)  # for what it refuses
        return rope_from_config(config, head_dim)

    return spec_of(config, architecture, config.model_type, rope=as_text)


def _ranker_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_checked(raw), "usual_length": _RANKER_LENGTH}


def _scores(config: Any) -> tuple[HeadSpec, ...]:
    width = config.text_config.hidden_size
    layers = (DenseSpec("score.up", width, width, activation="relu"), DenseSpec("score.down", width, 1))
    return (HeadSpec("logits", ("last",), layers=layers),)


def _variant(raw: Mapping[str, Any]) -> Family | None:
    if (raw.get("architectures") or [None])[0] == RANKER:
        return _RANKER_FAMILY
    return _GME_FAMILY if is_gme(raw) else None


def _family(kind: str) -> Family:
    return Family(
        model_type=kind,
        architectures={name: _scores if name == RANKER else last_token_embedder for name in _CLASSES[kind]},
        prefix="",
        weights={
            **{name: within(OWN_LANGUAGE, "", stored) for name, stored in WEIGHTS.items()},
            # Absent where it is tied to the embeddings.
            "lm_head.weight": ("lm_head.weight", *within(OWN_LANGUAGE, "", "embed_tokens.weight")),
        },
        unused=(*within(WITHIN, "visual.", ""), "lm_head."),
        spec_from_config=_spec_from_config,
        translate=_checked,
        reference_class="AutoModel",
        variant=_variant if kind == FIRST else None,
    )


FAMILY, SECOND_FAMILY = map(_family, MODEL_TYPES)
_GME_FAMILY: Family = replace(
    FAMILY, spec_from_config=_gme_spec, translate=_gme_config, remote_classes=(_GME,), variant=None
)
_RANKER_FAMILY: Family = replace(
    FAMILY,
    architectures={RANKER: _scores},
    weights={**FAMILY.weights, "score.up": "score.0", "score.down": "score.2"},
    translate=_ranker_config,
    remote_classes=(RANKER,),
    variant=None,
    stored_forms=StoredForms(shifted={"score.2.bias": -_RANKER_BIAS}),
)


def _vision_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    part: Mapping[str, Any] = _checked(raw)["vision_config"]
    return {**part, "architectures": raw["architectures"]}


def _vision_family(kind: str) -> VisionFamily:
    read, weights = (vision_spec, VISION_WEIGHTS) if kind == FIRST else (windowed_spec, GATED_WEIGHTS)
    tower = Family(
        model_type=f"{kind}_vision",
        architectures=dict.fromkeys(_CLASSES[kind], lambda config: ()),
        prefix="",
        weights={name: within(WITHIN, "visual.", stored) for name, stored in weights.items()},
        unused=(
            *(f"{around}{part}." for around in OWN_LANGUAGE for part in ("layers", "embed_tokens", "norm")),
            *("lm_head.", "score."),
        ),
        spec_from_config=lambda config, architecture: replace(read(config, architecture), family=kind),
        translate=_vision_part,
        reference_class="AutoModel",
        # The two frames of a film that a patch spans are one and the same image.
        stored_forms=StoredForms(summed={"patch_embed.proj.weight": 2}),
    )
    return VisionFamily(
        tower,
        output="last_hidden_state",
        is_read_by_decoder=True,
        has_processor=False,  # not without a library for films
        by_config=_tower_of_code,
    )


def _tower_of_code(own: VisionFamily, raw: Mapping[str, Any]) -> VisionFamily:
    """The tower as the model's own code reads it."""
    if raw["architectures"][0] == RANKER:
        return replace(own, usual_blocks=_RANKER_BLOCKS, has_own_blocks=True)
    if not is_gme(raw):
        return own
    counts = [raw.get(name, usual) for name, usual in _GME_BLOCKS.items()]
    if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
        raise CheckpointError(
            f"config.json has {' and '.join(_GME_BLOCKS)} = {counts[0]!r} and {counts[1]!r}: they must be numbers of "
            "tokens."
        )
    return replace(own, usual_blocks=(counts[0], counts[1]), has_own_blocks=True, counts_as_text=True)


VISION, SECOND_VISION = map(_vision_family, MODEL_TYPES)
