"""Results for tests, in which all figures differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from bei.cli.bench.arrivals import LoadPlan
from bei.cli.bench.recorder import Interval, IntervalTotals, LatencyHistogram
from bei.cli.bench.result import (
    SCHEMA,
    BenchResult,
    BenchSetup,
    GeneratorMachine,
    IntervalResult,
    LatencyFigures,
    LoadResult,
    PointResult,
    ServerFacts,
    ServerSample,
)
from bei.cli.bench.texts import TextsPlan

LOADS = [LoadPlan("interactive", words="uniform:5:11"), LoadPlan("bulk", concurrency=4, inputs="32", lane="bulk")]


def setup_of(**changes: Any) -> BenchSetup:
    """Of a sweep of one load beside another."""
    setup = BenchSetup(
        dialect="openai",
        loads=LOADS,
        texts=TextsPlan(seed=17),
        rates=[21.5, 43.0],
        warmup_s=2.5,
        duration_s=4.0,
        interval_s=1.0,
        timeout_s=31.0,
        workers=2,
        obeys_retry_after=False,
        header_names=["x-team"],
    )
    return msgspec.structs.replace(setup, **changes)


def result_of(setup: BenchSetup | None = None, servers: tuple[str, ...] = ("server 1",), **changes: Any) -> BenchResult:
    """A result of ``setup``, with a point for each rate and server."""
    setup = setup or setup_of()
    numbers = itertools.count(1)
    rates: list[float | None] = [*setup.rates] if setup.rates else [None]
    points = [_point(setup, server, rate, numbers) for rate in rates for server in servers]
    result = BenchResult(
        schema=SCHEMA,
        bei="0.1.0",
        started="2026-01-01T00:00:00+00:00",
        command=["bei", "bench", "http://127.0.0.1:8000"],
        interrupted=False,
        warnings=[],
        setup=setup,
        machine=GeneratorMachine("Linux 6 x86_64", "A <CPU>", 2, "3.12.1", {"bei": "0.1.0"}),
        servers=[
            ServerFacts(
                name, "http://127.0.0.1:8000", "m", "bei 0.1.0", True, {"model_id": "m", "max_batch_tokens": 16384}
            )
            for name in servers
        ],
        points=points,
    )
    return msgspec.structs.replace(result, **changes)


def _point(setup: BenchSetup, server: str, rate: float | None, numbers: itertools.count[int]) -> PointResult:
    samples = [
        ServerSample(
            at_s=float(second),
            steps_per_s=round(next(numbers) * 1.37, 2),
            tokens_per_step=round(next(numbers) * 1.37, 2),
            sequences_per_step=round(next(numbers) * 1.37, 2),
            tokens_per_s=round(next(numbers) * 1.37, 2),
            engine_share=round(next(numbers) * 1.37, 2),
            slots_per_token=None if second == 0 else 1.25,
            waiting={"interactive": float(next(numbers)), "bulk": float(next(numbers))},
            queue_ms={"interactive": round(next(numbers) * 0.7, 3), "bulk": None},
        )
        for second in range(4)
    ]
    return PointResult(
        server=server,
        rate=rate,
        measured_s=setup.duration_s,
        loads=[_load(load.name, numbers) for load in setup.loads],
        cpu_shares=[round(0.1 + next(numbers) / 1e4, 4), 0.2],
        coordinator_share=round(0.01 + next(numbers) / 1e4, 4),
        samples=samples,
    )


def _load(name: str, numbers: itertools.count[int]) -> LoadResult:
    def figure(scale: float = 1.17) -> float:
        return round(next(numbers) * scale, 3)

    histogram = LatencyHistogram()
    for _ in range(40):
        histogram.record(next(numbers) / 1e3)
    return LoadResult(
        name=name,
        num_due=1000 + next(numbers),
        requests_per_s=figure(),
        inputs_per_s=figure(3.1),
        megabytes_per_s=figure(0.01),
        failures={},
        retries=next(numbers),
        reconnects=next(numbers),
        latency=LatencyFigures(40, figure(), figure(), figure(), figure(), figure(), None, None, None, figure()),
        lateness_p50=0.011,
        lateness_p99=figure(0.001),
        lateness_max=figure(0.002),
        errors=[],
        intervals=[
            IntervalResult(float(second), next(numbers), next(numbers), 0, figure(), figure(), None, figure())
            for second in range(4)
        ],
        histogram=histogram.packed(),
    )


def merged(intervals: Iterable[Interval]) -> IntervalTotals:
    total = IntervalTotals()
    for interval in intervals:
        total.add(interval)
    return total
