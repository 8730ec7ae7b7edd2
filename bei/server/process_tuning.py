"""Settings of a serving process: event loop, thread switches, garbage collection, open files, freed memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import resource
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from bei.utils.threads import off_loop

log = logging.getLogger(__name__)

# An engine thread that comes back from a batch must not wait Python's usual 5 ms for the event loop to let go of the
# interpreter: the device would be idle (docs/decisions.md: +5 % single texts, +2 % bulk).
_SWITCH_INTERVAL_S = 1e-4

# Python's garbage collector stops every thread for 1 us an object it looks at. A collection of everything took 60 to
# 100 ms, most of it for what was imported at start (docs/decisions.md, "Large answers"): that is left out for good, and
# the rest, a large request's inputs say, is looked at as a whole a thousandth as often. Reference counts free nearly
# everything here; the collector is for the cycles of exceptions, which are young.
_GC_THRESHOLDS = (5_000, 20, 100)

# glibc keeps what a large request has freed: between pieces that are still used, and in the arenas of threads
# (docs/decisions.md, "Large answers"). malloc_trim gives whole pages of it back. Small requests use theirs again.
# From a large request's end; others that end meanwhile are served by the same call, so that a stream of them does not
# fault its pages in anew each time.
_DELAY_S = 1.0


def run_on_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` to its end in this thread, in a process that is set up for serving."""
    switch_quickly()
    raise_limit()
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def switch_quickly() -> None:
    """Let threads hand the interpreter over soon. Before anything else of a server."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def collect_rarely() -> None:
    """Leave what there is to itself. When everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def raise_limit() -> None:
    """Let the process open as many files as the system allows it: the usual soft limit of 1,024 is for select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # macOS has a lower limit than the hard one says
            log.warning("cannot raise the limit of open files from %d to %d (%s)", soft, hard, error)


def _trim_of_libc() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # musl, macOS
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    found: Callable[[int], int] = trim
    return found


_trim = _trim_of_libc()


def give_back() -> None:
    """Give back whatever can be. Blocks, for as long as there are pages to look at."""
    if _trim is not None:
        _trim(0)


class MemoryRelease:
    """Gives memory back, off the event loop, some time after ``soon`` was called. Of one event loop."""

    def __init__(self) -> None:
        self._is_due = False

    def soon(self) -> None:
        """A large request has ended."""
        if _trim is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._start)

    def _start(self) -> None:
        assert _trim is not None  # or it would not be due
        self._is_due = False
        self._work = asyncio.ensure_future(off_loop(_trim, 0))
