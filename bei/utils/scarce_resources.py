"""Errors of a process that has no address space or threads left, or may not write more, in a sentence each."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
from pathlib import Path

_MEMORY = re.compile("cannot allocate memory|can't alloc|bad_alloc|failed to map segment", re.IGNORECASE)
_THREADS = re.compile(
    "can't start new thread|resource temporarily unavailable|pthread_create|ThreadPoolBuildError", re.IGNORECASE
)
_FILE_SIZE = os.strerror(errno.EFBIG)  # as libraries in C++ and Rust quote it

_LEAST_ROOM_BYTES = 16 << 20
_reserve = bytearray()  # freed by the first lack, which is reported with it


def prepare_for_scarcity() -> None:
    """Have the C library load what an exception of C++ needs to pass through it, while there is memory for that: glibc
    ends the process where it cannot, though the exception would have become an error. Hold address space in reserve."""
    _reserve.extend(bytes(1 << 20))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "backtrace"):  # musl has none, and loads nothing late
        libc.backtrace(ctypes.byref(ctypes.c_void_p()), 1)


def require_address_space(num_bytes: int) -> None:
    """Raise OSError (ENOMEM) unless so much more can be mapped."""
    mmap.mmap(-1, num_bytes).close()


def scarce_resource(error: BaseException) -> str | None:
    """What the process lacks, and what to do, if ``error`` came from that; else None.

    Where the address space is bounded and used up, any error of a library may come from that: no thread gets its stack,
    and a plugin that cannot be mapped is a format that nobody reads.
    """
    _reserve.clear()
    is_full = _is_address_space_full()
    found: BaseException | None = error
    while found is not None:
        number = found.errno if isinstance(found, OSError) else None
        if isinstance(found, MemoryError) or number == errno.ENOMEM or _MEMORY.search(str(found)):
            return _no_memory(found)
        if number == errno.EAGAIN or _THREADS.search(str(found)):
            if is_full:
                return _no_memory(found)
            return (
                f"No thread or process can be started ({_reason(found)}): raise the limit (ulimit -u, pids of the "
                "container), or use fewer (--tokenizer-threads, --engine-threads, --http-workers)."
            )
        if number == errno.EFBIG or _FILE_SIZE in str(found):
            return (
                f"No file may become so large ({_reason(found)}): raise the limit (ulimit -f), or write to a file "
                "system for larger ones."
            )
        found = found.__cause__ or found.__context__
    return _no_memory(error) if is_full else None


def _no_memory(error: BaseException) -> str:
    return (
        f"There is no memory left for this process ({_reason(error)}): raise its limit (ulimit -v, the container's), "
        "or give it less to hold (a smaller model, fewer models, smaller batches)."
    )


def _is_address_space_full() -> bool:
    """True if less is left of it than a library or a thread's stack takes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not on Linux
        return False
    except MemoryError:
        return True
    return limit - pages * resource.getpagesize() < _LEAST_ROOM_BYTES


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [line for line in lines if _MEMORY.search(line) or _THREADS.search(line)]
    return (known or lines or [type(error).__name__])[-1][-200:]
