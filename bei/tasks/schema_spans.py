"""From scores to spans, structures, relations and classes, as the gliner2 library decodes them (its
``_extract_entities``, ``_extract_structures``, ``_extract_relations`` and ``_extract_classification_result``)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.artifact.label_layouts import Extraction, Schema
from bei.core import Encoding, Float32Array, Int32Array
from bei.engine.postprocess import apply_function
from bei.engine.schema_columns import count_columns
from bei.engine.words import WORD, kinds_of, num_words, word_numbers
from bei.tasks import span_choice
from bei.tasks.extract_labels import CheckedLabels
from bei.tasks.schema_forms import AskedField, AskedPart, AskedSchema
from bei.tasks.span_choice import Candidates, check_candidates, choose, spans_above


class Value(NamedTuple):
    """What a field has: ``text``, which stands at ``start`` to ``end``, or is a choice and stands nowhere."""

    text: str
    score: float
    start: int | None = None
    end: int | None = None


# By field: one value or none, or any number of values.
Instance: TypeAlias = "dict[str, Value | list[Value] | None]"


def values_of(value: Value | list[Value] | None) -> Seq[Value]:
    """All values of a field."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


class RawValue(NamedTuple):
    """A span of words, or with ``choice`` a choice. ``rank``: by what records with equal values are compared, where it
    is not the score."""

    score: float
    first: int = -1
    last: int = -1
    choice: str = ""
    rank: float | None = None


# Of each field what it has.
_Record: TypeAlias = tuple[tuple[RawValue, ...], ...]


@dataclass
class Found:
    """Of one text: candidates for labels, and records of each structure, then of each relation, with the first word of
    their window; of each classification the largest probability of each label in any window. ``num_candidates``: of
    records, choices too."""

    labels: Candidates = field(default_factory=dict)
    records: dict[int, list[tuple[int, _Record]]] = field(default_factory=dict)
    classes: dict[str, Float32Array] = field(default_factory=dict)
    num_candidates: int = 0

    @property
    def size(self) -> int:
        """All candidates."""
        return len(self.labels) + self.num_candidates


class SchemaReader:
    """Reads the scores of windows for ``labels`` and what else ``asked`` has. ``flat``: spans of a field do not
    overlap."""

    def __init__(self, labels: CheckedLabels | None, asked: AskedSchema, layout: Extraction, *, flat: bool) -> None:
        assert isinstance(layout.schema, Schema)
        self._asked = asked
        self._parts: list[AskedPart] = [*asked.structures, *asked.relations]
        self._layout = layout
        self._num_counts = layout.schema.num_counts
        self._flat = flat
        self._num_labels = len(labels.names) if labels else 0
        self._thresholds = _least(labels.thresholds if labels else ())

    def read(
        self, found: Found, logits: Float32Array, encoding: Encoding, window: range, instances: Seq[int]
    ) -> list[int] | None:
        """Add what a window has to ``found``. ``logits`` [tokens, columns], see ``bei.engine.schema_columns``;
        ``window``: its words, in the text; ``instances``: that it was read with, of each structure, then of each
        relation. Where the model counts more of these, nothing is added, and the counts are returned. Raises
        InvalidRequestError for more than ``MOST_CANDIDATES``."""
        types = encoding.token_type_ids
        assert types is not None
        numbers, in_front = word_numbers(types), len(self._asked.words)
        if not len(numbers):  # no word has a token
            return None
        rows = logits[kinds_of(types) == WORD].reshape(len(numbers), -1, self._layout.max_width)
        blocks = self._blocks(rows, instances)
        of_labels = blocks.pop(len(self._asked.structures)) if self._num_labels else None
        counts = [count for count, _ in blocks]
        if any(count > most for count, most in zip(counts, instances, strict=True)):
            return [max(count, 1) for count in counts]
        is_text = numbers >= in_front
        words = _Words.of(numbers[is_text] - in_front, num_words(types) - in_front, window)
        if of_labels is not None and of_labels[0] > 0:
            scores = apply_function(of_labels[1][is_text, 0], "sigmoid")
            for key, score in words.spans(scores, self._thresholds):
                found.labels[key] = max(found.labels.get(key, 0.0), score)
                check_candidates(found.size, span_choice.MOST_CANDIDATES, "a text")
        for place, (part, (count, logits_of)) in enumerate(zip(self._parts, blocks, strict=True)):
            records = found.records.setdefault(place, [])
            for index in range(count):
                scores = apply_function(logits_of[:, index], "sigmoid")
                record = self._record(found, part, scores, is_text, words)
                is_whole = all(record) if part.is_relation else any(record)
                if is_whole:
                    records.append((window.start, record))
        return None

    def _blocks(self, rows: Float32Array, instances: Seq[int]) -> list[tuple[int, Float32Array]]:
        """Of each part its count, and the logits [words, instances, labels, widths]."""
        sizes = [(len(part.fields), most) for part, most in zip(self._parts, instances, strict=True)]
        if self._num_labels:
            sizes.insert(len(self._asked.structures), (self._num_labels, 1))
        width, place, found = rows.shape[2], 0, []
        for num_labels, most in sizes:
            start = place + count_columns(self._num_counts, width)
            count = int(rows[0, place:start].reshape(-1)[: self._num_counts].argmax())
            place = start + num_labels * most
            found.append((count, rows[:, start:place].reshape(len(rows), most, num_labels, width)))
        return found

    def _record(
        self, found: Found, part: AskedPart, scores: Float32Array, is_text: npt.NDArray[np.bool_], words: _Words
    ) -> _Record:
        """An instance of ``part``, of ``scores`` [words, fields, widths]."""
        by_field: list[Candidates] = [{} for _ in part.fields]
        least = _least([one.threshold if not one.choices else 2.0 for one in part.fields])  # choices are no spans
        for (first, last, index), score in words.spans(scores[is_text], least):
            by_field[index][first, last, 0] = score
        # Words in front have tokens, so rows are their numbers.
        choices = [choices_above(one, scores[:, index, 0]) for index, one in enumerate(part.fields)]
        found.num_candidates += sum(map(len, by_field)) + sum(map(len, choices))
        check_candidates(found.size, span_choice.MOST_CANDIDATES, "a text")
        return tuple(
            chosen if one.choices else tuple(_spans(candidates, flat=self._flat, is_single=one.is_single))
            for one, candidates, chosen in zip(part.fields, by_field, choices, strict=True)
        )


