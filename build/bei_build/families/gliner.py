"""GLiNER (arXiv:2311.08526): an encoder that reads labels in front of a text, and scores spans of words for them, or
words as parts of spans. With two encoders (bi-encoders) one reads texts, the other one labels.

Its config is that of the encoder with GLiNER's own settings under ``gliner`` (``checkpoint.gliner``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families import deberta, eurobert, modernbert, t5
from bei_build.families.base import Family
from bei_build.spec.head_layers import HeadLayer, SpanScoresSpec, WordScoresSpec
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import DenseSpec

MODEL_TYPE = "gliner"
ARCHITECTURE = "UniEncoderSpanGLiNER"
WORDS_ARCHITECTURE = "UniEncoderTokenGLiNER"
BI_ARCHITECTURE = "BiEncoderSpanGLiNER"
BI_WORDS_ARCHITECTURE = "BiEncoderTokenGLiNER"
TWO_ENCODERS = (BI_ARCHITECTURE, BI_WORDS_ARCHITECTURE)
TOKEN_LEVEL = ("gliner_uni_encoder_token", "gliner_bi_encoder_token")
_ENCODER = "encoder_model_type"
BACKBONE = "token_rep_layer.bert_layer.model."
PROJECTION = "token_rep_layer.projection"
_LABELS_BACKBONE = "token_rep_layer.labels_encoder.model."
LABELS_PROJECTION = "labels_projection"
_STORED_PROJECTION = "token_rep_layer.labels_projection"
_MOST_WIDTH = 64
_MOST_RECURRENT = 8

# A product of spans is made in parts (``onnx_graph.span_scores``), which other representations do not have. The first
# value is the library's default.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "subtoken_pooling": ("first",),
    "words_splitter_type": ("whitespace",),
    "fuse_layers": (False,),
    "post_fusion_schema": ("",),
    "precomputed_prompts_mode": (None,),
}
_LINEAR = "marker"  # of the first models, and of NuNER Zero
_OF_SPANS: dict[str, tuple[object, ...]] = {"span_mode": ("markerV0", _LINEAR), "span_encoder_config": (None,)}
_OF_WORDS: dict[str, tuple[object, ...]] = {"represent_spans": (False,)}


def _scores(config: Any) -> tuple[HeadSpec, ...]:
    settings: Mapping[str, Any] = config.gliner
    by_word = scores_words(settings)
    for key, supported in (_SUPPORTED | (_OF_WORDS if by_word else _OF_SPANS)).items():
        if (value := settings.get(key, supported[0])) not in supported and (value or supported[0]):
            raise CheckpointError(
                f"gliner_config.json has {key} = {value!r}; bei's spans are computed with "
                f"{' or '.join(map(repr, supported))} only."
            )
    width = width_of(settings)
    if width % 2:
        raise CheckpointError(f"gliner_config.json has hidden_size = {width}: two directions of an LSTM halve it.")
    recurrent = _count(settings, "num_rnn_layers", 1, _MOST_RECURRENT, least=0)
    if given := has_two_encoders(settings):
        recurrent = 0  # bi-encoders have LSTMs, and do not call them (gliner.modeling.base: BaseBiEncoderModel)
    layer: HeadLayer
    if by_word:
        layer = WordScoresSpec("words", width, recurrent, given)
    else:
        longest, linear = _count(settings, "max_width", 12, _MOST_WIDTH), settings.get("span_mode") == _LINEAR
        layer = SpanScoresSpec("spans", width, longest, recurrent, given, linear=linear)
    if width == config.hidden_size:
        return (HeadSpec("span_logits", token_layers=(layer,)),)
    return (HeadSpec("span_logits", token_layers=(DenseSpec("projection", config.hidden_size, width), layer)),)


def scores_words(settings: Mapping[str, Any]) -> bool:
    """True for models that score words of spans, not spans."""
    return settings.get("model_type") in TOKEN_LEVEL or settings.get("span_mode") == "token_level"


def width_of(settings: Mapping[str, Any]) -> int:
    """Of the states of words and labels that are scored."""
    return _count(settings, "hidden_size", 512, 1 << 16)


def has_two_encoders(settings: Mapping[str, Any]) -> bool:
    """True for models with an encoder of labels."""
    return settings.get("labels_encoder") is not None


def _count(settings: Mapping[str, Any], key: str, default: int, most: int, *, least: int = 1) -> int:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"gliner_config.json has {key} = {value!r}: it must be a number from {least} to {most}.")
    return value


def _weights() -> dict[str, str]:
    """Of up to the most LSTM layers: names that the spec does not have are not looked up."""
    names = {"projection": PROJECTION}
    for head in ("spans", "words"):
        names |= recurrent_weights(head, _MOST_RECURRENT)
    places = {"start": "project_start", "end": "project_end", "out": "out_project"}
    modules = {part: f"span_rep_layer.span_rep_layer.{place}" for part, place in places.items()}
    for part, module in {**modules, "label": "prompt_rep_layer"}.items():
        names |= {f"spans.{part}.0": f"{module}.0", f"spans.{part}.1": f"{module}.3"}  # 1 and 2: ReLU and dropout
    names["spans.out"] = modules["out"]  # one layer
    names |= {f"words.{part}": f"scorer.proj_{place}" for part, place in (("word", "token"), ("label", "label"))}
    return names | {"words.out.0": "scorer.out_mlp.0", "words.out.1": "scorer.out_mlp.3"}


def recurrent_weights(head: str, num_layers: int) -> dict[str, str]:
    """Names of the LSTMs' weights, of the layer ``head``."""
    return {
        f"{head}.rnn.{index}.{direction}.{ours}.{kind}": f"rnn.lstm.{kind}_{theirs}_l{index}{suffix}"
        for index in range(num_layers)
        for direction, suffix in (("ahead", ""), ("back", "_reverse"))
        for ours, theirs in (("input", "ih"), ("hidden", "hh"))
        for kind in ("weight", "bias")
    }


