"""GLiREL (arXiv:2501.03172): an encoder that reads names of relations in front of a text, and scores pairs of entities
that a request names.

Its config is that of the encoder with GLiREL's own settings under ``glirel`` (``checkpoint.glirel``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.engine.entity_pairs import MOST_ENTITIES
from bei.errors import CheckpointError
from bei_build.families import deberta, modernbert
from bei_build.families.base import Family
from bei_build.families.gliner import BACKBONE, PROJECTION, recurrent_weights
from bei_build.spec.head_layers import RelationScoresSpec
from bei_build.spec.model_spec import HeadSpec

MODEL_TYPE = "glirel"
ARCHITECTURE = "GLiREL"
ENCODER = "encoder_model_type"
_NAME = "relations"
_MOST_WIDTH = 1 << 16

# Settings whose other values are other models. What ``refine_relation`` and ``refine_prompt`` add is not built.
_SUPPORTED: Mapping[str, object] = {
    "subtoken_pooling": "first",
    "rel_mode": "marker",
    "span_marker_mode": "markerv1",
    "scorer": "dot",
    "refine_relation": False,
    "refine_prompt": False,
    "add_entity_markers": False,
    "max_entity_pair_distance": None,
}
LABELS = ("ent_token", "label", "both")


def _scores(config: Any) -> tuple[HeadSpec, ...]:
    settings: Mapping[str, Any] = config.glirel
    for key, supported in _SUPPORTED.items():
        if (value := settings.get(key)) not in (None, supported):
            raise CheckpointError(
                f"glirel_config.json has {key} = {value!r}; bei's GLiREL is computed with {supported!r} only: choose a "
                "model with that."
            )
    if (labels := settings.get("label_embed_strategy")) not in LABELS:
        raise CheckpointError(
            f"glirel_config.json has label_embed_strategy = {labels!r}; it must be one of {', '.join(LABELS)}."
        )
    width = settings.get("hidden_size")
    if isinstance(width, bool) or not isinstance(width, int) or not 2 <= width <= _MOST_WIDTH or width % 2:
        raise CheckpointError(
            f"glirel_config.json has hidden_size = {width!r}: it must be an even number up to {_MOST_WIDTH}."
        )
    layer = RelationScoresSpec(_NAME, width, config.hidden_size, MOST_ENTITIES, averages_labels=labels == "both")
    return (HeadSpec("span_logits", token_layers=(layer,)),)


def _weights() -> dict[str, str]:
    names = {f"{_NAME}.projection": PROJECTION, **recurrent_weights(_NAME, 1)}
    pairs, entities = "span_rep_layer.rel_rep_layer", "span_rep_layer.rel_rep_layer.span_marker"
    modules = {
        "start": f"{entities}.project_start",
        "end": f"{entities}.project_end",
        "out": f"{entities}.out_project",
        "pair": f"{pairs}.out_project",
        "label": "prompt_rep_layer",
    }
    for part, module in modules.items():
        names |= {f"{_NAME}.{part}.0": f"{module}.0", f"{_NAME}.{part}.1": f"{module}.3"}  # 1, 2: ReLU and dropout
    return names


def _variant(raw: Mapping[str, Any]) -> Family | None:
    return BY_ENCODER.get(str(raw.get(ENCODER)))


def _translate(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in raw.items() if key != ENCODER}


def _of(backbone: Family) -> Family:
    return replace(
        backbone,
        aliases=(MODEL_TYPE,),
        architectures={ARCHITECTURE: _scores},
        prefix=BACKBONE,
        weights={**backbone.weights, **_weights()},
        unused=(*backbone.unused, "coref_classifier."),  # of training
        translate=_translate,
        reference_class=None,  # transformers has no such head
        asks_about_prompts=False,
        variant=_variant,
    )


_FAMILIES = tuple(map(_of, (deberta.FAMILY, modernbert.FAMILY)))
FAMILY = _FAMILIES[0]
BY_ENCODER: Mapping[str, Family] = {family.model_type: family for family in _FAMILIES}
