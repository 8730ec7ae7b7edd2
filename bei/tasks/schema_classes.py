"""Classifications of a schema, in the forms of gliner2's: their checks, and which labels a text has (its
``_decode_classification_probabilities``)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from bei.artifact.label_layouts import Labelling
from bei.core import Encoding, Float32Array
from bei.engine.postprocess import apply_function
from bei.errors import InvalidRequestError
from bei.service.model_service import ModelService
from bei.tasks.extract_labels import THRESHOLD, Share, check_examples, check_readable
from bei.tokenizer.schema_prompt import SchemaPart

_LEAST_LABELS = 2
_FIELD = "classifications"


class ClassesForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A classification, ``prompt`` what it means. Labels share one whole, and the best is wanted; with ``multi_label``
    each has a probability, and at most ``top_k`` from ``cls_threshold`` are wanted, or the best. ``class_act``: which
    of both probabilities are. ``examples``: texts and the label of each."""

    task: str
    labels: list[str] | dict[str, str]
    multi_label: bool = False
    cls_threshold: Share = THRESHOLD
    top_k: Annotated[int, Meta(ge=1)] | None = None
    class_act: Literal["auto", "sigmoid", "softmax"] = "auto"
    prompt: str | None = None
    examples: list[Annotated[list[str], Meta(min_length=2, max_length=2)]] = msgspec.field(default_factory=list)


class LabelScore(NamedTuple):
    """A label and its score: a probability, or the logit."""

    label: str
    score: float


class AskedClasses(NamedTuple):
    """A classification that a request asks for, checked; ``part`` is what the model reads of it."""

    form: ClassesForm
    part: SchemaPart

    def probabilities(self, logits: Float32Array) -> Float32Array:
        """Of the labels, [labels]."""
        form = self.form
        share = "softmax" if form.class_act == "auto" and not form.multi_label else form.class_act
        found: Float32Array = apply_function(logits[None], "softmax" if share == "softmax" else "sigmoid")[0]
        return found

    def chosen(self, probabilities: Float32Array) -> LabelScore | list[LabelScore]:
        """The best label, or of several those that are wanted, in the request's order, with ``top_k`` best first."""
        scores = [LabelScore(*one) for one in zip(self.part.labels, probabilities.tolist(), strict=True)]
        best = scores[int(probabilities.argmax())]
        if not self.form.multi_label:
            return best
        wanted = probabilities >= np.float32(self.form.cls_threshold)
        kept = [one for one, is_wanted in zip(scores, wanted, strict=True) if is_wanted] or [best]
        return kept if self.form.top_k is None else sorted(kept, key=lambda one: -one.score)[: self.form.top_k]


def checked_classes(given: Seq[ClassesForm], service: ModelService) -> tuple[AskedClasses, ...]:
    """``given`` as the model reads them. Raises InvalidRequestError."""
    layout = service.manifest.labelling
    if not isinstance(layout, Labelling):
        raise InvalidRequestError(
            f"{service.name} was built to find spans alone: build it without --task, or leave {_FIELD} out.", _FIELD
        )
    check_readable("labels of classifications", sum(len(one.labels) for one in given), 2, service, _FIELD)
    seen: set[str] = set()
    for place, one in enumerate(given):
        if not one.task.strip():
            raise InvalidRequestError(f"{_FIELD} {place} has an empty task: name what is asked.", _FIELD)
        if one.task in seen:
            raise InvalidRequestError(f"{_FIELD} has the task {one.task!r} twice: leave one out.", _FIELD)
        seen.add(one.task)
        if (fault := next(_faults(one), None)) is not None:
            raise InvalidRequestError(f"{_FIELD} {one.task!r} has {fault}", _FIELD)
        check_examples(one.examples, [*one.labels], f"{_FIELD} {one.task!r} examples", service, _FIELD)
    return tuple(AskedClasses(one, _part(one, layout)) for one in given)


def _faults(form: ClassesForm) -> Iterator[str]:
    names = [*form.labels]
    if not form.multi_label and (form.top_k is not None or form.cls_threshold != THRESHOLD):
        field = "cls_threshold" if form.top_k is None else "top_k"
        yield f"{field}, and the best label is wanted: leave it out, or send multi_label."
    if len(names) < _LEAST_LABELS:
        yield f"{len(names)} labels: send {_LEAST_LABELS} or more."
    if len({*names}) < len(names):
        yield f"the label {max(names, key=names.count)!r} twice: leave one out."
    if not all(name.strip() for name in names):
        yield "an empty label: leave it out."
    if isinstance(form.labels, dict) and (silent := [name for name, said in form.labels.items() if not said.strip()]):
        yield f"an empty description of {silent[0]!r}: send a list of names, or describe it."
    if form.prompt is not None and not form.prompt.strip():
        yield "an empty prompt: leave it out."


def _part(form: ClassesForm, layout: Labelling) -> SchemaPart:
    return SchemaPart(
        f"{_FIELD} {form.task!r}",
        form.task,
        tuple(form.labels),
        tuple(form.labels.items()) if isinstance(form.labels, dict) else (),
        tuple((text, label) for text, label in form.examples),
        marker=layout.label_id,
        about=form.prompt or "",
    )


def add_probabilities(
    asked: Seq[AskedClasses], found: dict[str, Float32Array], logits: Float32Array, encoding: Encoding
) -> None:
    """Add what a window's labels score to ``found``, which has the best of each of all windows. ``logits``
    [tokens, 1]: of the labels' markers they are the labels'."""
    start = 0
    for one in asked:
        marked = logits[encoding.input_ids == one.part.marker, 0]
        stop = start + len(one.part.labels)
        probabilities = one.probabilities(marked[start:stop])
        found[one.part.name] = np.maximum(probabilities, found.get(one.part.name, probabilities))
        start = stop
