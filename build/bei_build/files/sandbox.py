"""Bounded execution of work that a file asks for: a chat template is a program, and may never end."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")
_DONE, _FAILED = b"+", b"-"


class SandboxError(Exception):
    """The work failed, or took too long or too much memory; the message names the cause."""


def run_bounded(work: Callable[[], str], seconds: float, extra_bytes: int) -> str:
    """Run ``work`` in a forked copy of this process and return its result. The copy is killed after ``seconds``, and
    may use ``extra_bytes`` more memory than this process has. Only the result is passed back. Raises OutOfBoundsError.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks beside threads: the copy uses no threads
        child = os.fork()
    if not child:
        _run_in_copy(work, writing, extra_bytes)
    os.close(writing)
    try:
        answer = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if answer is None:
        raise SandboxError(f"it took more than {seconds:g} s")
    if not answer.startswith(_DONE):
        raise SandboxError(answer[1:].decode() or "it ended without an answer")
    return answer[1:].decode("utf-8", "surrogatepass")


def _run_in_copy(work: Callable[[], str], writing: int, extra_bytes: int) -> None:
    """In the copy: write the result and exit."""
    try:
        if _STATM.is_file():
            in_use = int(_STATM.read_text().split()[0]) * resource.getpagesize()
            most = [in_use + extra_bytes, *(x for x in resource.getrlimit(resource.RLIMIT_AS) if x >= 0)]
            resource.setrlimit(resource.RLIMIT_AS, (min(most), min(most)))
        answer = _DONE + work().encode("utf-8", "surrogatepass")
    except BaseException as error:  # the copy must not continue with this process's code
        answer = _FAILED + (str(error) or type(error).__name__)[:1000].encode("utf-8", "replace")
    try:
        while answer:
            answer = answer[os.write(writing, answer) :]
    finally:
        os._exit(0)


def _read(reading: int, until: float) -> bytes | None:
    """All bytes until the other end is closed; None on timeout."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        if not (part := os.read(reading, 1 << 16)):
            return b"".join(parts)
        parts.append(part)
