"""Relations between spans of GLiNER2.5, as the gliner2 library finds them: pairs of candidates, for which a text is
read again (its ``TypedRelationPairGenerator``), without those that repeat others (its
``_deduplicate_relation_edges``)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bei.artifact.label_layouts import Candidates as Pool
from bei.artifact.label_layouts import Extraction, RelationPairs
from bei.core import Encoding, Float32Array, Int32Array, LabelVectors
from bei.engine.boundaries import Pairs, pairs_of
from bei.engine.postprocess import apply_function
from bei.engine.span_pairs import pair_rows
from bei.engine.words import num_words
from bei.tasks import span_choice
from bei.tasks.candidate_spans import in_pool
from bei.tasks.extract_labels import CheckedLabels
from bei.tasks.schema_forms import ENDS, AskedSchema
from bei.tasks.schema_spans import Found, RawValue
from bei.tasks.span_choice import check_candidates


class Proposed(NamedTuple):
    """Pairs of a window, the best of each relation first: the number of the ``relations`` [P], of the head the first
    word and the one behind the last, and these of the tail, with words in front of the text (``spans`` [P, 4]), and the
    probabilities of both (``scores`` [P, 2]). ``table``: what the model reads of them."""

    relations: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int64]
    scores: Float32Array
    table: LabelVectors


class Mention(NamedTuple):
    """A head or a tail: its first and last word in the text, where it stands, and its probability."""

    first: int
    last: int
    start: int
    end: int
    text: str
    score: float

    @property
    def plain(self) -> str:
        """The text in lower case, with one blank between words."""
        return " ".join(self.text.casefold().split())


class Edge(NamedTuple):
    """A relation from ``head`` to ``tail``, and its probability."""

    score: float
    head: Mention
    tail: Mention


class RelationReader:
    """Reads the pairs of windows for the relations of ``asked``, which stand behind ``labels`` and structures."""

    def __init__(self, labels: CheckedLabels | None, asked: AskedSchema, layout: Extraction) -> None:
        assert layout.candidates
        assert layout.candidates.relations
        self._pool: Pool = layout.candidates
        self._limits: RelationPairs = layout.candidates.relations
        self._thresholds = [one.fields[0].threshold for one in asked.relations]
        self._first_place = len(asked.structures)
        num_fields = sum(len(part.fields) for part in asked.structures)
        self._first_label = num_fields + (len(labels.names) if labels else 0)
        self._in_front = len(asked.words)

    def proposed(self, logits: Float32Array, encoding: Encoding) -> Proposed | None:
        """The pairs of a window to read it again for; None: it has none. ``logits`` [tokens, columns], see
        ``bei.engine.boundaries``."""
        types = encoding.token_type_ids
        assert types is not None
        if not num_words(types):
            return None
        count = len(ENDS) * len(self._thresholds)
        pairs = pairs_of(logits, types, self._pool.most_boundaries, self._first_label + count)
        labels = self._first_label + np.arange(0, count, len(ENDS))
        return proposed(pairs, in_pool(pairs, self._pool), labels, self._limits)

    def read(
        self, found: Found, logits: Float32Array, pairs: Proposed, window: range, text: str, words: Int32Array
    ) -> None:
        """Add the relations of a window to ``found``. ``logits`` [tokens, n]: those of ``pairs``, row by row;
        ``window``: its words, in the text. Raises InvalidRequestError for more than ``MOST_CANDIDATES``."""
        scores = apply_function(logits.reshape(-1)[: len(pairs.spans)], "sigmoid")
        for relation, threshold in enumerate(self._thresholds):
            edges = [
                Edge(score, *ends)
                for place in np.flatnonzero(pairs.relations == relation).tolist()
                if (score := float(scores[place])) >= threshold
                and (ends := self._mentions(pairs, place, window, text, words)) is not None
            ]
            records = found.records.setdefault(self._first_place + relation, [])
            for edge in without_repetitions(edges):
                values = (RawValue(one.score, one.first, one.last, rank=edge.score) for one in (edge.head, edge.tail))
                records.append((window.start, tuple((value,) for value in values)))
                found.num_candidates += 1
            check_candidates(found.size, span_choice.MOST_CANDIDATES, "a text", "relations")

    def _mentions(
        self, pairs: Proposed, place: int, window: range, text: str, words: Int32Array
    ) -> tuple[Mention, Mention] | None:
        """Head and tail; None where one has words in front of the text, or the full stop that a text lacks."""
        spans = (pairs.spans[place] - self._in_front).tolist()
        if min(spans) < 0 or max(spans) > len(window):
            return None
        first, second = (
            self._mention(spans[2 * side] + window.start, spans[2 * side + 1] + window.start - 1, score, text, words)
            for side, score in enumerate(pairs.scores[place].tolist())
        )
        return first, second

    @staticmethod
    def _mention(first: int, last: int, score: float, text: str, words: Int32Array) -> Mention:
        start, end = int(words[first, 0]), int(words[last, 1])
        return Mention(first, last, start, end, text[start:end], score)


def proposed(
    pairs: Pairs, is_candidate: npt.NDArray[np.bool_], labels: npt.NDArray[np.int64], limits: RelationPairs
) -> Proposed | None:
    """Pairs of those of ``pairs`` that are candidates, for relations whose heads have the numbers ``labels``; None: no
    relation has any."""
    starts, ends = np.nonzero(is_candidate)  # in the order of starts and ends, in which equal ones are ranked
    spans = np.stack([pairs.starts[starts], pairs.ends[ends]], axis=1)
    parts = []
    for relation, label in enumerate(labels.tolist()):
        head_scores, tail_scores = apply_function(pairs.scores[label : label + len(ENDS), starts, ends], "sigmoid")
        heads = _best(head_scores, limits.most_heads, limits.least_end)
        tails = _best(tail_scores, limits.most_tails, limits.least_end)
        products = head_scores[heads][:, None] * tail_scores[tails]
        products[(spans[heads][:, None] == spans[tails]).all(axis=2)] = -1.0
        best = _best(products.reshape(-1), limits.most_pairs, 0.0)
        heads, tails = heads[best // max(1, len(tails))], tails[best % max(1, len(tails))]
        scores = np.stack([head_scores[heads], tail_scores[tails]], axis=1)
        parts.append((np.full(len(best), relation), np.concatenate([spans[heads], spans[tails]], axis=1), scores))
    of_pairs, places, scores = (np.concatenate(each) for each in zip(*parts, strict=True))
    if not len(of_pairs):
        return None
    return Proposed(of_pairs, places, scores, pair_rows(labels[of_pairs], places))


def _best(scores: Float32Array, most: int, least: float) -> npt.NDArray[np.intp]:
    """The places of the ``most`` largest ``scores`` that are at least ``least``, largest first."""
    order = np.argsort(-scores, kind="stable")[:most]
    return order[scores[order] >= least]


def without_repetitions(edges: Seq[Edge]) -> list[Edge]:
    """``edges`` of a relation in the order of the text: between the longest mentions, one between the same texts, and
    none with an end whose words are a part of those of another's, where the other end has the same words."""
    if len(edges) < 2:
        return [*edges]
    heads, tails = _longest({edge.head for edge in edges}), _longest({edge.tail for edge in edges})
    by_place: dict[tuple[Mention, Mention], Edge] = {}
    for edge in edges:
        key = heads[edge.head], tails[edge.tail]
        if key not in by_place or edge.score > by_place[key].score:
            by_place[key] = Edge(edge.score, *key)
    by_text: dict[tuple[str, str], Edge] = {}
    for edge in by_place.values():
        texts = edge.head.plain, edge.tail.plain
        if texts not in by_text or _preference(edge) < _preference(by_text[texts]):
            by_text[texts] = edge
    kept = [by_text[texts] for texts in _whole([*by_text])]
    return sorted(kept, key=lambda edge: (edge.head.start, edge.tail.start, -edge.score))


def _longest(mentions: set[Mention]) -> dict[Mention, Mention]:
    """Of each mention the longest one around it, the first of equal ones."""
    return {
        one: max(
            (other for other in mentions if other.start <= one.start and other.end >= one.end),
            key=lambda other: (other.end - other.start, -other.start),
        )
        for one in mentions
    }


def _preference(edge: Edge) -> tuple[int, float, int, int]:
    """Less is better: near ends, then a high score."""
    head, tail = edge.head, edge.tail
    return max(head.start - tail.end, tail.start - head.end, 0), -edge.score, head.start, tail.start


def _whole(texts: Seq[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Heads and tails without those of which one has a part of the words of another's, whose other end has the same."""
    words = [tuple(frozenset(end.split()) for end in ends) for ends in texts]
    for ends, (head, tail) in zip(texts, words, strict=True):
        if not any((head < other and tail == end) or (tail < end and head == other) for other, end in words):
            yield ends
