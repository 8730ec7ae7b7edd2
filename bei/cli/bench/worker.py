"""The worker process of a load generator: ``python -m bei.cli.bench.worker``, started by ``bei.cli.bench.workers``.

It reads tasks from stdin and reports on stdout, a line of JSON each, until stdin ends. Input during a point ends the
point early.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec

from bei.cli.bench.arrivals import LoadPlan, WorkerShare
from bei.cli.bench.dialects import DIALECTS
from bei.cli.bench.driver import LoadDriver, RequestStream
from bei.cli.bench.http1 import head_of, request_of
from bei.cli.bench.recorder import Interval, LoadRecorder
from bei.cli.bench.result import BenchSetup
from bei.cli.bench.sockets import ServerAddress, SocketNetwork, allow_files
from bei.cli.bench.target import BenchTarget, TlsPlan, merged_headers
from bei.cli.bench.texts import Texts, texts_of
from bei.errors import BeiError


class WorkerTask(msgspec.Struct, frozen=True):
    """A worker's part of a point. The window is ``setup.warmup_s`` to ``setup.warmup_s + setup.duration_s``.

    ``loads``: those of the setup, with the rate of this point.
    """

    worker: int
    setup: BenchSetup
    target: BenchTarget
    tls: TlsPlan
    headers: dict[str, str]
    path: str
    model: str | None
    loads: list[LoadPlan]
    seed: int


class StartPoint(msgspec.Struct, frozen=True):
    """Start the point when CLOCK_MONOTONIC reaches ``started_s``."""

    started_s: float


class LoadReport(msgspec.Struct, frozen=True):
    """Results of a load since the last report. ``in_flight``: started and not ended."""

    name: str
    in_flight: int
    intervals: list[Interval]


class PointProgress(msgspec.Struct, frozen=True, tag="tick"):
    """Interim results. ``cpu_s``: the worker's CPU time since the window began."""

    loads: list[LoadReport]
    cpu_s: float


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The worker is ready to start."""


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot start; ``message`` is for people."""

    message: str


class PointDone(msgspec.Struct, frozen=True, tag="done"):
    """The point is over. ``cpu_s``: the worker's CPU time within its window of ``window_s``."""

    loads: list[LoadReport]
    errors: dict[str, list[str]]
    reconnects: dict[str, int]
    cpu_s: float
    window_s: float


FromWorker = PointProgress | WorkerReady | WorkerFailed | PointDone


STOP = b"stop"

_STDIN = 0

_task_decoder = msgspec.json.Decoder(WorkerTask)
_start_decoder = msgspec.json.Decoder(StartPoint)


class LoadWorker:
    """Processes tasks in sequence. Each server gets the same texts, each of them once."""

    def __init__(self) -> None:
        self._input = b""
        self._texts: dict[str, Texts] = {}

    def run(self) -> None:
        """Process tasks until stdin ends."""
        while (line := self._read_line()) is not None:
            if line == STOP:
                continue  # a stop for a point that is already over
            task = _task_decoder.decode(line)
            try:
                point = _Point(task, self._supply(task))
            except (BeiError, OSError) as error:
                self._say(WorkerFailed(str(error)))
                continue
            self._say(WorkerReady())
            if (line := self._read_line()) is None:
                return
            point.run(_start_decoder.decode(line).started_s, self._say)

    def _supply(self, task: WorkerTask) -> Texts:
        if task.target.name not in self._texts:
            self._texts[task.target.name] = texts_of(task.setup.texts, task.worker, task.setup.workers)
        return self._texts[task.target.name]

    def _read_line(self) -> bytes | None:
        while b"\n" not in self._input:
            data = os.read(_STDIN, 1 << 16)
            if not data:
                return None
            self._input += data
        line, _, self._input = self._input.partition(b"\n")
        return line

    @staticmethod
    def _say(message: FromWorker) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


