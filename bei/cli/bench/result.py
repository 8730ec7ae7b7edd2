"""A result of ``bei bench`` as it is stored: JSON of a schema with a number. Times are milliseconds where the name says
nothing else; figures that too few answers cannot give are null."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bei.cli.bench.arrivals import LoadPlan
from bei.cli.bench.recording import PackedHistogram
from bei.cli.bench.texts import TextsPlan
from bei.errors import BenchError
from bei.utils.untrusted_files import UnfitError, read_bounded

SCHEMA = 1
PERCENTILES = {"p50": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}

_MOST_BYTES = 500_000_000


class LatencyFigures(msgspec.Struct, frozen=True):
    """Of good answers to requests that were due in the window: from when they were due (of a closed loop: sent)."""

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
    """A load in one interval of the window (or behind it, while the last answers came). ``at_s``: its begin."""

    at_s: float
    answers: int
    inputs: int
    failures: int
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class LoadResult(msgspec.Struct, frozen=True):
    """One load at one point. Rates are of the good answers that came within the window. ``num_due``: requests that
    were due in it; of those, ``failures`` by kind and ``retries`` (refused, and sent again as Retry-After said).
    ``lateness_*``: from when an open loop's request was due until the generator came to it."""

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
        """All kinds."""
        return sum(self.failures.values())


class ServerSample(msgspec.Struct, frozen=True):
    """What a bei server's metrics said of one interval. Means are of its steps or sequences; null without any."""

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
    """One server under all loads at once. ``rate``: that of a sweep. ``cpu_shares``: of a core, by worker;
    ``coordinator_share``: that of the process that shows and scrapes."""

    server: str
    rate: float | None
    measured_s: float
    loads: list[LoadResult]
    cpu_shares: list[float]
    coordinator_share: float
    samples: list[ServerSample] | None


class ServerFacts(msgspec.Struct, frozen=True):
    """A server, as far as it says. ``info``: a bei server's ``/info``."""

    name: str
    url: str
    model: str | None
    software: str | None
    is_local: bool
    info: dict[str, Any] | None


class GeneratorMachine(msgspec.Struct, frozen=True):
    """Where the load was made."""

    system: str
    cpu: str
    cores: int
    python: str
    packages: dict[str, str]


class BenchSetup(msgspec.Struct, frozen=True):
    """What was asked: results are comparable where these agree."""

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
    """A run."""

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
        """Requests, but for those that had no answer when the run was ended."""
        return sum(
            count
            for point in self.points
            for load in point.loads
            for kind, count in load.failures.items()
            if kind != "unanswered"
        )


def write_result(result: BenchResult, path: Path) -> None:
    """As JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def read_result(path: Path) -> BenchResult:
    """Raises BenchError."""
    try:
        content = read_bounded(path, _MOST_BYTES)
        found = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        schema = msgspec.json.decode(found.get("schema", b"null"))
        if schema != SCHEMA:
            raise BenchError(f"{path} is no result of this bei bench: its schema is {schema}, not {SCHEMA}.")
        return msgspec.json.decode(content, type=BenchResult)
    except FileNotFoundError:
        raise BenchError(f"{path} is not there.") from None
    except (OSError, UnfitError, msgspec.MsgspecError) as error:
        raise BenchError(f"{path} is no result of bei bench: {error}.") from error
