"""Work that a file asks for, held to a time and a memory: a chat template is a program, and may never end."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_STATM = Path("/proc/self/statm")


class TookTooLongError(Exception):
    """The time was over."""


@contextmanager
def bounded(seconds: float, extra_bytes: int) -> Iterator[None]:
    """Let the block raise TookTooLongError after ``seconds``, and MemoryError beyond ``extra_bytes`` more memory.

    Time is bounded in the main thread only, where signals arrive; memory on Linux only.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"it took more than {seconds:g} s")

    is_main = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, end) if is_main else None
    try:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        if _STATM.is_file():
            in_use = int(_STATM.read_text().split()[0]) * resource.getpagesize()
            most = in_use + extra_bytes
            limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min([most, *limits]), hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
