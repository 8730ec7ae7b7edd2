"""Prometheus counters and histograms with cheap updates, for what every request and every step counts.

prometheus_client's counter makes four calls for an increment, and reports a creation time for each label set. Its
histogram takes a lock and searches its buckets for each value, and a step has the waits and lengths of hundreds of
sequences: these take one lock for all. The same registry collects them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Count:
    """The count of one label set. Thread-safe."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``, which is not negative."""
        with self._lock:
            self.value += amount


class Counter:
    """A family of counts by ``labels``."""

    def __init__(self, name: str, text: str, labels: Seq[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._label_names = labels
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The count with these labels, created on first use."""
        return self._counts.setdefault(values, Count())

    def describe(self) -> list[CounterMetricFamily]:
        """The family without counts, for the registry."""
        return [CounterMetricFamily(self._name, self._text, labels=self._label_names)]

    def collect(self) -> Iterator[CounterMetricFamily]:
        (family,) = self.describe()
        for values, count in list(self._counts.items()):
            family.add_metric(values, count.value)
        yield family


class Series:
    """The values of one label set. Thread-safe."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Seq[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, count: int = 1) -> None:
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += count
            self._sum += value * count

    def observe_all(self, values: Seq[float]) -> None:
        places = [bisect_left(self._bounds, value) for value in values]
        with self._lock:
            for place in places:
                self._counts[place] += 1
            self._sum += sum(values)

    def state(self) -> tuple[list[int], float]:
        """The cumulative bucket counts, and the sum of all values."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


class Histogram:
    """A family of series by ``labels``. ``buckets``: ascending upper bounds; an unbounded one is added."""

    def __init__(
        self, name: str, text: str, labels: Seq[str], buckets: Iterable[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._label_names = labels
        self._bounds = tuple(buckets)
        self._bucket_names = [*map(floatToGoString, self._bounds), "+Inf"]
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series with these labels, created on first use."""
        return self._series.setdefault(values, Series(self._bounds))

    def describe(self) -> list[HistogramMetricFamily]:
        """The family without series, for the registry."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._label_names)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        (family,) = self.describe()
        for values, series in list(self._series.items()):
            counts, total = series.state()
            family.add_metric(values, list(zip(self._bucket_names, counts, strict=True)), total)
        yield family