class _Point:
    """A point: the streams of a task, and their recorders."""

    def __init__(self, task: WorkerTask, texts: Texts) -> None:
        self._task = task
        self._begin_s = task.setup.warmup_s
        self._end_s = task.setup.warmup_s + task.setup.duration_s
        self._recorders: dict[str, LoadRecorder] = {}
        self._wire = SocketNetwork(ServerAddress(task.target.host, task.target.port, task.tls.context_for(task.target)))
        share = WorkerShare(task.worker, task.setup.workers)
        streams = [stream for load in task.loads if (stream := self._stream(load, share, texts)) is not None]
        self._driver = LoadDriver(self._wire, streams, seconds=self._end_s)
        self._cpu_from_s = 0.0
        self._cpu_s = 0.0
        self._window_from_s: float | None = None
        self._window_s = 0.0

    def _stream(self, load: LoadPlan, share: WorkerShare, texts: Texts) -> RequestStream | None:
        """A load's stream; None if this worker has none of its few connections."""
        task, dialect = self._task, DIALECTS[self._task.setup.dialect]
        window = (self._begin_s, self._end_s, task.setup.interval_s)
        recorder = LoadRecorder(*window, dialect.check, is_open_loop=load.concurrency is None)
        head = head_of("POST", task.path, task.target.authority, merged_headers(task.headers, load.lane))
        stream = RequestStream(
            name=load.name,
            content=_requests(load, head, texts, task, random.Random(f"{task.seed} {load.name} {task.worker}")),
            sink=recorder,
            retry="obey" if task.setup.obeys_retry_after else "never",
            timeout_s=task.setup.timeout_s,
            keeps_body=True,
        )
        if load.concurrency is None:
            stream.arrivals = share.arrivals(load, self._end_s, task.seed)
            stream.max_connections = max(1, share.of(load.max_connections))
        elif not (concurrency := share.of(load.concurrency)):
            return None
        else:
            stream.concurrency = concurrency
        self._recorders[load.name] = recorder
        return stream

    def run(self, started_s: float, say: Callable[[FromWorker], None]) -> None:
        """Run from the common start to the last answer."""
        gc.freeze()  # exclude existing objects from garbage collection
        driver = self._driver
        driver.at(self._begin_s, self._begin)
        driver.at(self._end_s, self._end)
        driver.at(self._begin_s + self._task.setup.interval_s, partial(self._tick, 1, say))
        self._wire.watch(_STDIN, select.EPOLLIN, self._ended_early)
        driver.run(started_s)
        self._end()
        done_s = driver.now()
        say(
            PointDone(
                loads=self._reports(done_s, is_last=True),
                errors={name: recorder.errors for name, recorder in self._recorders.items() if recorder.errors},
                reconnects={name: driver.counts(name)[2] for name in self._recorders},
                cpu_s=self._cpu_s,
                window_s=self._window_s,
            )
        )

    def _ended_early(self, events: int) -> None:
        self._wire.unwatch(_STDIN)
        os.read(_STDIN, 1 << 16)
        self._driver.abort()

    def _begin(self) -> None:
        self._cpu_from_s, self._window_from_s = time.process_time(), self._driver.now()

    def _end(self) -> None:
        if self._window_from_s is not None and not self._window_s:
            self._cpu_s = time.process_time() - self._cpu_from_s
            self._window_s = self._driver.now() - self._window_from_s

    def _tick(self, number: int, say: Callable[[FromWorker], None]) -> None:
        now = self._driver.now()
        cpu_s = self._cpu_s or time.process_time() - self._cpu_from_s
        say(PointProgress(self._reports(now), cpu_s))
        self._driver.at(
            self._begin_s + (number + 1) * self._task.setup.interval_s, partial(self._tick, number + 1, say)
        )

    def _reports(self, now_s: float, *, is_last: bool = False) -> list[LoadReport]:
        reports = []
        for name, recorder in self._recorders.items():
            num_started, num_finished, _ = self._driver.counts(name)
            reports.append(LoadReport(name, num_started - num_finished, recorder.take(now_s, is_last=is_last)))
        return reports


def _requests(
    load: LoadPlan, head: bytes, texts: Texts, task: WorkerTask, rng: random.Random
) -> Callable[[], tuple[bytes, int]]:
    """A generator of a load's requests: they are made on demand, since their number is unknown."""
    dialect = DIALECTS[task.setup.dialect]
    inputs, words, query_words = load.lengths("inputs"), load.lengths("words"), load.lengths("query_words")

    def content() -> tuple[bytes, int]:
        count = inputs.draw(rng)
        query = texts.take(query_words) if dialect.has_query else ""
        body = dialect.body([texts.take(words) for _ in range(count)], query, task.model)
        return request_of(head, body), count

    return content


def main() -> None:
    """Process tasks until stdin ends. The coordinator handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_files()
    try:
        LoadWorker().run()
    except BrokenPipeError:  # the coordinator has ended
        os._exit(1)


if __name__ == "__main__":
    main()
