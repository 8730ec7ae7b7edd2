"""GLiClass (arXiv:2508.07662): an encoder that reads labels beside a text, and scores each for it.

Its config is that of the encoder with GLiClass's own settings under ``gliclass``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families import deberta, eurobert, modernbert, t5
from bei_build.families.base import Family, activation_named
from bei_build.spec.head_layers import LabelScoresSpec, Scorer
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import Pooling

MODEL_TYPE = "GLiClass"
ARCHITECTURE = "GLiClassModel"
_NAME = "labels"

_SUPPORTED: Mapping[str, object] = {
    "architecture_type": "uni-encoder",
    "use_lstm": False,
    "squeeze_layers": False,
    "encoder_layer_id": -1,
    "use_segment_embeddings": False,
    "class_token_pooling": "first",
    "use_calibrator": False,
    "multimodal": False,
}
_POOLINGS: Mapping[str, Pooling] = {"first": "cls", "avg": "mean", "max": "max", "sum": "sum", "last": "last"}
_SCORERS: Mapping[str, Scorer] = {"simple": "dot", "weighted-dot": "weighted", "mlp": "mlp"}
_MLP = (256, 128)  # whatever the config says, as in the library


def _scores(config: Any) -> tuple[HeadSpec, ...]:
    settings: Mapping[str, Any] = config.gliclass
    for key, supported in _SUPPORTED.items():
        if (value := settings.get(key, supported)) != supported:
            raise CheckpointError(
                f"config.json has {key} = {value!r}; bei's GLiClass is built with {supported!r} only."
            )
    width, kind = config.hidden_size, settings.get("scorer_type", "simple")
    if settings.get("hidden_size", width) != width:
        raise CheckpointError(f"config.json has hidden_size = {settings['hidden_size']!r}, and its encoder {width}.")
    inner: tuple[int, ...] = ()
    if kind == "weighted-dot":
        inner = (4 * width,)
    elif kind == "mlp":
        inner = _MLP
    elif kind != "simple":
        raise CheckpointError(f"config.json has scorer_type = {kind!r}; bei builds simple, weighted-dot and mlp.")
    layer = LabelScoresSpec(
        _NAME,
        width,
        _pooling(settings),
        activation_named(settings.get("projector_hidden_act", "gelu")),
        _SCORERS[kind],
        inner,
        bool(settings.get("normalize_features", False)),
    )
    return (HeadSpec("label_logits", token_layers=(layer,)),)


def _pooling(settings: Mapping[str, Any]) -> Pooling:
    """Of the text's tokens: with ``extract_text_features`` those from the separator on, of which the first counts."""
    name = settings.get("pooling_strategy", "first")
    if settings.get("extract_text_features", False):
        if settings.get("text_token_index") is None:
            raise CheckpointError("config.json has extract_text_features and no text_token_index: download it again.")
        if name != "first":
            raise CheckpointError(
                f"config.json has extract_text_features with pooling_strategy {name!r}, which depends on the padding "
                "of a batch; bei builds it with first."
            )
        return "first_marked"
    if not isinstance(name, str) or name not in _POOLINGS:
        raise CheckpointError(f"config.json has pooling_strategy = {name!r}; bei builds {', '.join(_POOLINGS)}.")
    return _POOLINGS[name]


def _weights() -> dict[str, str | tuple[str, ...]]:
    names: dict[str, str | tuple[str, ...]] = {f"{_NAME}.scale": "model.logit_scale"}
    for side, module, rows in (("text", "text_projector", "proj_text"), ("label", "classes_projector", "proj_label")):
        names |= {f"{_NAME}.{side}.{index}": f"model.{module}.linear_{index + 1}" for index in range(2)}
        names[f"{_NAME}.{side}.rows"] = f"model.scorer.{rows}"
    # Between the linear layers stand activations, and in front of the first activation of weighted-dot a dropout.
    places = {0: ("out_mlp.0", "mlp.0"), 1: ("out_mlp.3", "mlp.2"), 2: ("mlp.4",)}
    return names | {
        f"{_NAME}.out.{index}": tuple(f"model.scorer.{place}" for place in found) for index, found in places.items()
    }


def _variant(raw: Mapping[str, Any]) -> Family | None:
    encoder = raw.get("encoder_config")
    kind = encoder.get("model_type", "deberta-v2") if isinstance(encoder, dict) else None
    return next((family for family in _FAMILIES if family.model_type == kind), None)


def _translate(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The encoder's config, with the rest under ``gliclass``."""
    encoder = raw.get("encoder_config")
    if not isinstance(encoder, dict) or _variant(raw) is None:
        kind = encoder.get("model_type") if isinstance(encoder, dict) else None
        raise CheckpointError(
            f"config.json has an encoder of model_type {kind!r}; bei builds GLiClass on "
            f"{', '.join(family.model_type for family in _FAMILIES)}."
        )
    own = {key: value for key, value in raw.items() if key != "encoder_config"}
    size = raw.get("vocab_size") or encoder.get("vocab_size")  # after the library's tokens were added
    return {**encoder, "vocab_size": size, "architectures": [ARCHITECTURE], "gliclass": own}


def _of(backbone: Family) -> Family:
    def spec_from_config(config: Any, architecture: str) -> ModelSpec:
        return replace(
            backbone.spec_from_config(config, architecture), marked_id=config.gliclass.get("text_token_index")
        )

    return replace(
        backbone,
        aliases=(MODEL_TYPE,),
        architectures={ARCHITECTURE: _scores},
        prefix="model.encoder_model.",
        weights={**backbone.weights, **_weights()},
        unused=(*backbone.unused, "model.logit_scale"),
        translate=_translate,
        reference_class=None,  # transformers has no such head
        asks_about_prompts=False,
        variant=_variant,
        spec_from_config=spec_from_config,
    )


_FAMILIES = tuple(map(_of, (deberta.FAMILY, modernbert.FAMILY, t5.FAMILY, t5.MT5_FAMILY, eurobert.FAMILY)))
FAMILY = _FAMILIES[0]
