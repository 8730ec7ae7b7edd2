"""From scores of words to the spans of a text, as the gliner library chooses them (its SpanDecoder, TokenDecoder), and
gliner2 (its finalize_spans)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.artifact.label_layouts import Extraction
from bei.core import Encoding, Float32Array
from bei.engine.postprocess import apply_function
from bei.engine.words import WORD, kinds_of, num_words, word_numbers
from bei.errors import InvalidRequestError

# The score, less than 0, first word, last word and label of a span.
_Ranked: TypeAlias = tuple[float, int, int, int]
# Spans that do not overlap, from the last to the first.
_Chain: TypeAlias = "tuple[_Ranked, _Chain] | None"
# Of one text: the score of each span (first word, last word) and label.
Candidates: TypeAlias = dict[tuple[int, int, int], float]

# Candidates of one text, of which each takes 250 bytes and some microseconds: a threshold of 0 makes one of every span
# with every label. The gliner library has no limit.
MOST_CANDIDATES = 65_536
# Of all texts of a request.
MOST_OF_REQUEST = 1_000_000
# Scores of a request's windows that wait for each other in memory, in 64 MB: a book has gigabytes.
MOST_SCORES = 1 << 24


def collect(
    found: Candidates,
    logits: Float32Array,
    encoding: Encoding,
    window: range,
    thresholds: Float32Array,
    layout: Extraction,
) -> None:
    """Add a window's spans above their thresholds to ``found``. ``logits`` [tokens, columns]: by labels, then by the
    layout's columns, with further labels of other sequences behind. ``window``: its words, in the text. Raises
    InvalidRequestError for more than ``MOST_CANDIDATES``. Of schemas see ``bei.tasks.schema_spans``."""
    types = encoding.token_type_ids
    assert types is not None
    starts, count = word_numbers(types), num_words(types)
    if not len(starts):  # no word has a token
        return
    rows = logits[kinds_of(types) == WORD].reshape(len(starts), -1, layout.columns)[:, : len(thresholds)]
    scores = apply_function(rows, "sigmoid")
    if layout.by_word:
        whole = np.full((count, len(thresholds), 3), -1.0, np.float32)  # words without tokens are in no span
        whole[starts] = scores
        places = _of_words(whole, thresholds)
    else:
        places = spans_above(scores, starts, np.ones(count, np.bool_), thresholds)
    for first, last, label, score in places:
        key = (window.start + first, window.start + last, label)
        found[key] = max(found.get(key, 0.0), score)
        check_candidates(len(found), MOST_CANDIDATES, "a text")


def spans_above(
    scores: Float32Array, starts: npt.NDArray[np.int32], is_end: npt.NDArray[np.bool_], thresholds: Float32Array
) -> Iterator[tuple[int, int, int, float]]:
    """First word, last word, label and score of spans of ``scores`` [words, labels, widths]. ``is_end``: for
    each word of the window, true if a span may end with it."""
    above: npt.NDArray[np.bool_] = scores > thresholds[:, None]
    width = scores.shape[2]
    above &= np.pad(is_end, (0, width))[starts[:, None] + np.arange(width)][:, None, :]
    check_candidates(int(np.count_nonzero(above)), MOST_CANDIDATES, "a text")
    for (word, label, width), score in zip(np.argwhere(above).tolist(), scores[above].tolist(), strict=True):
        first = int(starts[word])
        yield first, first + width, label, score


def _of_words(scores: Float32Array, thresholds: Float32Array) -> Iterator[tuple[int, int, int, float]]:
    """Spans of ``scores`` [words, labels, (first, last, inside)]: the first and last word above the threshold, no word
    inside below it. A span's score is the least of these."""
    first, last, inside = scores[..., 0], scores[..., 1], scores[..., 2]
    for word, label in np.argwhere(first > thresholds).tolist():
        least, lower = thresholds[label], np.flatnonzero(inside[word:, label] < thresholds[label])
        stop = word + int(lower[0]) if len(lower) else len(scores)
        if stop == word:
            continue
        ends = last[word:stop, label]
        bound = np.minimum(np.minimum.accumulate(inside[word:stop, label]), first[word, label])
        for place in np.flatnonzero(ends > least).tolist():
            yield word, word + place, label, float(min(bound[place], ends[place]))


