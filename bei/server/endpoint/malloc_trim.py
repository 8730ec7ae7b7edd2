"""Memory back to the system after large requests.

glibc keeps what a large request has freed: in pieces between what is still used, and in the arenas of threads
(docs/decisions.md, "Large answers"). ``malloc_trim`` gives back whole pages of it. Small requests use theirs again.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from bei.utils.threads import off_loop

# From a large request's end; others that end meanwhile are served by the same call, so that a stream of them does not
# fault its pages in anew each time.
_DELAY_S = 1.0


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
