"""Records results of requests in mergeable form: histograms of latencies, counts by kind of failure.

Latencies are kept in HdrHistograms of three digits from a microsecond to an hour, one for each interval and load:
memory does not grow with the number of requests, and histograms of several processes can be added exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from hdrh.histogram import HdrHistogram

from bei.cli.bench.driver import BROKEN, NOT_HTTP, TIMED_OUT, TOO_LONG, UNANSWERED, UNREACHABLE, LoadRequest
from bei.cli.bench.http1 import HttpResponse

# 2 ** 32 microseconds are over an hour; longer latencies are clamped.
_MOST_US = (1 << 32) - 1
_CURVE_POINTS = 60
_DIGITS = 3

_ERRORS_KEPT = 5
_ERROR_CHARS = 300

# Failures without a status. Unanswered: the run was ended before.
KINDS = {
    BROKEN: "connection broke",
    UNANSWERED: "unanswered",
    TIMED_OUT: "timeout",
    UNREACHABLE: "cannot connect",
    NOT_HTTP: "not HTTP",
    TOO_LONG: "answer too long",
}
WRONG_BODY = "wrong body"


class PackedHistogram(msgspec.Struct, frozen=True):
    """A serializable histogram: HdrHistogram's compressed form V2 in base64, in microseconds, and exact count, sum
    and extremes."""

    encoded: str = ""
    count: int = 0
    sum_us: int = 0
    min_us: int = 0
    max_us: int = 0


class LatencyHistogram:
    """A histogram of latencies. Exact except percentiles, which are up to 0.1 % too high."""

    def __init__(self) -> None:
        self.count = 0
        self._sum_us = 0
        self._min_us = _MOST_US
        self._max_us = 0
        self._buckets: HdrHistogram | None = None  # 180 kB: created on first use

    def record(self, seconds: float) -> None:
        value = min(_MOST_US, max(1, round(seconds * 1e6)))
        if self._buckets is None:
            self._buckets = HdrHistogram(1, _MOST_US, _DIGITS)
        self._buckets.record_value(value)
        self.count += 1
        self._sum_us += value
        if value < self._min_us:
            self._min_us = value
        if value > self._max_us:
            self._max_us = value

    def add(self, packed: PackedHistogram) -> None:
        if not packed.count:
            return
        other = HdrHistogram.decode(packed.encoded)
        if self._buckets is None:
            self._buckets = other
        else:
            self._buckets.add(other)
        self.count += packed.count
        self._sum_us += packed.sum_us
        self._min_us = min(self._min_us, packed.min_us)
        self._max_us = max(self._max_us, packed.max_us)

    def packed(self) -> PackedHistogram:
        if self._buckets is None:
            return PackedHistogram()
        encoded = self._buckets.encode().decode()
        return PackedHistogram(encoded, self.count, self._sum_us, self._min_us, self._max_us)

    @property
    def mean_ms(self) -> float | None:
        """Mean; None without latencies."""
        return self._sum_us / self.count / 1e3 if self.count else None

    @property
    def min_ms(self) -> float | None:
        """Minimum; None without latencies."""
        return self._min_us / 1e3 if self.count else None

    @property
    def max_ms(self) -> float | None:
        """Maximum; None without latencies."""
        return self._max_us / 1e3 if self.count else None

    def percentiles_ms(self, percentiles: Sequence[float]) -> list[float | None]:
        """The percentiles; None for those that too few latencies cannot support (P99 needs a hundred)."""
        if self._buckets is None:
            return [None] * len(percentiles)
        found: dict[float, int] = self._buckets.get_percentile_to_value_dict(list(percentiles))
        return [
            None if 50 < each < 100 and self.count * (100 - each) < 100 - 1e-6 else min(found[each], self._max_us) / 1e3
            for each in percentiles
        ]


class Interval(msgspec.Struct):
    """Results of one load in an interval of the window, of one process or all.

    ``answers``, ``inputs``: of successful answers that arrived in it, whatever their due times; they give the
    throughput. All other fields are of requests that were due in the window: ``latency`` from due time to answer,
    ``lateness`` from due time until the generator processed it, ``failures`` by kind, ``retries``: tries that were
    refused and repeated.
    """

    index: int
    answers: int = 0
    inputs: int = 0
    bytes_received: int = 0
    retries: int = 0
    failures: dict[str, int] = {}
    latency: PackedHistogram = PackedHistogram()
    lateness: PackedHistogram = PackedHistogram()


class IntervalTotals:
    """The counts of an interval, or of several; of one process, or of several."""

    def __init__(self) -> None:
        self.answers = self.inputs = self.bytes_received = self.retries = 0
        self.failures: Counter[str] = Counter()
        self.latency, self.lateness = LatencyHistogram(), LatencyHistogram()

    def add(self, interval: Interval) -> None:
        for name in ("answers", "inputs", "bytes_received", "retries"):
            setattr(self, name, getattr(self, name) + getattr(interval, name))
        self.failures.update(interval.failures)
        self.latency.add(interval.latency)
        self.lateness.add(interval.lateness)

    def packed(self, index: int) -> Interval:
        """The serializable form of interval number ``index``."""
        counts = (self.answers, self.inputs, self.bytes_received, self.retries)
        return Interval(index, *counts, dict(self.failures), self.latency.packed(), self.lateness.packed())


class LoadRecorder:
    """Records one load in one process. The window lasts from ``begin_s`` (after the warm-up) to ``end_s``; requests
    that are due in it are recorded however late their answers come.

    ``check(body, num_inputs)``: the problem of a body with status 200, or None. Only open loops have lateness.
    """

    def __init__(
        self,
        begin_s: float,
        end_s: float,
        interval_s: float,
        check: Callable[[bytes, int], str | None],
        *,
        is_open_loop: bool,
    ) -> None:
        self._begin_s = begin_s
        self._end_s = end_s
        self._interval_s = interval_s
        self._check = check
        self._is_open_loop = is_open_loop
        self._closed: list[Interval] = []
        self._index, self._current = 0, IntervalTotals()
        self.errors: list[str] = []

    def ended(
        self, request: LoadRequest, done_s: float, outcome: int, answer: HttpResponse | None, again_s: float | None
    ) -> None:
        """Record the end of a try (``bei.cli.bench.driver.RequestSink``)."""
        since_s = done_s - self._begin_s
        is_recorded = self._begin_s <= request.due_s < self._end_s
        if since_s < 0:
            return  # warm-up
        self._move_to(int(since_s / self._interval_s))
        if again_s is not None:
            self._current.retries += is_recorded
            return
        problem = self._problem(request, outcome, answer)
        if problem is None:
            assert answer is not None
            self._current.answers += 1
            self._current.inputs += request.num_inputs
            self._current.bytes_received += answer.num_body_bytes
        if is_recorded:
            if problem is None:
                self._current.latency.record(done_s - request.due_s)
            else:
                self._current.failures[problem] += 1
            if self._is_open_loop:
                self._current.lateness.record(request.taken_s - request.due_s)

    def _problem(self, request: LoadRequest, outcome: int, answer: HttpResponse | None) -> str | None:
        """The kind of failure; None: success."""
        if answer is None:
            return KINDS[outcome]
        if outcome == 200:
            wrong = self._check(answer.body, request.num_inputs)
            if wrong is None:
                return None
            self._keep(f"{WRONG_BODY}: {wrong}")
            return WRONG_BODY
        self._keep(f"{outcome} {answer.body.decode(errors='replace')}")
        return str(outcome)

    def _keep(self, error: str) -> None:
        if len(self.errors) < _ERRORS_KEPT and error[:_ERROR_CHARS] not in self.errors:
            self.errors.append(error[:_ERROR_CHARS])

    def _move_to(self, index: int) -> None:
        if index > self._index:
            self._close()
            self._index = index

    def _close(self) -> None:
        totals = self._current
        if totals.answers or totals.retries or totals.failures:
            self._closed.append(totals.packed(self._index))
        self._current = IntervalTotals()

    def take(self, now_s: float, *, is_last: bool = False) -> list[Interval]:
        """Remove and return the intervals that are over at ``now_s``; all if ``is_last``."""
        since_s = now_s - self._begin_s
        if since_s >= 0:
            self._move_to(int(since_s / self._interval_s))
        if is_last:
            self._close()
        taken, self._closed = self._closed, []
        return taken


def curve(packed: PackedHistogram) -> list[tuple[float, float]]:
    """Points (percentile, ms) of the percentile curve, approaching 100 as far as the number of latencies permits."""
    histogram = LatencyHistogram()
    histogram.add(packed)
    if not histogram.count:
        return []
    most = math.log10(max(2.0, float(histogram.count)))
    percentiles = [100 - 100 / 10 ** (most * step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
    values = histogram.percentiles_ms(percentiles)
    return [(each, value) for each, value in zip(percentiles, values, strict=True) if value is not None]
