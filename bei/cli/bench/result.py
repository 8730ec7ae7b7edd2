"""A result of ``bei bench``: its JSON form, the machine that made the load, and warnings for a reader.

The JSON has a numbered schema. Times are milliseconds unless the name says otherwise; percentiles that too few answers
cannot support are null.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bei.cli.bench.arrivals import LoadPlan
from bei.cli.bench.recorder import PackedHistogram
from bei.cli.bench.texts import TextsPlan
from bei.errors import BenchError
from bei.utils.cpu_count import usable_cores
from bei.utils.full_disk import write_whole
from bei.utils.untrusted_files import read_bounded

SCHEMA = 1
PERCENTILES = {"p50": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}

_MOST_BYTES = 500_000_000


class LatencyFigures(msgspec.Struct, frozen=True):
    """Latencies of successful answers to requests that were due in the window, from their due times (closed loop:
    sent)."""

    count: int
    mean: float | None
    min: float | None
    p50: float | None
    p75: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    max: float | None


class IntervalResult(msgspec.Struct, frozen=True):
    """A load in one interval of the window (or after it, while the last answers arrive). ``at_s``: its begin."""

    at_s: float
    answers: int
    inputs: int
    failures: int
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class LoadResult(msgspec.Struct, frozen=True):
    """One load at one point. Rates count successful answers that arrived within the window. ``num_due``: requests
    that were due in it; of those, ``failures`` by kind and ``retries`` (refused, and resent as Retry-After said).
    ``lateness_*``: from the due time of an open loop's request until the generator processed it."""

    name: str
    num_due: int
    requests_per_s: float
    inputs_per_s: float
    megabytes_per_s: float
    failures: dict[str, int]
    retries: int
    reconnects: int
    latency: LatencyFigures
    lateness_p50: float | None
    lateness_p99: float | None
    lateness_max: float | None
    errors: list[str]
    intervals: list[IntervalResult]
    histogram: PackedHistogram

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    def keeps_up(self, measured_s: float) -> bool:
        """True if of what was due in the window nearly all was answered in it; what failed does not count."""
        return self.requests_per_s * measured_s >= _LEAST_ANSWERED_SHARE * (self.num_due - self.num_failed)


class ServerSample(msgspec.Struct, frozen=True):
    """A bei server's metrics over one interval. Means over its steps or sequences; null without any."""

    at_s: float
    steps_per_s: float
    tokens_per_step: float | None
    sequences_per_step: float | None
    tokens_per_s: float
    engine_share: float
    slots_per_token: float | None
    waiting: dict[str, float]
    queue_ms: dict[str, float | None]


class PointResult(msgspec.Struct, frozen=True):
    """One server under all loads together. ``rate``: of a sweep. ``cpu_shares``: of a core, by worker;
    ``coordinator_share``: of the process that displays and scrapes."""

    server: str
    rate: float | None
    measured_s: float
    loads: list[LoadResult]
    cpu_shares: list[float]
    coordinator_share: float
    samples: list[ServerSample] | None


class ServerFacts(msgspec.Struct, frozen=True):
    """A server's facts about itself. ``info``: a bei server's ``/info``."""

    name: str
    url: str
    model: str | None
    software: str | None
    is_local: bool
    info: dict[str, Any] | None


class GeneratorMachine(msgspec.Struct, frozen=True):
    """The machine that made the load."""

    system: str
    cpu: str
    cores: int
    python: str
    packages: dict[str, str]


class BenchSetup(msgspec.Struct, frozen=True):
    """The settings of a run: results are comparable if these agree."""

    dialect: str
    loads: list[LoadPlan]
    texts: TextsPlan
    rates: list[float] | None
    warmup_s: float
    duration_s: float
    interval_s: float
    timeout_s: float
    workers: int
    obeys_retry_after: bool
    header_names: list[str]


