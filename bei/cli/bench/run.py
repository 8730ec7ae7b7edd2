"""Runs a measurement: each server at each rate in turn, then the result."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bei.cli.bench.metrics_scraper import MetricsScraper
from bei.cli.bench.options import BenchPlan, plan_from
from bei.cli.bench.recorder import IntervalTotals, LatencyHistogram
from bei.cli.bench.report import report_page
from bei.cli.bench.result import (
    PERCENTILES,
    SCHEMA,
    BenchResult,
    IntervalResult,
    LatencyFigures,
    LoadResult,
    PointResult,
    ServerFacts,
    machine_facts,
    warnings_of,
    write_result,
)
from bei.cli.bench.server_probe import ServerProbe
from bei.cli.bench.target import shown_command
from bei.cli.bench.terminal import ProgressDisplay, summary
from bei.cli.bench.worker import WorkerTask
from bei.cli.bench.workers import LoadRecord, LoadWorkers, PointRecord
from bei.utils.full_disk import write_whole
from bei.version import __version__


def bench(options: dict[str, Any], arguments: Sequence[str]) -> int:
    """``bei bench``: measure, show, write. Returns the exit code: 0; 1 if requests failed and --fail-on-errors was
    given; 130 if the run was ended early. Raises ConfigError, BenchError."""
    plan = plan_from(options)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    probes = [ServerProbe(plan, target, model) for target, model in zip(plan.targets, plan.models, strict=True)]
    servers = [probe.examine() for probe in probes]
    points, is_interrupted = _measure(plan, servers, [probe.path for probe in probes])
    result = BenchResult(
        schema=SCHEMA,
        bei=__version__,
        started=started,
        command=["bei", *shown_command(arguments)],
        interrupted=is_interrupted,
        warnings=[],
        setup=plan.setup,
        machine=machine_facts(),
        servers=servers,
        points=points,
    )
    result = msgspec.structs.replace(result, warnings=warnings_of(result))
    print(summary(result))  # noqa: T201
    for path in _written(result, plan.out):
        print(f"written: {path}")  # noqa: T201
    if is_interrupted:
        return 130
    return 1 if plan.fails_on_errors and result.num_failed else 0


def _written(result: BenchResult, out: Path | None) -> list[Path]:
    if out is None:
        return []
    as_json, as_html = Path(f"{out}.json"), Path(f"{out}.html")
    write_result(result, as_json)
    write_whole(as_html, report_page(result).encode())
    return [as_json, as_html]


def _measure(plan: BenchPlan, servers: Sequence[ServerFacts], paths: Sequence[str]) -> tuple[list[PointResult], bool]:
    """All points; servers alternate at each rate, so that changes of the machine affect them alike."""
    rates: list[float | None] = [*plan.setup.rates] if plan.setup.rates else [None]
    num_points = len(rates) * len(servers)
    points: list[PointResult] = []
    with LoadWorkers(plan.setup.workers) as workers, ProgressDisplay(plan.setup, num_points) as display:
        for rate in rates:
            for number, facts in enumerate(servers):
                tasks = tasks_of(plan, number, facts, paths[number], rate)
                display.begin(facts.name, rate, len(points) + 1)
                scraper = _scraper(plan, number, facts)
                cpu_s = time.process_time()
                if scraper is not None:
                    scraper.begin()
                try:
                    record = workers.measure(tasks, display.show)
                except KeyboardInterrupt:  # between points, or a second Ctrl-C
                    if not points:
                        raise
                    return points, True
                samples = scraper.end(record.started_s + plan.setup.warmup_s) if scraper is not None else None
                cpu_s = time.process_time() - cpu_s
                point = point_of(plan, facts, rate, record)
                share = round(cpu_s / max(record.elapsed_s, 1e-3), 3)
                points.append(msgspec.structs.replace(point, coordinator_share=share, samples=samples))
                display.end(points[-1])
                if record.is_interrupted:
                    return points, True
    return points, False


def tasks_of(plan: BenchPlan, number: int, facts: ServerFacts, path: str, rate: float | None) -> list[WorkerTask]:
    """The task of each worker for a point."""
    setup = plan.setup
    loads = [msgspec.structs.replace(load, rate=rate) if load.is_swept else load for load in setup.loads]
    return [
        WorkerTask(worker, setup, plan.targets[number], plan.tls, plan.headers, path, facts.model, loads, plan.seed)
        for worker in range(setup.workers)
    ]


def _scraper(plan: BenchPlan, number: int, facts: ServerFacts) -> MetricsScraper | None:
    target = plan.targets[number]
    if not plan.scrapes or facts.info is None:
        return None
    return MetricsScraper(target, plan.tls.context_for(target), plan.headers, max(1.0, plan.setup.interval_s))


def point_of(plan: BenchPlan, facts: ServerFacts, rate: float | None, record: PointRecord) -> PointResult:
    """The figures of a point from the workers' reports."""
    setup = plan.setup
    measured_s = setup.duration_s
    if record.is_interrupted:
        measured_s = min(measured_s, max(record.elapsed_s - setup.warmup_s, 0.0))
    shares = [
        round(record.cpu_s[worker] / record.window_s[worker], 3)
        for worker in sorted(record.window_s)
        if record.window_s[worker] > 0
    ]
    loads = [load_result(load.name, record.loads[load.name], measured_s, setup.interval_s) for load in setup.loads]
    return PointResult(
        server=facts.name,
        rate=rate,
        measured_s=round(measured_s, 3),
        loads=loads,
        cpu_shares=shares,
        coordinator_share=0.0,
        samples=None,
    )


