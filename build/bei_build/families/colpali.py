"""ColPali (Faysse et al. 2024, arXiv:2407.01449): PaliGemma (arXiv:2407.07726) with a vector for each token.

SigLIP's states of patches, through a linear layer, stand in the place of word rows of a Gemma without a causal mask,
and a linear layer gives the vectors of the states of all tokens. A text is read alone, as a query.

transformers masks later tokens unless it gets token types, which ColPali's processor makes for every input; so all
tokens see each other. Positions count from 1 there; rotations know differences alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, require
from bei_build.families.decoder import WEIGHTS, decoder_spec, rms
from bei_build.families.siglip import VISION as SIGLIP
from bei_build.families.vision import VisionFamily, encoder_layers, patches_of
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import DenseSpec, EmbeddingsSpec, NormSpec

MODEL_TYPE = "colpali"
_NORM_OFFSET = 1.0
_PROJECTION = "embedding_proj_layer"
# Of the whole, and of its decoder; what else a file may have.
_WHOLE_TYPE, _TEXT_TYPE, _VISION_TYPE = "paligemma", "gemma", "siglip_vision_model"


def _part(raw: Mapping[str, Any], name: str, model_type: str) -> Mapping[str, Any]:
    """The config ``name`` of ``raw``. Raises CheckpointError."""
    found = raw.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"config.json has no {name}: download the checkpoint again.")
    if found.get("model_type", model_type) != model_type:
        raise CheckpointError(
            f"config.json has {name}.model_type = {found['model_type']!r}; bei's {MODEL_TYPE} family reads "
            f"{model_type!r} only."
        )
    return found


def _checked(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The whole config, with what is asked of every model's at its top."""
    whole = _part(raw, "vlm_config", _WHOLE_TYPE)
    text = _part(whole, "text_config", _TEXT_TYPE)
    _part(whole, "vision_config", _VISION_TYPE)
    own = {key: text[key] for key in ("max_position_embeddings", "hidden_size", "vocab_size") if key in text}
    return {"max_position_embeddings": 8192, **raw, **own}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    whole, text = config.vlm_config, config.vlm_config.text_config
    if text.use_bidirectional_attention is not True:
        raise CheckpointError(
            "config.json has vlm_config.text_config.use_bidirectional_attention = "
            f"{text.use_bidirectional_attention!r}; bei's {MODEL_TYPE} family supports only True."
        )
    require(text, "sliding_window", None)  # with one the class has two masks
    if not (whole.projection_dim == text.hidden_size == config.hidden_size):
        raise CheckpointError(
            f"config.json has vlm_config.projection_dim = {whole.projection_dim!r} and text_config.hidden_size = "
            f"{text.hidden_size!r}: an image's rows must be as wide as those of words."
        )
    if not 0 <= whole.image_token_index < text.vocab_size:
        raise CheckpointError(
            f"config.json has vlm_config.image_token_index = {whole.image_token_index!r}: it must be the id of the "
            f"tokenizer's <image>, from 0 to {text.vocab_size - 1}."
        )
    spec = decoder_spec(text, architecture, bias=text.attention_bias, output_bias=text.attention_bias, causal=False)
    norm = rms(text, _NORM_OFFSET)
    return replace(
        spec,
        family=MODEL_TYPE,
        embeddings=EmbeddingsSpec(text.vocab_size, scale=text.hidden_size**0.5, reads_images=True),
        layers=tuple(replace(layer, norm=norm) for layer in spec.layers),
        final_norm=norm,
    )


def _token_vectors(config: Any) -> tuple[HeadSpec, ...]:
    layer = DenseSpec(_PROJECTION, config.vlm_config.text_config.hidden_size, config.embedding_dim)
    return (HeadSpec("token_embedding", token_layers=(layer,)),)


def _also_within(model: str, stored: str | tuple[str, ...]) -> tuple[str, ...]:
    """Names of tensors, which earlier versions of transformers saved with ``model`` in front."""
    names = (stored,) if isinstance(stored, str) else stored
    return (*names, *(f"{model}.{name}" for name in names))


FAMILY = Family(
    model_type=MODEL_TYPE,
    architectures={"ColPaliForRetrieval": _token_vectors},
    prefix="vlm.language_model.",
    weights={
        **{name: _also_within("model", stored) for name, stored in WEIGHTS.items() if name != "lm_head.weight"},
        _PROJECTION: _PROJECTION,
    },
    unused=("vlm.vision_tower.", "vlm.multi_modal_projector.", "vlm.lm_head.", "lm_head."),
    spec_from_config=_spec_from_config,
    translate=_checked,
    reference_class="ColPaliForRetrieval.vlm",
    norm_offset=_NORM_OFFSET,
)


def _vision_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tower's config, with the width of what the decoder reads."""
    whole = _part(raw, "vlm_config", _WHOLE_TYPE)
    width = whole.get("projection_dim", 2048)
    return {
        **_part(whole, "vision_config", _VISION_TYPE),
        "projection_dim": width,
        "architectures": raw["architectures"],
    }


def _vision_spec(config: Any, architecture: str) -> ModelSpec:
    """States of patches behind the last norm; the class reads no head on them (``vision_use_head``) either."""
    patches = patches_of(config, bias=True, class_token=False)
    projection = DenseSpec("projection", config.hidden_size, config.projection_dim)
    return ModelSpec(
        family=MODEL_TYPE,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(0, (config.image_size // config.patch_size) ** 2, patches=patches),
        layers=encoder_layers(config),
        final_norm=NormSpec(config.layer_norm_eps),
        heads=(HeadSpec("image_features", token_layers=(projection,)),),
    )


VISION = VisionFamily(
    Family(
        model_type=_VISION_TYPE,
        architectures={"ColPaliForRetrieval": lambda config: ()},
        prefix="vlm.vision_tower.",
        weights={
            **{
                name: _also_within("vision_model", stored)
                for name, stored in SIGLIP.family.weights.items()
                if not name.startswith("attention_pool")
            },
            "projection": "vlm.multi_modal_projector.linear",
        },
        unused=(
            *("vlm.language_model.", "vlm.lm_head.", f"{_PROJECTION}.", "embeddings.position_ids"),
            *("head.", "vision_model.head."),
        ),
        spec_from_config=_vision_spec,
        translate=_vision_part,
        reference_class="ColPaliForRetrieval",
    ),
    output="embeddings",
    is_read_by_decoder=True,
)