class _Words(NamedTuple):
    """Words of a text in a window: the numbers of those that have tokens, and whether a span may end with each word."""

    numbers: npt.NDArray[np.int32]
    is_end: npt.NDArray[np.bool_]
    first: int

    @classmethod
    def of(cls, numbers: npt.NDArray[np.int32], count: int, window: range) -> _Words:
        # A word without tokens has the next one's state in the library: no span ends there, as none begins, nor in the
        # full stop that the text lacks.
        is_end = np.zeros(max(count, 0), np.bool_)
        is_end[numbers[numbers < len(window)]] = True
        return cls(numbers, is_end, window.start)

    def spans(self, scores: Float32Array, thresholds: Float32Array) -> Iterator[tuple[tuple[int, int, int], float]]:
        """First word, last word and label, with the score, of spans of ``scores`` [words, labels, widths]."""
        if not len(self.numbers):
            return
        for first, last, label, score in spans_above(scores, self.numbers, self.is_end, thresholds):
            yield (self.first + first, self.first + last, label), score


def _least(thresholds: Seq[float]) -> Float32Array:
    """Spans at a threshold are spans too, in the gliner2 library."""
    return np.nextafter(np.array(thresholds, np.float32), np.float32(-1))


def _spans(candidates: Candidates, *, flat: bool, is_single: bool) -> list[RawValue]:
    return values_chosen(choose(candidates, flat=flat, multi_label=False, by_word=False), is_single=is_single)


def values_chosen(chosen: Iterator[tuple[int, int, int, float]], *, is_single: bool) -> list[RawValue]:
    """The spans ``chosen`` for a field, of a single one the best."""
    found = [RawValue(score, first, last) for first, last, _, score in chosen]
    return [max(found, key=lambda raw: raw.score)] if is_single and found else found


def choices_above(asked: AskedField, scores: Float32Array) -> tuple[RawValue, ...]:
    """Choices whose words score at least the threshold, or the best of them. ``scores``: of all words in front."""
    found = [RawValue(float(scores[place]), choice=choice) for choice, place in asked.choices if place < len(scores)]
    if asked.is_single and found:
        found = [max(found, key=lambda raw: raw.score)]
    return tuple(raw for raw in found if raw.score >= asked.threshold)


def instances_of_text(
    records: Seq[tuple[int, _Record]], part: AskedPart, text: str, words: Int32Array
) -> list[Instance]:
    """``records`` of a structure or relation as a text's instances, in the order of its windows. Of equal ones of
    several windows the better one is left, as in the library's ``extract_long``."""
    kept = [record for _, record in sorted(records, key=itemgetter(0))]
    if len({window for window, _ in records}) > 1:
        best: dict[tuple[tuple[tuple[int, int, str], ...], ...], _Record] = {}
        for record in kept:
            key = tuple(tuple((raw.first, raw.last, raw.choice) for raw in raws) for raws in record)
            if key not in best or _best(record) > _best(best[key]):
                best[key] = record
        kept = [*best.values()]
    return [
        {one.name: _value(raws, one, text, words) for one, raws in zip(part.fields, record, strict=True)}
        for record in kept
    ]


def _best(record: _Record) -> float:
    return max(raw.score if raw.rank is None else raw.rank for raws in record for raw in raws)


def _value(raws: Seq[RawValue], asked: AskedField, text: str, words: Int32Array) -> Value | list[Value] | None:
    values = [
        Value(raw.choice, raw.score)
        if raw.choice
        else Value(text[(start := int(words[raw.first, 0])) : (end := int(words[raw.last, 1]))], raw.score, start, end)
        for raw in raws
    ]
    if asked.is_single:
        return values[0] if values else None
    return values
