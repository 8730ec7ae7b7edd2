"""Prometheus counters with cheap increments, for values that every request and every step counts.

prometheus_client's counter makes four calls for an increment, and reports a creation time for each label set. The same
registry collects these.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily


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
        """The family with all counts."""
        (family,) = self.describe()
        for values, count in list(self._counts.items()):
            family.add_metric(values, count.value)
        yield family
