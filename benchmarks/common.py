"""What the benchmarks share: the mixed-length workload, repetitions in turn, JSON with the machine."""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from tokenizers import Tokenizer

from bei.core import Encoding, Limits, PackedBatch
from bei.engine.openvino import cpu_capabilities
from bei.port import Lane
from bei.scheduler.next_batch import LaneView, QueueKey, StepCosts, next_batch, step_bounds
from bei.utils.cpu_count import usable_cores
from bei.version import __version__

T = TypeVar("T")

MOST_FOREIGN = 0.03  # of the machine, in any measurement of a repetition that others have not disturbed
RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("openvino", "torch", "transformers", "tokenizers", "numpy", "uvicorn", "starlette")


def mixed_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Token counts of a retrieval corpus: log-normal, mean about 78, cut at ``longest``."""
    lengths = np.random.default_rng(seed).lognormal(mean=4.0, sigma=0.85, size=count)
    return [int(length) for length in np.clip(np.rint(lengths), 4, longest)]


def random_encodings(lengths: list[int], vocab_size: int, seed: int = 0) -> list[Encoding]:
    """Distinct sequences of the given lengths; which tokens they hold does not change the work."""
    rng = np.random.default_rng(seed)
    return [Encoding(rng.integers(0, vocab_size, length).astype(np.int32)) for length in lengths]


def random_texts(tokenizer: Tokenizer, lengths: list[int], seed: int = 0) -> list[str]:
    """Distinct texts of about ``lengths`` tokens: whole words of the vocabulary, two special tokens counted in."""
    rng = np.random.default_rng(seed)
    words = np.array(
        sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    )
    return [" ".join(rng.choice(words, max(1, length - 2))) for length in lengths]


def cut(keys: list[QueueKey], oldest: int, limits: Limits, costs: StepCosts) -> list[QueueKey]:
    """Take out of ``keys`` (sorted) what the server's policy would run first, were all of it bulk work."""
    lanes: dict[Lane, LaneView] = {"interactive": LaneView([], 0), "bulk": LaneView(keys, oldest)}
    bounds = step_bounds(lanes, "bulk", costs, 0.0, interactive_expected=False)
    taken: list[QueueKey] = []
    for part in next_batch(lanes, limits, costs, bounds)["bulk"]:
        taken += keys[part]
        del keys[part]
    return taken


def sorted_batches(encodings: list[Encoding], limits: Limits, costs: StepCosts) -> list[PackedBatch]:
    """All of ``encodings`` in the batches that the server's policy would cut from a full queue."""
    order = sorted(range(len(encodings)), key=lambda i: (encodings[i].num_tokens, i))
    keys = [QueueKey(encodings[i].num_tokens, i) for i in order]
    batches = []
    while keys:
        taken = cut(keys, len(keys) - 1, limits, costs)
        batches.append(PackedBatch.from_encodings([encodings[key.arrival] for key in taken]))
    return batches


def batches_in_flight(
    encodings: list[Encoding],
    limits: Limits,
    costs: StepCosts,
    request_size: int,
    concurrency: int,
    *,
    num_ahead: int = 0,
    longest_first: bool = True,
) -> list[PackedBatch]:
    """The batches the server's policy cuts when it knows only the requests in flight. Each request that ends is
    followed by one, which comes when the next batch has been cut.

    ``num_ahead``: batches that are cut while one still runs. ``longest_first``: whether of the sequences of a request
    the longest counts as the oldest, as in the server, or the first.
    """
    requests = [encodings[start : start + request_size] for start in range(0, len(encodings), request_size)]
    remaining = [len(request) for request in requests]
    waiting = iter(enumerate(requests))
    arrived: list[tuple[int, Encoding]] = []  # the request of each, and itself
    keys: list[QueueKey] = []

    def follow() -> None:
        for number, request in itertools.islice(waiting, 1):
            order = (
                sorted(request, key=lambda encoding: encoding.num_tokens, reverse=True) if longest_first else request
            )
            keys.extend(QueueKey(encoding.num_tokens, len(arrived) + i) for i, encoding in enumerate(order))
            arrived.extend((number, encoding) for encoding in order)
        keys.sort()

    def taken() -> list[tuple[int, Encoding]]:
        oldest = min(range(len(keys)), key=lambda position: keys[position].arrival)
        return [arrived[key.arrival] for key in cut(keys, oldest, limits, costs)]

    for _ in range(concurrency):
        follow()
    batches, unfinished = [], deque[list[tuple[int, Encoding]]]()
    while keys or unfinished:
        if keys:
            unfinished.append(taken())
            batches.append(PackedBatch.from_encodings([encoding for _, encoding in unfinished[-1]]))
        if not keys or len(unfinished) > 1 + num_ahead:
            for number, _ in unfinished.popleft():
                remaining[number] -= 1
                if not remaining[number]:
                    follow()
    return batches


def alternate(
    sides: Mapping[str, Callable[[], float]], repetitions: int, prepare: Callable[[], object] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Measure all sides in turn, ``repetitions`` times after one warm-up; each call returns its figure.

    Every second repetition goes through the sides backwards. Beside every figure stands the share of the machine that
    others used meanwhile; what they disturbed is made again (``least_disturbed``). ``prepare`` is called before
    every repetition and before the warm-up, and is not measured.
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
    values = {name: [found[name][0] for found in kept] for name in sides}
    return {
        name: {
            "median": statistics.median(values[name]),
            "min": min(values[name]),
            "max": max(values[name]),
            "values": values[name],
            "foreign_load": [found[name][1] for found in kept],
            "repetitions left out": num_left_out,
        }
        for name in sides
    }


def least_disturbed(count: int, measure: Callable[[int], tuple[T, float]], say: str = "") -> tuple[list[T], int]:
    """``count`` repetitions, those during which others used the least of the machine, and how many were left out.

    Two of the cores of a shared machine may be taken away for a fifth of the time, for minutes, and a request of 10 ms
    then takes 300; others always use a little. So repetitions are made until others used at most ``MOST_FOREIGN`` in
    ``count`` of them, and at most twice as many. ``measure`` is told how many those are, and returns what it has found
    and the largest foreign load of its measurements. ``say``: what is measured, to show how far it has come.
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
    """Two sides of ``alternate`` whose figures are rates: three ratios of them.

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


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def with_foreign_load(measure: Callable[[], T]) -> tuple[T, float]:
    """What ``measure`` returns, and the share of all cores that others used: not this process and its children.

    That includes other virtual machines, as far as the system knows of them (steal time).
    """
    own, total, started = _own_cpu_s(), _busy_cpu_s(), time.perf_counter()
    value = measure()
    elapsed = (time.perf_counter() - started) * usable_cores()
    foreign = max(0.0, (_busy_cpu_s() - total) - (_own_cpu_s() - own))
    return value, round(foreign / elapsed, 3)


def write(name: str, results: Mapping[str, Any]) -> None:
    """Write ``results/<name>.json`` with the machine and the versions, and print it."""
    RESULTS.mkdir(exist_ok=True)
    content = {"benchmark": name, "machine": _machine(), "versions": _versions(), "results": results}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def _own_cpu_s() -> float:
    process = psutil.Process()
    times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
    finished = times[0].children_user + times[0].children_system
    return float(sum(t.user + t.system for t in times) + finished)


def _busy_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "steal", 0.0))


def _machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "computes in": cpu_capabilities(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }


def _versions() -> dict[str, str]:
    found = {"bei": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
