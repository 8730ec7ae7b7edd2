"""What a reader of a result must know before believing it."""

from __future__ import annotations

from collections.abc import Iterator

from bei.cli.bench.arrivals import LoadPlan
from bei.cli.bench.result import BenchResult, LoadResult, PointResult

# Of a core: a worker that is busier sends late, whatever the server does.
MOST_CPU_SHARE = 0.8
# What the generator's own lateness may be of what it measures, and what is never worth a word.
_MOST_LATENESS_SHARE, _LEAST_LATENESS_MS = 0.1, 1.0
_LEAST_ANSWERED_SHARE = 0.95


def warnings_of(result: BenchResult) -> list[str]:
    """One sentence each, the gravest first."""
    found: list[str] = []
    if result.interrupted:
        found.append(
            "The run was ended early: the last point is of the time until then, and points behind it are missing."
        )
    if result.setup.texts.repeated is not None:
        found.append("Texts were repeated: a server that keeps answers, or shares equal inputs, is flattered.")
    for point in result.points:
        for load in point.loads:
            found += (f"{named(result, point, load)}: {text}" for text in _of_load(result, point, load))
        found += (f"{named(result, point)}: {text}" for text in _of_generator(point))
    return found


def named(result: BenchResult, point: PointResult, load: LoadResult | None = None) -> str:
    """A point in words, as short as it may be in this result."""
    parts = [point.server] if len(result.servers) > 1 else []
    parts += [f"{point.rate:g} requests/s"] if point.rate is not None else []
    parts += [load.name] if load is not None and len(point.loads) > 1 else []
    return ", ".join(parts) or "The run"


def plan_of_load(result: BenchResult, point: PointResult, load: LoadResult) -> tuple[LoadPlan, float | None]:
    """What was asked of a load, and its rate at this point; None: a closed loop."""
    plan = next(one for one in result.setup.loads if one.name == load.name)
    return plan, point.rate if plan.is_swept else plan.rate


def _of_load(result: BenchResult, point: PointResult, load: LoadResult) -> Iterator[str]:
    failed = {kind: count for kind, count in load.failures.items() if kind != "unanswered"}
    if failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in failed.items())
        yield f"{sum(failed.values())} of {load.num_due} requests failed ({kinds}), and percentiles are of the others."
    _, rate = plan_of_load(result, point, load)
    if rate is None or not load.latency.count:
        return
    asked_per_s = (load.num_due - load.num_failed) / point.measured_s
    if load.requests_per_s < _LEAST_ANSWERED_SHARE * asked_per_s and not result.interrupted:
        yield (
            f"{load.requests_per_s:.4g} of {asked_per_s:.4g} requests/s were answered within the window: the server "
            "cannot keep up, and latencies grow with the run (or the warm-up is shorter than an answer takes)."
        )
    late, median = load.lateness_p99, load.latency.p50
    if late is not None and median is not None and late > max(_LEAST_LATENESS_MS, _MOST_LATENESS_SHARE * median):
        yield (
            f"requests were sent late (P99 {late:g} ms after they were due, at a median latency of {median:g} ms): the "
            "generator, or a machine that is busy, is part of what was measured."
        )


def _of_generator(point: PointResult) -> Iterator[str]:
    busiest = max(point.cpu_shares, default=0.0)
    if busiest > MOST_CPU_SHARE:
        yield (
            f"the generator used {busiest:.0%} of a core and may have been the bottleneck: raise --workers, or give it "
            "a machine of its own."
        )
