"""Counts of the last minute, by second: requests by lane, status and latency, and engine steps. ``/stats`` reads them.

Each second has a row of counters in a ring; old rows are cleared as time passes, so counting costs a few increments.
Processes of one host share a clock, so their windows are summed second by second (``MinuteWindow``).
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import log2, prod
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from bei.port import LANES, Lane

WINDOW_S: Final = 60
_ROWS = WINDOW_S + 1  # the current second has a row too

Clock: TypeAlias = Callable[[], float]

# Latencies are counted in buckets of equal ratio: eight for each doubling, from 0.1 ms to 105 s. A percentile is the
# middle of its bucket, so it is within 4.5 % of the measured value.
_PER_DOUBLING = 8
_LEAST_S = 1e-4
_BUCKETS = 20 * _PER_DOUBLING
_MIDDLES = _LEAST_S * 2 ** ((np.arange(_BUCKETS) + 0.5) / _PER_DOUBLING)

# The group of requests without a lane: reads, and requests refused before they were accepted.
OTHER: Final = "other"
GROUPS: tuple[str, ...] = (*LANES, OTHER)

_FIRST_STATUS, _STATUSES = 100, 500  # statuses are 100 to 599
_WIDTH = _STATUSES + _BUCKETS  # columns of a group: one a status, then one a bucket


class MinuteWindow(NamedTuple):
    """The content of a ring: ``rows`` by second, the oldest first; the last one, ``second`` of the clock, is not over.
    ``covered_s``: seconds covered, less than a minute soon after the start."""

    second: int
    covered_s: float
    rows: npt.NDArray[Any]

    def packed(self) -> PackedMinuteWindow:
        """The window without zeros, for another process."""
        places = np.flatnonzero(self.rows)
        values = self.rows.ravel()[places].astype(np.float64)
        return PackedMinuteWindow(self.second, self.covered_s, places.astype(np.int32).tobytes(), values.tobytes())


class PackedMinuteWindow(msgspec.Struct, array_like=True, frozen=True):
    """A MinuteWindow without zeros: ``places`` int32 in the table, ``values`` float64, both as raw bytes."""

    second: int
    covered_s: float
    places: bytes
    values: bytes

    def unpacked_like(self, window: MinuteWindow) -> MinuteWindow:
        """The window, with rows as wide as those of ``window``."""
        rows = np.zeros_like(window.rows)
        rows.ravel()[np.frombuffer(self.places, np.int32)] = np.frombuffer(self.values)
        return MinuteWindow(self.second, self.covered_s, rows)


def summed(windows: Seq[MinuteWindow]) -> MinuteWindow:
    """The sum of at least one window, second by second, up to the latest second of any."""
    second = max(window.second for window in windows)
    rows = np.zeros_like(windows[0].rows)
    for window in windows:
        behind = min(second - window.second, len(rows))
        rows[: len(rows) - behind] += window.rows[behind:]
    return MinuteWindow(second, max(window.covered_s for window in windows), rows)


class _Ring:
    """A row of counters for each second. ``code`` is ``array``'s type code; ``table`` is the same memory in numpy."""

    def __init__(self, shape: tuple[int, ...], code: str, clock: Clock) -> None:
        self.width = prod(shape)
        self.flat: array[Any] = array(code, [0]) * (_ROWS * self.width)  # faster to increment than numpy's
        self.table: npt.NDArray[Any] = np.frombuffer(self.flat, code).reshape(_ROWS, *shape)
        self._clock = clock
        self._began_s = clock()
        self._second = int(self._began_s)

    def place(self) -> int:
        """The index in ``flat`` of this second's row."""
        second = int(self._clock())
        if second != self._second:
            for passed in range(max(self._second, second - _ROWS) + 1, second + 1):
                self.table[passed % _ROWS] = 0
            self._second = second
        return second % _ROWS * self.width

    def window(self) -> MinuteWindow:
        """A copy of the current content."""
        row = self.place() // self.width
        now_s = self._clock()
        covered_s = max(1e-3, min(now_s - self._began_s, WINDOW_S + now_s % 1))
        return MinuteWindow(self._second, covered_s, np.roll(self.table, -row - 1, axis=0))


class Percentiles(NamedTuple):
    """Percentiles of times in seconds; None without samples."""

    p50: float | None
    p90: float | None
    p99: float | None


