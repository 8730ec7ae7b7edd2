"""Waiting sequences that begin as one of the next step does, and join it: their prefix is computed there anyway. Not
thread-safe: callers lock."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from math import ceil
from typing import NamedTuple

from bei.core import Limits
from bei.engine.shared_prefixes import LEAST_SHARED, common_length, num_shared
from bei.scheduler.next_batch import StepBounds, StepCosts

_TextAndArrival = tuple[bytes, int]


class WaitingTexts:
    """The texts of a lane, INT32 ids as bytes, sorted: those that begin alike are neighbours."""

    def __init__(self) -> None:
        self._sorted: list[_TextAndArrival] = []

    def add(self, text: bytes, arrival: int) -> None:
        insort(self._sorted, (text, arrival))

    def remove(self, text: bytes, arrival: int) -> None:
        del self._sorted[bisect_left(self._sorted, (text, arrival))]

    def clear(self) -> None:
        self._sorted.clear()

    def nearest(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Arrivals of those that begin as ``text`` does, with the number of common tokens, at least ``LEAST_SHARED``:
        the most first."""
        low, high = bisect_left(self._sorted, (text, -1)) - 1, bisect_right(self._sorted, (text, -1))
        below, above = self._common(text, low), self._common(text, high)
        while max(below, above) >= LEAST_SHARED:
            if below > above:
                yield self._sorted[low][1], below
                low -= 1
                below = self._common(text, low)
            else:
                yield self._sorted[high][1], above
                high += 1
                above = self._common(text, high)

    def _common(self, text: bytes, place: int) -> int:
        return common_length(text, self._sorted[place][0]) if 0 <= place < len(self._sorted) else 0


class Candidate(NamedTuple):
    """The ``place`` of a waiting sequence of ``num_tokens`` tokens, of which ``num_common`` are in the step."""

    place: int
    num_tokens: int
    num_common: int


def joining(
    texts: Seq[bytes],
    lengths: Seq[int],
    candidates: Iterator[Candidate],
    limits: Limits,
    costs: StepCosts,
    bounds: StepBounds,
) -> list[int]:
    """The places of ``candidates`` that join the step of ``texts`` of ``lengths`` tokens.

    They use the room that shared prefixes leave: the step computes no more tokens, and is predicted to take no longer,
    than one of its lead's length without sharing may. Each must pay: what it adds takes no longer than its share of a
    later step of sequences like it.
    """
    most_tokens, longest, size = min(bounds.max_tokens, limits.max_num_tokens), max(lengths), len(lengths)
    tokens = sum(lengths) - num_shared(texts)
    seconds = costs.seconds(tokens, size, longest)
    most_s = min(bounds.max_s, costs.seconds(most_tokens, ceil(most_tokens / longest), longest))
    found: list[int] = []
    for place, length, num_common in candidates:
        if size == limits.max_batch_size:
            break
        with_it = tokens + length - num_common, size + 1, max(longest, length)
        with_it_s = costs.seconds(*with_it)
        if with_it[0] > most_tokens or with_it_s > most_s:
            break
        apart = max(1, min(limits.max_batch_size, most_tokens // length))
        if with_it_s - seconds > costs.seconds(apart * length, apart, length) / apart:
            continue
        (tokens, size, longest), seconds = with_it, with_it_s
        found.append(place)
    return found
