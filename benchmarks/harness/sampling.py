"""Memory, descriptors and threads of other processes, sampled in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil


@contextmanager
def repeating(work: Callable[[], bool], every_s: float) -> Iterator[None]:
    """Call ``work`` again and again in a thread, until it returns False or the block ends."""
    stop = threading.Event()

    def loop() -> None:
        while work() and not stop.wait(every_s):
            pass

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass
class Samples:
    """Of a process with its children, in MB of 10^6 bytes; ``times_s`` on time.monotonic's clock."""

    times_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


@contextmanager
def sampling(pid: int, every_s: float = 0.5) -> Iterator[Samples]:
    samples, process = Samples(), psutil.Process(pid)

    def sample() -> bool:
        try:
            members = [process, *process.children(recursive=True)]
            rows = [(each.memory_info().rss / 1e6, each.num_fds(), each.num_threads()) for each in members]
        except psutil.NoSuchProcess:  # a child that has just ended, or all of it
            return process.is_running()
        samples.times_s.append(time.monotonic())
        samples.rss_mb.append(round(sum(row[0] for row in rows), 1))
        samples.descriptors.append(sum(row[1] for row in rows))
        samples.threads.append(sum(row[2] for row in rows))
        return True

    with repeating(sample, every_s):
        yield samples