class RequestCounts(NamedTuple):
    """Requests of one lane in the last minute.

    ``answered`` by status. ``latency`` of successful answers (statuses below 400). Lists hold the last 60 whole
    seconds, the oldest first.
    """

    answered: dict[int, int]
    latency: Percentiles
    answered_per_second: list[int]
    p50_per_second: list[float | None]
    p99_per_second: list[float | None]


class RecentRequests:
    """HTTP requests of the last minute. Used on the event loop only."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._ring = _Ring((len(GROUPS), _WIDTH), "I", clock)
        self._offsets: dict[Lane | None, int] = {lane: index * _WIDTH for index, lane in enumerate(LANES)}
        self._offsets[None] = len(LANES) * _WIDTH

    def add(self, lane: Lane | None, status: int, seconds: float) -> None:
        """Count an answered request. ``lane`` None: it had none."""
        flat, place = self._ring.flat, self._ring.place() + self._offsets[lane]
        flat[place + status - _FIRST_STATUS] += 1
        if status < 400:
            flat[place + _STATUSES + _bucket(seconds)] += 1

    def window(self) -> MinuteWindow:
        """The last minute, for ``request_counts``."""
        return self._ring.window()


def request_counts(window: MinuteWindow) -> dict[str, RequestCounts]:
    """The counts by group."""
    return {group: _counts(window.rows[:, index]) for index, group in enumerate(GROUPS)}


def _bucket(seconds: float) -> int:
    if seconds <= _LEAST_S:
        return 0
    return min(_BUCKETS - 1, int(_PER_DOUBLING * log2(seconds / _LEAST_S)))


def _counts(rows: npt.NDArray[Any]) -> RequestCounts:
    statuses, buckets = rows[:, :_STATUSES], rows[:, _STATUSES:]
    by_status = statuses.sum(axis=0)
    whole = buckets[:-1]
    return RequestCounts(
        {_FIRST_STATUS + index: int(by_status[index]) for index in np.flatnonzero(by_status).tolist()},
        Percentiles(*(_percentiles(buckets.sum(axis=0)[None], share)[0] for share in (0.5, 0.9, 0.99))),
        statuses[:-1].sum(axis=1).tolist(),
        _percentiles(whole, 0.5),
        _percentiles(whole, 0.99),
    )


def _percentiles(counts: npt.NDArray[Any], share: float) -> list[float | None]:
    """For each row of ``counts`` [rows, buckets], the time that the given ``share`` of its samples do not exceed."""
    sums = counts.cumsum(axis=1)
    totals = sums[:, -1]
    buckets = (sums >= np.ceil(share * totals)[:, None]).argmax(axis=1)
    return [float(_MIDDLES[bucket]) if total else None for bucket, total in zip(buckets, totals, strict=True)]


class StepSums(NamedTuple):
    """Engine steps of one model in the last minute, of which ``covered_s`` seconds are known.

    ``slots``: sequences of a step times its longest sequence, summed. ``tokens_per_second`` holds the last 60 whole
    seconds, the oldest first; a step counts in the second in which it ended.
    """

    covered_s: float
    steps: int
    sequences: int
    tokens: int
    slots: int
    engine_s: float
    tokens_per_second: list[int]


class RecentSteps:
    """Engine steps of one model in the last minute. Thread-safe."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._ring = _Ring((5,), "d", clock)
        self._lock = threading.Lock()

    def add(self, num_sequences: int, num_tokens: int, num_slots: int, engine_s: float) -> None:
        """Count a step that ran for ``engine_s`` seconds."""
        with self._lock:
            flat, place = self._ring.flat, self._ring.place()
            flat[place] += 1
            flat[place + 1] += num_sequences
            flat[place + 2] += num_tokens
            flat[place + 3] += num_slots
            flat[place + 4] += engine_s

    def window(self) -> MinuteWindow:
        """The last minute, for ``step_sums``."""
        with self._lock:
            return self._ring.window()


def step_sums(window: MinuteWindow) -> StepSums:
    """The sums of a window."""
    steps, sequences, tokens, slots, engine_s = window.rows.sum(axis=0).tolist()
    by_second = window.rows[:-1, 2].astype(int).tolist()
    return StepSums(window.covered_s, int(steps), int(sequences), int(tokens), int(slots), engine_s, by_second)
