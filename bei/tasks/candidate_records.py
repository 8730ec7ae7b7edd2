"""Structures with a mode, of GLiNER2.5: instances that are formed of a text's candidates, as the gliner2 library's
``_decode_records`` has them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bei.artifact.label_layouts import Candidates as Pool
from bei.artifact.label_layouts import Extraction, Records
from bei.core import Encoding, Float32Array
from bei.engine.boundaries import Pairs, pairs_of
from bei.engine.postprocess import apply_function
from bei.engine.record_columns import candidate_rows, label_rows
from bei.engine.words import num_words
from bei.errors import InvalidRequestError
from bei.tasks import span_choice
from bei.tasks.candidate_spans import chosen_of, ranked
from bei.tasks.extract_labels import CheckedLabels
from bei.tasks.record_instances import Formed, formed
from bei.tasks.schema_forms import ENDS, AskedField, AskedPart, AskedSchema
from bei.tasks.schema_spans import Found, RawValue, values_chosen
from bei.tasks.span_choice import Candidates, check_candidates


class _Window(NamedTuple):
    """The candidates of a window, in the order of the pool: their first words, and the words behind them, with those in
    front of the text [C, 2], and their scores for all labels [labels, C]; the numbers of the window's words in the
    text."""

    spans: npt.NDArray[np.int64]
    logits: Float32Array
    words: range


class RecordReader:
    """Reads the structures of ``asked`` that have a mode. ``flat``: values of a field do not overlap."""

    def __init__(self, labels: CheckedLabels | None, asked: AskedSchema, layout: Extraction, *, flat: bool) -> None:
        assert layout.candidates
        assert layout.candidates.records
        self._pool: Pool = layout.candidates
        self._records: Records = layout.candidates.records
        self._structures = asked.structures
        self._in_front = len(asked.words)
        self._flat = flat
        num_fields = sum(len(part.fields) for part in asked.structures)
        self._num_labels = num_fields + (len(labels.names) if labels else 0) + len(ENDS) * len(asked.relations)

    def read(self, found: Found, logits: Float32Array, rows: Float32Array, encoding: Encoding, words: range) -> None:
        """Add the instances of a window to ``found``. ``logits`` [tokens, columns], see ``bei.engine.boundaries``;
        ``rows`` [tokens, columns], see ``bei.engine.record_columns``; ``words``: the window's, in the text. Raises
        InvalidRequestError for more than ``MOST_CANDIDATES``, and for a text of words without tokens."""
        types = encoding.token_type_ids
        assert types is not None
        if not (count := num_words(types)):
            return
        if count >= len(rows):
            raise InvalidRequestError(
                f"The text has {count} words, most of which have no tokens: take out what is not written.", "input"
            )
        pairs = pairs_of(logits, types, self._pool.most_boundaries, self._num_labels)
        window = self._window(pairs, words)
        candidates = candidate_rows(rows, window.spans, self._records)
        first = 0
        for place, part in enumerate(self._structures):
            own = slice(first, first + len(part.fields))
            first = own.stop
            if part.mode is None:
                continue
            anchors = None if part.anchor is None else window.logits[own][part.anchor]
            instances = formed(part, anchors, candidates, label_rows(rows, types, own, self._records))
            if part.anchor is not None:
                instances = _in_order_of_text(instances, part.anchor, window)
            records = found.records.setdefault(place, [])
            for one in instances:
                found.num_candidates += sum(map(len, one.values))
                check_candidates(found.size, span_choice.MOST_CANDIDATES, "a text")
                if any(record := self._record(part, one, window, own)):
                    records.append((words.start, record))

    def _window(self, pairs: Pairs, words: range) -> _Window:
        starts, ends = ranked(pairs, self._pool)
        spans = np.stack([pairs.starts[starts], pairs.ends[ends]], axis=1)
        return _Window(spans, pairs.scores[:, starts, ends], words)

    def _record(
        self, part: AskedPart, instance: Formed, window: _Window, labels: slice
    ) -> tuple[tuple[RawValue, ...], ...]:
        """What the fields of ``part``, which have ``labels``, have in an instance."""
        return tuple(
            tuple(
                raw._replace(rank=instance.score)
                for raw in self._values(asked, part.threshold, values, window, window.logits[label])
            )
            for asked, values, label in zip(part.fields, instance.values, range(labels.start, labels.stop), strict=True)
        )

    def _values(
        self,
        asked: AskedField,
        threshold: float,
        values: tuple[tuple[int, float], ...],
        window: _Window,
        logits: Float32Array,
    ) -> list[RawValue]:
        """Those of a field's ``values`` that stand in the text and score enough: as spans of the field, unless one must
        be there, and both so and as the instance's by the field's own threshold."""
        candidates: Candidates = {}
        for place, share in values:
            first, behind = (window.spans[place] - self._in_front).tolist()
            if first < 0 or behind > len(window.words):
                continue
            own = float(apply_function(logits[place : place + 1], "sigmoid")[0])
            score = min(own, share)
            if (asked.must_be_there or own >= threshold) and score >= asked.own_threshold:
                candidates[window.words.start + first, window.words.start + behind - 1, 0] = score
        return values_chosen(chosen_of(candidates, flat=self._flat), is_single=asked.is_single)


def _in_order_of_text(instances: list[Formed], anchor: int, window: _Window) -> list[Formed]:
    """``instances`` by the spans of their anchors."""
    return sorted(instances, key=lambda one: window.spans[one.values[anchor][0][0]].tolist())
