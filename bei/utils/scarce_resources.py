"""Errors of a process that has no address space or threads left, in a sentence each."""

from __future__ import annotations

import ctypes
import errno
import re

_MEMORY = re.compile("cannot allocate memory|can't alloc|bad_alloc|failed to map segment", re.IGNORECASE)
_THREADS = re.compile(
    "can't start new thread|resource temporarily unavailable|pthread_create|ThreadPoolBuildError", re.IGNORECASE
)


def load_unwinder() -> None:
    """Have the C library load what an exception of C++ needs to pass through it, while there is memory for that: glibc
    ends the process where it cannot, though the exception would have become an error."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "backtrace"):  # musl has none, and loads nothing late
        libc.backtrace(ctypes.byref(ctypes.c_void_p()), 1)


def scarce_resource(error: BaseException) -> str | None:
    """What the process lacks, and what to do, if ``error`` came from that; else None."""
    found: BaseException | None = error
    while found is not None:
        number = found.errno if isinstance(found, OSError) else None
        if isinstance(found, MemoryError) or number == errno.ENOMEM or _MEMORY.search(str(found)):
            return (
                f"There is no memory left for this process ({_reason(found)}): raise its limit (ulimit -v, the "
                "container's), or give it less to hold (a smaller model, fewer models, smaller batches)."
            )
        if number == errno.EAGAIN or _THREADS.search(str(found)):
            return (
                f"No thread or process can be started ({_reason(found)}): raise the limit (ulimit -u, pids of the "
                "container), or use fewer (--tokenizer-threads, --engine-threads, --http-workers)."
            )
        found = found.__cause__ or found.__context__
    return None


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [line for line in lines if _MEMORY.search(line) or _THREADS.search(line)]
    return (known or lines or [type(error).__name__])[-1][-200:]