class BenchResult(msgspec.Struct, frozen=True):
    """The result of a run."""

    schema: int
    bei: str
    started: str
    command: list[str]
    interrupted: bool
    warnings: list[str]
    setup: BenchSetup
    machine: GeneratorMachine
    servers: list[ServerFacts]
    points: list[PointResult]

    @property
    def num_failed(self) -> int:
        """Failed requests, without those that were unanswered when the run was ended."""
        return sum(
            count
            for point in self.points
            for load in point.loads
            for kind, count in load.failures.items()
            if kind != "unanswered"
        )

    @property
    def errors(self) -> list[str]:
        """The distinct error messages of all points and loads, in order."""
        return list(dict.fromkeys(error for point in self.points for load in point.loads for error in load.errors))

    def label(self, point: PointResult, load: LoadResult | None = None) -> str:
        """The shortest name of a point, or of a load at a point, that is unambiguous in this result."""
        parts = [point.server] if len(self.servers) > 1 else []
        parts += [f"{point.rate:g} requests/s"] if point.rate is not None else []
        parts += [load.name] if load is not None and len(point.loads) > 1 else []
        return ", ".join(parts) or "The run"

    def rate_of(self, point: PointResult, load: LoadResult) -> float | None:
        """Requests/s asked of a load at a point; None: a closed loop."""
        plan = next(one for one in self.setup.loads if one.name == load.name)
        return point.rate if plan.is_swept else plan.rate


def write_result(result: BenchResult, path: Path) -> None:
    """Write the result as JSON. Raises DiskFullError, OSError."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


_result_decoder = msgspec.json.Decoder(BenchResult)


def read_result(path: Path) -> BenchResult:
    """Read a result. Raises BenchError."""
    try:
        content = read_bounded(path, _MOST_BYTES)
        found = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        schema = msgspec.json.decode(found.get("schema", b"null"))
        if schema != SCHEMA:
            raise BenchError(f"{path} is no result of this bei bench: its schema is {schema}, not {SCHEMA}.")
        return _result_decoder.decode(content)
    except FileNotFoundError:
        raise BenchError(f"{path} is not there.") from None
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise BenchError(f"{path} is no result of bei bench: {error}.") from error


_PACKAGES = ("bei", "hdrhistogram", "httptools", "msgspec")


def machine_facts() -> GeneratorMachine:
    """Facts of this machine, without name and address, since results are shared."""
    return GeneratorMachine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu(),
        cores=usable_cores(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name)) is not None},
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# Warn above this share of a core: a busier worker sends late, whatever the server does.
MOST_CPU_SHARE = 0.8
# Warn if lateness exceeds this share of the latency, and this minimum.
_MOST_LATENESS_SHARE, _LEAST_LATENESS_MS = 0.1, 1.0
_LEAST_ANSWERED_SHARE = 0.95


def warnings_of(result: BenchResult) -> list[str]:
    """Warnings, one sentence each, the most serious first."""
    found: list[str] = []
    if result.interrupted:
        found.append(
            "The run was ended early: the last point covers the time until then, and later points are missing."
        )
    if result.setup.texts.repeated is not None:
        found.append(
            "Texts were repeated: a server that caches answers, or computes equal inputs once, looks faster than it is."
        )
    for point in result.points:
        for load in point.loads:
            found += (f"{result.label(point, load)}: {text}" for text in _of_load(result, point, load))
        found += (f"{result.label(point)}: {text}" for text in _of_generator(point))
    return found


def _of_load(result: BenchResult, point: PointResult, load: LoadResult) -> Iterator[str]:
    failed = {kind: count for kind, count in load.failures.items() if kind != "unanswered"}
    if failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in failed.items())
        yield f"{sum(failed.values())} of {load.num_due} requests failed ({kinds}), and percentiles leave them out."
    rate = result.rate_of(point, load)
    if rate is None or not load.latency.count:
        return
    if not load.keeps_up(point.measured_s) and not result.interrupted:
        asked_per_s = (load.num_due - load.num_failed) / point.measured_s
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