def _variant(raw: Mapping[str, Any]) -> Family | None:
    families = _OF_TWO_ENCODERS if has_two_encoders(raw.get("gliner", {})) else _FAMILIES
    return next((family for family in families if family.model_type == raw.get(_ENCODER)), None)


def _translate(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in raw.items() if key != _ENCODER}


def _of(backbone: Family) -> Family:
    return replace(
        backbone,
        aliases=(MODEL_TYPE,),
        architectures={ARCHITECTURE: _scores, WORDS_ARCHITECTURE: _scores},
        prefix=BACKBONE,
        weights={**backbone.weights, **_weights()},
        translate=_translate,
        reference_class=None,  # transformers has no such heads
        asks_about_prompts=False,
        variant=_variant,
    )


def _beside_labels(family: Family) -> Family:
    """The family of texts of a model with two encoders."""
    return replace(
        family,
        architectures=dict.fromkeys(TWO_ENCODERS, _scores),
        unused=(*family.unused, _LABELS_BACKBONE, f"{_STORED_PROJECTION}."),
    )


def of_labels(family: Family) -> Family:
    """The encoder of labels, which is one of ``family``, in the checkpoint of both."""
    others = (BACKBONE, f"{PROJECTION}.", "span_rep_layer.", "prompt_rep_layer.", "rnn.", "scorer.")
    return replace(
        family,
        prefix=_LABELS_BACKBONE,
        weights={**family.weights, LABELS_PROJECTION: _STORED_PROJECTION},
        unused=(*family.unused, *others),
        reference_class=None,
    )


_FAMILIES = tuple(map(_of, (deberta.FAMILY, modernbert.FAMILY, t5.FAMILY, t5.MT5_FAMILY, eurobert.FAMILY)))
_OF_TWO_ENCODERS = tuple(map(_beside_labels, _FAMILIES))
FAMILY = _FAMILIES[0]
BY_ENCODER: Mapping[str, Family] = {family.model_type: family for family in _FAMILIES}