def choose(
    found: Candidates, *, flat: bool, multi_label: bool, by_word: bool, apart: bool = False
) -> Iterator[tuple[int, int, int, float]]:
    """First word, last word, label and score of the candidates that are left when those are taken out that overlap a
    better one, in the text's order. ``apart``: one of the same label, as in GLiNER2."""
    # Equal scores are ranked as the library lists them: by first word, then width and label, or label and width. numpy
    # sorts without the interpreter's lock.
    keys, values = np.array([*found], np.int64).reshape(-1, 3), np.array([*found.values()], np.float64)
    firsts, lasts, labels = keys.T
    order = np.lexsort((*((lasts, labels) if by_word else (labels, lasts)), firsts, -values))
    ranked = zip(keys[order].tolist(), values[order].tolist(), strict=True)
    longest = max((last - first for first, last, _ in found), default=0)
    chosen: dict[int, list[tuple[int, int, int, float]]] = {}  # by first word
    groups: defaultdict[int | None, dict[int, set[int]]] = defaultdict(dict)  # first and last words, each span once
    for (first, last, label), score in ranked:
        ends = groups[label if apart else None]
        if last in ends.get(first, ()):
            is_free = multi_label
        else:
            near: Iterable[int] = range(first - longest, last + 1)
            near = [place for place in near if place in ends] if longest < len(ends) else ends
            is_free = not any(_excludes(first, last, place, end, flat=flat) for place in near for end in ends[place])
        if is_free:
            ends.setdefault(first, set()).add(last)
            chosen.setdefault(first, []).append((first, last, label, score))
    for place in sorted(chosen):
        yield from chosen[place]


def choose_most(found: Candidates, *, apart: bool) -> Iterator[tuple[int, int, int, float]]:
    """The candidates that overlap no other one of them and have the largest sum of scores, in the text's order.
    ``apart``: of each label by itself. A span has one label."""
    groups: defaultdict[int | None, list[_Ranked]] = defaultdict(list)
    for (first, last, label), score in found.items():
        groups[label if apart else None].append((-score, first, last, label))
    chosen = [one for group in groups.values() for one in _largest_sum(group)]
    for negative, first, last, label in sorted(chosen, key=itemgetter(1, 0, 2, 3)):
        yield first, last, label, -negative


def _largest_sum(spans: list[_Ranked]) -> list[_Ranked]:
    """Those of ``spans`` that do not overlap and have the largest sum of scores. Of equal sums the one of more spans,
    then the one with the better span, the first that differs."""
    by_end = sorted(spans, key=itemgetter(2, 1, 0, 3))
    ends = [last for _, _, last, _ in by_end]
    best: list[tuple[float, int, _Chain]] = [(0.0, 0, None)]
    for place, span in enumerate(by_end):
        total, count, chain = best[bisect_left(ends, span[1], 0, place)]
        own, without = (total - span[0], count + 1, (span, chain)), best[-1]
        is_better = own[:2] > without[:2]
        if own[:2] == without[:2]:
            is_better = sorted(_spans_of(own[2])) < sorted(_spans_of(without[2]))
        best.append(own if is_better else without)
    return [*_spans_of(best[-1][2])]


def _spans_of(chain: _Chain) -> Iterator[_Ranked]:
    while chain is not None:
        span, chain = chain
        yield span


def _excludes(first: int, last: int, other_first: int, other_last: int, *, flat: bool) -> bool:
    """True if the two, which differ, may not stand beside each other."""
    if first > other_last or other_first > last:
        return False
    is_nested = (first <= other_first and last >= other_last) or (other_first <= first and other_last >= last)
    return flat or not is_nested


def check_candidates(count: int, most: int, of: str, what: Literal["spans", "relations"] = "spans") -> None:
    """Raise InvalidRequestError for more candidates than ``most``."""
    if count > most:
        fewer = "labels or shorter texts" if what == "spans" else "relations or entities"
        raise InvalidRequestError(
            f"More than {most} {what} of {of} score above their thresholds: raise threshold, or send fewer {fewer}.",
            "threshold",
        )
