"""What the coordinator and its workers say to each other: a line of JSON each."""

from __future__ import annotations

import msgspec

from bei.cli.bench.arrivals import LoadPlan
from bei.cli.bench.recording import Interval
from bei.cli.bench.target import BenchTarget, TlsPlan
from bei.cli.bench.texts import TextsPlan


class WorkerTask(msgspec.Struct, frozen=True):
    """One point of a run for one worker. Its window is ``warmup_s`` to ``warmup_s + duration_s``."""

    worker: int
    num_workers: int
    target: BenchTarget
    tls: TlsPlan
    headers: dict[str, str]
    dialect: str
    path: str
    model: str | None
    loads: list[LoadPlan]
    texts: TextsPlan
    warmup_s: float
    duration_s: float
    interval_s: float
    timeout_s: float
    obeys_retry_after: bool
    seed: int


class StartPoint(msgspec.Struct, frozen=True):
    """Begin when CLOCK_MONOTONIC says ``started_s``."""

    started_s: float


class LoadReport(msgspec.Struct, frozen=True):
    """Of one load since the last report. ``in_flight``: started and not ended."""

    name: str
    in_flight: int
    intervals: list[Interval]


class PointProgress(msgspec.Struct, frozen=True, tag="tick"):
    """So far. ``cpu_s``: the worker's, since the window began."""

    loads: list[LoadReport]
    cpu_s: float


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The worker can begin."""


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot: ``message`` is for people."""

    message: str


class PointDone(msgspec.Struct, frozen=True, tag="done"):
    """The point is over. ``cpu_s``: the worker's within the window, which for it was ``window_s`` long."""

    loads: list[LoadReport]
    errors: dict[str, list[str]]
    reconnects: dict[str, int]
    cpu_s: float
    window_s: float


FromWorker = PointProgress | WorkerReady | WorkerFailed | PointDone
