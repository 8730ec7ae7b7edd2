"""Repetitions of measurements in turn, beside which others use little of the machine, and ratios of two sides."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import psutil

from bei.utils.cpu_count import usable_cores

T = TypeVar("T")

MOST_FOREIGN = 0.03  # of the machine, in any measurement of a repetition that counts as undisturbed


def alternate(
    sides: Mapping[str, Callable[[], float]], repetitions: int, prepare: Callable[[], object] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Measure all sides in turn, ``repetitions`` times after one warm-up; each call returns its figure.

    Every second repetition goes through the sides backwards. ``prepare`` is called before every repetition and before
    the warm-up, and is not measured.
    """
    prepare()
    for measure in sides.values():
        measure()
    order = list(sides)

    def repetition(number: int) -> tuple[dict[str, tuple[float, float]], float]:
        prepare()
        found = {name: with_foreign_load(sides[name]) for name in (order if number % 2 == 0 else order[::-1])}
        return found, max(load for _, load in found.values())

    kept, num_left_out = least_disturbed(repetitions, repetition)
    return {
        name: {
            **spread([found[name][0] for found in kept]),
            "foreign_load": [found[name][1] for found in kept],
            "repetitions left out": num_left_out,
        }
        for name in sides
    }


def turns(sides: Seq[T], repetitions: int) -> Iterator[tuple[int, Seq[T]]]:
    """The number of each repetition, and its sides: every second time backwards."""
    for number in range(repetitions):
        yield number, sides if number % 2 == 0 else sides[::-1]


def spread(values: Seq[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


def least_disturbed(count: int, measure: Callable[[int], tuple[T, float]], say: str = "") -> tuple[list[T], int]:
    """The ``count`` repetitions during which others used least of the machine, and how many were left out.

    Repetitions are made until others used at most ``MOST_FOREIGN`` in ``count`` of them, and at most twice as many.
    ``measure`` gets the number of those so far, and returns its result and the largest foreign load of its
    measurements. ``say``: the name under which progress is shown.
    """
    found: list[tuple[T, float]] = []
    num_quiet = 0
    while num_quiet < count and len(found) < 2 * count:
        found.append(measure(num_quiet))
        load = found[-1][1]
        num_quiet += load <= MOST_FOREIGN
        if say or load > MOST_FOREIGN:
            print(f"{say} {num_quiet} of {count}: others used {load:.1%} of the machine".lstrip(), flush=True)
    kept = sorted(sorted(range(len(found)), key=lambda index: found[index][1])[:count])
    return [found[index][0] for index in kept], len(found) - len(kept)


def by_total_times(over: Seq[float], under: Seq[float]) -> float:
    """The ratio of two rates by the time that all repetitions took together, of as much work each."""
    return sum(1 / rate for rate in under) / sum(1 / rate for rate in over)


def ratio(results: Mapping[str, Mapping[str, Any]], numerator: str, denominator: str) -> dict[str, float]:
    """Three ratios of two sides of ``alternate`` whose figures are rates.

    A shared machine changes its clock every minute or so, by a tenth: medians of two sides may then be of two clocks,
    while the two measurements of one repetition are seconds apart, and over all repetitions it evens out.
    """
    over, under = results[numerator], results[denominator]
    within = statistics.median(a / b for a, b in zip(over["values"], under["values"], strict=True))
    return {
        "of medians": round(over["median"] / under["median"], 3),
        "median within repetitions": round(within, 3),
        "of total times": round(by_total_times(over["values"], under["values"]), 3),
    }


def geometric_mean(ratios: Seq[float]) -> tuple[float, float | None]:
    """And its standard error, as a share of it; None of a single ratio."""
    logs = [math.log(ratio) for ratio in ratios]
    error = round(statistics.stdev(logs) / len(logs) ** 0.5, 4) if len(logs) > 1 else None
    return round(math.exp(statistics.fmean(logs)), 4), error


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def with_foreign_load(measure: Callable[[], T]) -> tuple[T, float]:
    """The result of ``measure``, and the share of all cores that others used: not this process and its children.

    Other virtual machines count, as far as the system knows of them (steal time).
    """
    own, total, started = _own_cpu_s(), _busy_cpu_s(), time.perf_counter()
    value = measure()
    elapsed = (time.perf_counter() - started) * usable_cores()
    foreign = max(0.0, (_busy_cpu_s() - total) - (_own_cpu_s() - own))
    return value, round(foreign / elapsed, 3)


def _own_cpu_s() -> float:
    process = psutil.Process()
    times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
    finished = times[0].children_user + times[0].children_system
    return float(sum(t.user + t.system for t in times) + finished)


def _busy_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "steal", 0.0))
