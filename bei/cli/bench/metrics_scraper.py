"""Scrapes a bei server's ``/metrics`` during a measurement: steps, their sizes, lanes."""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise

from bei.cli.bench.bounded_http import MOST_METRICS_BYTES, AnswerTooLongError
from bei.cli.bench.result import ServerSample
from bei.cli.bench.target import BenchTarget

TIMEOUT_S = 5.0  # also for other GET requests beside the load
_LANES = ("interactive", "bulk")
_LINE = re.compile(r"^(bei_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_READ = re.compile(
    r"bei_(?:batch_tokens|batch_sequences|engine_seconds|queue_seconds)_(?:sum|count)|bei_attention_slots_total"
    r"|bei_queue_sequences|bei_tokens_total"
)

# Values by metric and lane (empty: none), summed over models.
MetricValues = Mapping[tuple[str, str], float]


def values_of(text: str) -> MetricValues:
    """The relevant values of the exposition ``text``."""
    values: dict[tuple[str, str], float] = defaultdict(float)
    for name, labels, value in _LINE.findall(text):
        if _READ.fullmatch(name):
            lane = re.search(r'lane="(\w+)"', labels)
            with suppress(ValueError):  # the server's mistake
                values[name, lane[1] if lane else ""] += float(value)
    return values


class MetricsScraper:
    """Scrapes ``/metrics`` every ``interval_s`` in a thread, from ``begin`` to ``end``."""

    def __init__(
        self, target: BenchTarget, tls: ssl.SSLContext | None, headers: Mapping[str, str], interval_s: float
    ) -> None:
        self._target = target
        self._tls = tls
        self._headers = headers
        self._interval_s = interval_s
        self._scrapes: list[tuple[float, MetricValues]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="bei-bench-scraper")

    def begin(self) -> None:
        self._thread.start()

    def end(self, window_from_s: float) -> list[ServerSample]:
        """Stop, and return the samples; their times count from ``window_from_s`` on CLOCK_MONOTONIC."""
        self._over.set()
        self._thread.join()
        return samples_of([(at_s - window_from_s, values) for at_s, values in self._scrapes])

    def _run(self) -> None:
        path = self._target.path("/metrics")
        next_s = time.monotonic()
        while not self._over.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + self._interval_s, time.monotonic())
            try:
                status, body, _ = self._target.request(
                    "GET", path, self._headers, self._tls, TIMEOUT_S, MOST_METRICS_BYTES
                )
            except (OSError, http.client.HTTPException, AnswerTooLongError):
                continue  # a gap: the server is busy
            if status == 200:
                self._scrapes.append((time.monotonic(), values_of(body.decode(errors="replace"))))


def samples_of(scrapes: list[tuple[float, MetricValues]]) -> list[ServerSample]:
    """Differences between consecutive scrapes; those that end before time 0 are left out."""
    return [
        _sample(at_s, until_s - at_s, before, after)
        for (at_s, before), (until_s, after) in pairwise(scrapes)
        if until_s > 0 and until_s > at_s
    ]


def _sample(at_s: float, lasts_s: float, before: MetricValues, after: MetricValues) -> ServerSample:
    def grown(name: str, lane: str = "") -> float:
        return after.get((name, lane), 0.0) - before.get((name, lane), 0.0)

    def mean(name: str, lane: str = "", digits: int = 1, unit: float = 1.0) -> float | None:
        count = grown(f"{name}_count", lane)
        return round(grown(f"{name}_sum", lane) / count * unit, digits) if count > 0 else None

    tokens = grown("bei_tokens_total")
    return ServerSample(
        at_s=round(at_s, 3),
        steps_per_s=round(grown("bei_batch_tokens_count") / lasts_s, 2),
        tokens_per_step=mean("bei_batch_tokens"),
        sequences_per_step=mean("bei_batch_sequences", digits=2),
        tokens_per_s=round(tokens / lasts_s, 1),
        engine_share=round(grown("bei_engine_seconds_sum") / lasts_s, 3),
        slots_per_token=round(grown("bei_attention_slots_total") / tokens, 3) if tokens > 0 else None,
        waiting={lane: after.get(("bei_queue_sequences", lane), 0.0) for lane in _LANES},
        queue_ms={lane: mean("bei_queue_seconds", lane, 3, 1e3) for lane in _LANES},
    )