def load_result(name: str, record: LoadRecord, measured_s: float, interval_s: float) -> LoadResult:
    """The figures of one load over a window of ``measured_s``."""
    total = record.total
    # Later intervals hold the last answers, which are outside of the window.
    within = [merged for index, merged in record.intervals.items() if index * interval_s < measured_s - 1e-9]
    seconds = max(measured_s, 1e-9)
    # Empty intervals are included: a stalled server must be visible.
    num_shown = max(math.ceil(measured_s / interval_s - 1e-9), *(index + 1 for index in record.intervals), 0)
    lateness = total.lateness.percentiles_ms([50, 99])
    return LoadResult(
        name=name,
        num_due=total.latency.count + sum(total.failures.values()),
        requests_per_s=round(sum(one.answers for one in within) / seconds, 3),
        inputs_per_s=round(sum(one.inputs for one in within) / seconds, 3),
        megabytes_per_s=round(sum(one.bytes_received for one in within) / seconds / 1e6, 3),
        failures=dict(sorted(total.failures.items())),
        retries=total.retries,
        reconnects=record.num_reconnects,
        latency=_latency(total.latency),
        lateness_p50=_rounded(lateness[0]),
        lateness_p99=_rounded(lateness[1]),
        lateness_max=_rounded(total.lateness.max_ms),
        errors=record.errors,
        intervals=[
            _interval(index * interval_s, record.intervals.get(index, IntervalTotals())) for index in range(num_shown)
        ],
        histogram=total.latency.packed(),
    )


def _latency(histogram: LatencyHistogram) -> LatencyFigures:
    values = histogram.percentiles_ms(list(PERCENTILES.values()))
    figures = dict(zip(PERCENTILES, map(_rounded, values), strict=True))
    return LatencyFigures(
        count=histogram.count,
        mean=_rounded(histogram.mean_ms),
        min=_rounded(histogram.min_ms),
        max=_rounded(histogram.max_ms),
        **figures,
    )


def _interval(at_s: float, merged: IntervalTotals) -> IntervalResult:
    p50, p90, p99 = map(_rounded, merged.latency.percentiles_ms([50, 90, 99]))
    return IntervalResult(
        at_s=round(at_s, 3),
        answers=merged.answers,
        inputs=merged.inputs,
        failures=sum(merged.failures.values()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=_rounded(merged.latency.max_ms),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
