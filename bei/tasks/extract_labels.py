"""Labels of a request to find spans for: names, or names with what gliner2's schema says of an entity."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from bei.artifact.label_layouts import Extraction
from bei.errors import InvalidRequestError
from bei.service.model_service import ModelService
from bei.tasks.support import require
from bei.tokenizer.schema_prompt import SchemaPart

THRESHOLD = 0.5  # of the gliner library
# Of labels that are vectors, with spans of up to 12 words: their scores take 50 bytes a word and label, and a step has
# tens of thousands of padded words. Wider spans take more, and models that score words four times as much.
MOST_LABELS = 256
_USUAL_WIDTH = 12

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class LabelForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a label means, for models that read descriptions (GLiNER2), its threshold, and whether all its spans are
    wanted (``list``) or the best one (``str``)."""

    description: str | None = None
    threshold: Share | None = None
    dtype: Literal["list", "str"] = "list"


# Names, or what is said of each; a text is its description.
Labels: TypeAlias = Seq[str] | Mapping[str, str | LabelForm]


class CheckedLabels(NamedTuple):
    """``thresholds``: of each label. ``descriptions``: of labels that have one. ``single``: the places of labels of
    which the best span is wanted."""

    names: tuple[str, ...]
    thresholds: tuple[float, ...]
    descriptions: tuple[tuple[str, str], ...] = ()
    single: frozenset[int] = frozenset()

    @property
    def num_chars(self) -> int:
        """Characters that are read with each text."""
        return sum(map(len, self.names)) + sum([len(name) + len(meaning) for name, meaning in self.descriptions])

    def described(self, layout: Extraction) -> SchemaPart | None:
        """The labels as a model reads them that reads a schema; None for others."""
        return SchemaPart("labels", layout.schema.task, self.names, self.descriptions) if layout.schema else None


def checked_labels(labels: Labels, threshold: float | Mapping[str, float], service: ModelService) -> CheckedLabels:
    """``labels``, of which those without a threshold have ``threshold``. Raises InvalidRequestError,
    TaskNotSupportedError."""
    layout, names = extraction_of(service), tuple(labels)
    if layout.max_entities is not msgspec.UNSET:
        raise no_entities(service.name)
    if not names:
        raise InvalidRequestError("labels is empty: name what to find.", "labels")
    if layout.label_width is not msgspec.UNSET:
        if len(names) > (at_once := most_vectors(layout)):
            raise InvalidRequestError(
                f"There are {len(names)} labels, and a text is scored for {at_once} at once: send fewer.", "labels"
            )
    else:
        check_readable("labels", len(names), 2, service, "labels")
    seen: dict[str, int] = {}
    for place, label in enumerate(names):
        if not label.strip():
            raise InvalidRequestError(f"labels {place} is empty: name what to find, or leave it out.", "labels")
        if label in seen:
            raise InvalidRequestError(f"labels {place} is the same as labels {seen[label]}: leave one out.", "labels")
        seen[label] = place
    forms = _forms(labels) if isinstance(labels, Mapping) else {}
    own = {name: form.threshold for name, form in forms.items() if form.threshold is not None}
    if isinstance(threshold, Mapping):
        if (unknown := next((name for name in threshold if name not in seen), None)) is not None:
            raise InvalidRequestError(f"threshold has {unknown!r}, which is none of the labels.", "threshold")
        if (twice := next((name for name in threshold if name in own), None)) is not None:
            raise InvalidRequestError(f"threshold and labels both have one of {twice!r}: leave one out.", "threshold")
        own, threshold = {**own, **threshold}, THRESHOLD
    thresholds = tuple(float(own.get(name, threshold)) for name in names)
    if not all(0 <= value <= 1 for value in thresholds):
        raise InvalidRequestError("threshold must be from 0 to 1.", "threshold")
    return CheckedLabels(
        names,
        thresholds,
        checked_descriptions({name: form.description for name, form in forms.items()}, service, bool(layout.schema)),
        frozenset(place for place, name in enumerate(names) if name in forms and forms[name].dtype == "str"),
    )


def no_entities(name: str) -> InvalidRequestError:
    """The error of a request to model ``name`` without entities."""
    return InvalidRequestError(
        f"entities is missing: {name} scores relations between the entities of a text, and finds none. Send those that "
        "another model finds, as entities to POST /v1/extract or to bei.Model.extract_relations; nothing else has a "
        "place for them.",
        "entities",
    )


def check_readable(what: str, count: int, tokens_each: int, service: ModelService, param: str) -> None:
    """Raise InvalidRequestError for more of ``what`` than the model reads at once, of so many tokens or more each."""
    if count * tokens_each > (most := service.manifest.max_seq_len):
        raise InvalidRequestError(
            f"There are {count} {what}, of {tokens_each} tokens or more each, and the model reads {most}: send fewer.",
            param,
        )


def check_examples(examples: Seq[Seq[str]], labels: Seq[str], where: str, service: ModelService, param: str) -> None:
    """Raise InvalidRequestError for ``examples``, texts and the label of each, that a model cannot read with
    ``labels``. ``where`` they stand, for messages."""
    check_readable("examples", len(examples), 3, service, param)  # each has a token in front of both
    known = {*labels}
    for place, (text, label) in enumerate(examples):
        if label not in known:
            raise InvalidRequestError(
                f"{where} {place} has {label!r}, which is none of the labels: leave it out.", param
            )
        if not text.strip():
            raise InvalidRequestError(f"{where} {place} has an empty text: leave it out.", param)


def checked_descriptions(
    given: Mapping[str, str | None], service: ModelService, reads: bool
) -> tuple[tuple[str, str], ...]:
    """The labels of ``given`` that have a description. ``reads``: the model reads them. Raises InvalidRequestError."""
    found = tuple((name, meaning) for name, meaning in given.items() if meaning is not None)
    if found and not reads:
        raise InvalidRequestError(
            f"{service.name} reads names of labels alone, GLiNER2 descriptions too: send a list of names.", "labels"
        )
    for name, meaning in found:
        if not meaning.strip():
            raise InvalidRequestError(f"The description of {name!r} in labels is empty: leave it out.", "labels")
    return found


def extraction_of(service: ModelService) -> Extraction:
    """How the model reads labels and words. Raises TaskNotSupportedError."""
    require(service, "extract")
    layout = service.manifest.extraction
    assert isinstance(layout, Extraction)  # as the loader has checked
    return layout


def most_vectors(layout: Extraction) -> int:
    """Labels that are vectors, of which a text is scored for so many at once."""
    return MOST_LABELS // 4 if layout.by_word else MOST_LABELS * _USUAL_WIDTH // max(_USUAL_WIDTH, layout.max_width)


def _forms(labels: Mapping[str, str | LabelForm]) -> dict[str, LabelForm]:
    return {name: LabelForm(form) if isinstance(form, str) else form for name, form in labels.items()}
