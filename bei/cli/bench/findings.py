"""A result in sentences: what each server did under each load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bei.cli.bench.result import BenchResult, LoadResult, PointResult


def findings(result: BenchResult) -> list[str]:
    """A sentence for each server and load, in the order of the result."""
    return list(_of_sweep(result) if result.setup.rates else _of_points(result))


def _of_points(result: BenchResult) -> Iterator[str]:
    for point in result.points:
        for load in point.loads:
            yield (
                f"{_who(result, point, load)} answered {load.requests_per_s:,.1f} requests/s"
                f"{_inputs(load)}{_latency(load)}{_failed(load)}."
            )


def _of_sweep(result: BenchResult) -> Iterator[str]:
    """The highest rate that was kept, and what became of the next one."""
    for server in result.servers:
        points = sorted((one for one in result.points if one.server == server.name), key=lambda one: one.rate or 0.0)
        for index, plan in enumerate(result.setup.loads):
            if points:
                yield _of_rates(result, [(point, point.loads[index]) for point in points], is_swept=plan.is_swept)


def _of_rates(result: BenchResult, measured: Sequence[tuple[PointResult, LoadResult]], *, is_swept: bool) -> str:
    last, load = measured[-1]
    who = _who(result, last, load)
    if not is_swept:
        return f"{who}, beside {last.rate:g} requests/s of the other load{_latency(load)}{_failed(load)}."
    kept = [(point, load) for point, load in measured if _is_kept(result, point, load)]
    missed = next(((point, load) for point, load in measured if not _is_kept(result, point, load)), None)
    if missed is None:
        return f"{who} kept up with every rate, up to {last.rate:g} requests/s{_latency(load)}."
    point, load = missed
    below = [(one, found) for one, found in kept if (one.rate or 0.0) < (point.rate or 0.0)]
    beyond = f"at {point.rate:g} it answered {load.requests_per_s:,.1f}{_latency(load)}{_failed(load)}"
    if not below:
        return f"{who} kept up with no rate: {beyond}."
    best, found = below[-1]
    return f"{who} kept up with {best.rate:g} requests/s{_latency(found)}; {beyond}."


def _is_kept(result: BenchResult, point: PointResult, load: LoadResult) -> bool:
    return not load.num_failed and (result.rate_of(point, load) is None or load.keeps_up(point.measured_s))


def _who(result: BenchResult, point: PointResult, load: LoadResult) -> str:
    server = point.server if len(result.servers) > 1 else "The server"
    return f"{server} ({load.name})" if len(point.loads) > 1 else server


def _inputs(load: LoadResult) -> str:
    return f" ({load.inputs_per_s:,.1f} inputs/s)" if load.inputs_per_s > 1.01 * load.requests_per_s else ""


def _latency(load: LoadResult) -> str:
    found = load.latency
    if found.p50 is None:
        return ""
    high = "" if found.p99 is None else f", 99 of 100 within {_ms(found.p99)}"
    return f", half of them within {_ms(found.p50)} ms{high and high + ' ms'}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _failed(load: LoadResult) -> str:
    return f"; {load.num_failed:,} of {load.num_due:,} failed" if load.num_failed else "; none failed"
