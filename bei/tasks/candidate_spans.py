"""From scores of pairs of boundaries to spans and structures, as the gliner2 library decodes them for models of its
architecture "boundary" (its ``DocumentCandidatePool``, ``_decode_entities`` and ``_decode_legacy_structures``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from bei.artifact.label_layouts import Candidates as Pool
from bei.artifact.label_layouts import Extraction
from bei.core import Encoding, Float32Array
from bei.engine.boundaries import Pairs, pairs_of, word_scores
from bei.engine.postprocess import apply_function
from bei.engine.words import num_words
from bei.errors import InvalidRequestError
from bei.tasks import span_choice
from bei.tasks.extract_labels import CheckedLabels
from bei.tasks.schema_forms import ENDS, AskedField, AskedSchema
from bei.tasks.schema_spans import Found, RawValue, choices_above, values_chosen
from bei.tasks.span_choice import Candidates, check_candidates, choose, choose_most

# In front of all but the best of each label.
_RESERVED = 5000.0
# The threshold of what is not wanted by itself: heads and tails of relations (``bei.tasks.candidate_relations``), and
# fields of structures with a mode (``bei.tasks.candidate_records``).
_NEVER = 2.0


class CandidateReader:
    """Reads the scores of windows for ``labels`` and the structures of ``asked``. ``flat``: spans of a field do not
    overlap."""

    def __init__(self, labels: CheckedLabels | None, asked: AskedSchema, layout: Extraction, *, flat: bool) -> None:
        assert layout.candidates
        self._pool: Pool = layout.candidates
        self._structures = asked.structures
        self._in_front = len(asked.words)
        self._flat = flat
        fields = [_NEVER if part.mode else one.threshold for part in asked.structures for one in part.fields]
        of_labels = labels.thresholds if labels else ()
        ends = [_NEVER] * (len(ENDS) * len(asked.relations))
        self._thresholds = np.array([*fields, *of_labels, *ends], np.float32)
        self._num_fields = len(fields)

    def read(
        self, found: Found, logits: Float32Array, encoding: Encoding, window: range, instances: Seq[int]
    ) -> list[int] | None:
        """Add what a window has to ``found``; None, as no instances are counted. ``logits`` [tokens, columns], see
        ``bei.engine.boundaries``; ``window``: its words, in the text. Raises InvalidRequestError for more than
        ``MOST_CANDIDATES``, and for a text of words without tokens."""
        del instances
        types = encoding.token_type_ids
        assert types is not None
        count = num_words(types)
        if not len(self._thresholds) or not count:
            return None
        if min(count, self._pool.most_boundaries) > len(logits):
            raise InvalidRequestError(
                f"The text has {count} words, most of which have no tokens: take out what is not written.", "input"
            )
        by_field: list[Candidates] = [{} for _ in range(self._num_fields)]
        pairs = pairs_of(logits, types, self._pool.most_boundaries, len(self._thresholds))
        for (first, last, label), score in self._candidates(pairs, window):
            if label < self._num_fields:
                by_field[label][first, last, 0] = score
                found.num_candidates += 1
            else:
                key = first, last, label - self._num_fields
                found.labels[key] = max(found.labels.get(key, 0.0), score)
            check_candidates(found.size, span_choice.MOST_CANDIDATES, "a text")
        fields = [one for part in self._structures for one in part.fields]
        values = iter([self._values(*one, logits) for one in zip(fields, by_field, range(len(fields)), strict=True)])
        for place, part in enumerate(self._structures):
            record = tuple(next(values) for _ in part.fields)
            if part.mode:
                continue
            records = found.records.setdefault(place, [])
            if any(record):
                records.append((window.start, record))
        return None

    def _values(
        self, asked: AskedField, candidates: Candidates, place: int, logits: Float32Array
    ) -> tuple[RawValue, ...]:
        """What the field at ``place`` has."""
        if asked.choices:
            scores = word_scores(logits[: self._in_front], self._pool.most_boundaries, place)
            return choices_above(asked, apply_function(scores, "sigmoid"))
        return tuple(values_chosen(in_text(chosen_of(candidates, flat=self._flat)), is_single=asked.is_single))

    def _candidates(self, pairs: Pairs, window: range) -> Iterator[tuple[tuple[int, int, int], float]]:
        """First word, last word and label, with the score, of candidates that reach their thresholds. No span ends
        behind the window, in the full stop that a text lacks; labels may be absent, fields may not.

        Spans that begin in front of the text keep others from being chosen, and are no answer (``in_text``); numbers
        of their words are negative. In a window behind the first one, where they would stand in the text, they are
        left out."""
        least = self._in_front if window.start else 0
        is_asked = (pairs.starts[:, None] >= least) & (pairs.ends <= self._in_front + len(window))
        starts, ends = np.nonzero(in_pool(pairs, self._pool) & is_asked)
        scores = apply_function(pairs.scores[:, starts, ends], "sigmoid")
        is_absent = apply_function(pairs.absent, "sigmoid") > self._pool.absent_above
        is_absent[: self._num_fields] = False
        scores[is_absent] = -1.0
        labels, places = np.nonzero(scores >= self._thresholds[:, None])
        check_candidates(len(labels), span_choice.MOST_CANDIDATES, "a text")
        first = window.start - self._in_front
        firsts, lasts = pairs.starts[starts[places]] + first, pairs.ends[ends[places]] + first - 1
        keys = zip(firsts.tolist(), lasts.tolist(), labels.tolist(), strict=True)
        yield from zip(keys, scores[labels, places].tolist(), strict=True)


def chosen_of(candidates: Candidates, *, flat: bool) -> Iterator[tuple[int, int, int, float]]:
    """The spans of a field."""
    if flat:
        return choose_most(candidates, apart=False)
    return choose(candidates, flat=False, multi_label=False, by_word=False)


def in_text(chosen: Iterable[tuple[int, int, int, float]]) -> Iterator[tuple[int, int, int, float]]:
    """``chosen`` without those that begin in front of the text."""
    return (one for one in chosen if one[0] >= 0)


def in_pool(pairs: Pairs, pool: Pool) -> npt.NDArray[np.bool_]:
    """Which ``pairs`` are candidates, [S, E]."""
    if np.count_nonzero(pairs.is_span) <= pool.pool_size:
        return pairs.is_span
    chosen = np.zeros_like(pairs.is_span)
    chosen[ranked(pairs, pool)] = True
    return chosen


def ranked(pairs: Pairs, pool: Pool) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The starts and ends of the candidates among ``pairs``: the best of each label, then the best of all."""
    starts, ends = np.nonzero(pairs.is_span)  # in the order of starts and ends, in which equal ones are ranked
    compat = pairs.compat[starts, ends]
    ranks = compat + pairs.start_scores.max(axis=0)[starts] + pairs.end_scores.max(axis=0)[ends]
    by_label = pairs.start_scores[:, starts] + pairs.end_scores[:, ends] + compat
    best = np.argsort(-by_label, axis=1, kind="stable")[:, : pool.least_per_label]
    reserved = np.broadcast_to(_RESERVED + np.arange(best.shape[1], 0, -1, dtype=np.float32), best.shape)
    np.maximum.at(ranks, best, reserved)
    kept = np.argsort(-ranks, kind="stable")[: pool.pool_size]
    return starts[kept], ends[kept]
