"""Starts the worker processes of a run, and collects their reports."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from bei.cli.bench.recorder import IntervalTotals
from bei.cli.bench.worker import (
    STOP,
    FromWorker,
    LoadReport,
    PointDone,
    PointProgress,
    StartPoint,
    WorkerFailed,
    WorkerReady,
    WorkerTask,
)
from bei.errors import BenchError
from bei.utils.module_command import module_command

_LEAD_S = 0.2  # from the message to the start: time to reach all workers
_STOP_S = 10.0  # for a worker to end
_DECODER: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)


@dataclass
class LoadRecord:
    """Results of one load over all workers, so far."""

    intervals: dict[int, IntervalTotals] = field(default_factory=lambda: defaultdict(IntervalTotals))
    total: IntervalTotals = field(default_factory=IntervalTotals)
    in_flight: dict[int, int] = field(default_factory=dict)  # by worker
    errors: list[str] = field(default_factory=list)
    num_reconnects: int = 0

    def add(self, worker: int, report: LoadReport) -> None:
        self.in_flight[worker] = report.in_flight
        for interval in report.intervals:
            self.intervals[interval.index].add(interval)
            self.total.add(interval)


@dataclass
class PointRecord:
    """Results of a point, so far. ``elapsed_s``: since the start; ``cpu_s`` and ``window_s``: by worker."""

    loads: dict[str, LoadRecord]
    started_s: float
    cpu_s: dict[int, float] = field(default_factory=dict)
    window_s: dict[int, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    is_interrupted: bool = False


class LoadWorkers:
    """Worker processes. A context manager: they end with it."""

    def __init__(self, num_workers: int) -> None:
        self._processes = [_start() for _ in range(num_workers)]
        self._buffers = [b""] * num_workers
        self._selector = selectors.DefaultSelector()
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, number)

    def __enter__(self) -> LoadWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._selector.close()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()

    def measure(self, tasks: Sequence[WorkerTask], on_tick: Callable[[PointRecord], None]) -> PointRecord:
        """Run a point: one task for each worker. Ctrl-C ends it early. Raises BenchError."""
        for number, task in enumerate(tasks):
            self._send(number, msgspec.json.encode(task))
        waiting = set(range(len(tasks)))
        while waiting:
            for number, message in self._messages(None):
                if isinstance(message, WorkerFailed):
                    raise BenchError(message.message)
                assert isinstance(message, WorkerReady)
                waiting.discard(number)
        record = PointRecord({load.name: LoadRecord() for load in tasks[0].loads}, started_s=time.monotonic() + _LEAD_S)
        for number in range(len(tasks)):
            self._send(number, msgspec.json.encode(StartPoint(record.started_s)))
        self._listen(record, len(tasks), on_tick)
        return record

    def _listen(self, record: PointRecord, num_workers: int, on_tick: Callable[[PointRecord], None]) -> None:
        waiting = set(range(num_workers))
        while waiting:
            try:
                for number, message in self._messages(0.2):
                    self._take(record, number, message)
                    if isinstance(message, PointDone):
                        waiting.discard(number)
                record.elapsed_s = time.monotonic() - record.started_s
                on_tick(record)
            except KeyboardInterrupt:
                if record.is_interrupted:
                    raise
                record.is_interrupted = True
                for number in waiting:
                    self._send(number, STOP)

    @staticmethod
    def _take(record: PointRecord, number: int, message: FromWorker) -> None:
        assert isinstance(message, (PointProgress, PointDone))
        for report in message.loads:
            record.loads[report.name].add(number, report)
        record.cpu_s[number] = message.cpu_s
        if isinstance(message, PointDone):
            record.window_s[number] = message.window_s
            for name, errors in message.errors.items():
                known = record.loads[name].errors
                known += [error for error in errors if error not in known]
            for name, count in message.reconnects.items():
                record.loads[name].num_reconnects += count

    def _send(self, number: int, line: bytes) -> None:
        stdin = self._processes[number].stdin
        assert stdin is not None
        try:
            stdin.write(line + b"\n")
        except BrokenPipeError:
            raise BenchError(_ENDED) from None

    def _messages(self, timeout_s: float | None) -> list[tuple[int, FromWorker]]:
        messages = []
        for key, _ in self._selector.select(timeout_s):
            number = int(key.data)
            data = os.read(key.fd, 1 << 20)
            if not data:
                raise BenchError(_ENDED)
            *lines, self._buffers[number] = (self._buffers[number] + data).split(b"\n")
            messages += [(number, _DECODER.decode(line)) for line in lines]
        return messages


_ENDED = "A process that makes load has ended by itself; what it wrote is above."


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        module_command("bei.cli.bench.worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
