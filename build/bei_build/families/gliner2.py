"""GLiNER2 (arXiv:2507.18546): an encoder that reads a schema in front of a text. Of its tasks bei builds entities and
classifications.

Its config is that of the encoder with GLiNER2's own settings under ``gliner2`` (``checkpoint.gliner2``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families import deberta, gliner2_boundary, modernbert
from bei_build.families.base import Family
from bei_build.spec.head_layers import Counting, CountingSpec, SpanScoresSpec
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import DenseSpec

MODEL_TYPE = "extractor"
ARCHITECTURE, OF_BOUNDARIES = "GLiNER2", "GLiNER2.5"
ENCODER = "encoder_model_type"
_NAME = "spans"
_MOST_WIDTH = 64

# Settings whose other values are other models.
_SUPPORTED: Mapping[str, object] = {"architecture": "span"}
_COUNTING: Mapping[str, Counting] = {"count_lstm": "mlp", "count_lstm_v2": "transformer"}


def _scores(config: Any) -> tuple[HeadSpec, ...]:
    settings: Mapping[str, Any] = config.gliner2
    for key, supported in _SUPPORTED.items():
        if (value := settings.get(key) or supported) != supported:
            raise CheckpointError(
                f"config.json has {key} = {value!r}; bei's GLiNER2 is computed with {supported!r} only: choose a "
                "model with that."
            )
    if (kind := _counting(settings)) is None:
        raise CheckpointError(
            f"config.json has counting_layer = {settings['counting_layer']!r}; bei's GLiNER2 is computed with "
            f"{' and '.join(_COUNTING)} only: choose a model with one of them."
        )
    head = settings.get("span_head") or {}
    if not isinstance(head, dict) or head.get("span_mode", "markerV0") != "markerV0":
        raise CheckpointError(f"config.json has span_head = {head!r}; GLiNER2 has span_mode markerV0 only.")
    width = head.get("max_width", settings.get("max_width", 8))
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= _MOST_WIDTH:
        raise CheckpointError(f"config.json has max_width = {width!r}: it must be a number from 1 to {_MOST_WIDTH}.")
    hidden = config.hidden_size
    spans = SpanScoresSpec(_NAME, hidden, width, 0, counting=CountingSpec(kind))
    classifier = (
        DenseSpec("label_scores.0", hidden, 2 * hidden, activation="relu"),
        DenseSpec("label_scores.1", 2 * hidden, 1),
    )
    return HeadSpec("span_logits", token_layers=(spans,)), HeadSpec("label_logits", token_layers=classifier)


def _counting(settings: Mapping[str, Any]) -> Counting | None:
    """None: a layer that is not built."""
    name = settings.get("counting_layer") or "count_lstm"
    return _COUNTING.get(name) if isinstance(name, str) else None


def _weights() -> dict[str, str]:
    names = {f"{_NAME}.schema.position": "count_embed.pos_embedding"}
    for ours, theirs in (("input", "ih"), ("hidden", "hh")):
        for kind in ("weight", "bias"):
            names[f"{_NAME}.schema.gru.{ours}.{kind}"] = f"count_embed.gru.{kind}_{theirs}_l0"
    for part, place in (("start", "project_start"), ("end", "project_end"), ("out", "out_project")):
        module = f"span_rep.span_rep_layer.{place}"
        names |= {f"{_NAME}.{part}.0": f"{module}.0", f"{_NAME}.{part}.1": f"{module}.3"}  # 1, 2: ReLU and dropout
    names |= {f"{_NAME}.schema.count.{index}": f"count_pred.{2 * index}" for index in range(2)}
    return names | {f"label_scores.{index}": f"classifier.{2 * index}" for index in range(2)}


_LABELS: Mapping[Counting, Mapping[str, str]] = {
    "mlp": {f"label.{index}": f"projector.{2 * index}" for index in range(2)},
    "transformer": {
        "narrow": "transformer.in_projector",
        **{f"label.{index}": f"transformer.out_projector.{2 * index}" for index in range(3)},
        **{
            f"blocks.{index}.{ours}": f"transformer.transformer.layers.{index}.{theirs}"
            for index in range(CountingSpec("transformer").num_layers)
            for ours, theirs in (
                ("input.weight", "self_attn.in_proj_weight"),
                ("input.bias", "self_attn.in_proj_bias"),
                ("output", "self_attn.out_proj"),
                ("up", "linear1"),
                ("down", "linear2"),
                ("attention_norm", "norm1"),
                ("mlp_norm", "norm2"),
            )
        },
    },
}


def _variant(raw: Mapping[str, Any]) -> Family | None:
    settings = raw.get("gliner2", {})
    families = _FAMILIES[_counting(settings) or "mlp"]
    if settings.get("architecture") == "boundary":
        families = _BOUNDARY_FAMILIES
    return next((one for one in families if one.model_type == raw.get(ENCODER)), None)


def _translate(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in raw.items() if key != ENCODER}


def _of(backbone: Family, kind: Counting) -> Family:
    labels = {f"{_NAME}.schema.{ours}": f"count_embed.{theirs}" for ours, theirs in _LABELS[kind].items()}
    return replace(
        _common(backbone),
        architectures={ARCHITECTURE: _scores},
        weights={**backbone.weights, **_weights(), **labels},
        unused=(*backbone.unused, "classifier.", "span_rep.", "count_pred.", "count_embed."),  # each of one task
    )


def _of_boundaries(backbone: Family) -> Family:
    return replace(
        _common(backbone),
        architectures={OF_BOUNDARIES: gliner2_boundary.scores},
        weights={**backbone.weights, **gliner2_boundary.WEIGHTS},
        unused=(*backbone.unused, *gliner2_boundary.UNUSED),
    )


def _common(backbone: Family) -> Family:
    return replace(
        backbone,
        aliases=(MODEL_TYPE,),
        prefix="encoder.",
        translate=_translate,
        reference_class=None,  # transformers has no such head
        variant=_variant,
    )


_FAMILIES: Mapping[Counting, tuple[Family, ...]] = {
    kind: tuple(_of(backbone, kind) for backbone in (deberta.FAMILY, modernbert.FAMILY)) for kind in _LABELS
}
_BOUNDARY_FAMILIES = tuple(map(_of_boundaries, (deberta.FAMILY, modernbert.FAMILY)))
FAMILY = _FAMILIES["mlp"][0]
# By the encoder's type, for what all counting layers have.
BY_ENCODER: Mapping[str, Family] = {family.model_type: family for family in _FAMILIES["mlp"]}
