"""Releases memory pages of mapped files that are no longer needed."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_MADV_DONTNEED = 4
_EVERY_S = 0.05


def release_pages(file: Path) -> None:
    """Drop the pages of ``file`` from this process's memory; later reads come from the page cache.

    Private mappings that may have been written to are left alone. A no-op on systems other than Linux.
    """
    try:
        lines = os.fsdecode(_MAPS.read_bytes()).splitlines()  # file names have no particular encoding
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    path = str(file.resolve())
    for line in lines:
        columns = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
        if len(columns) == 6 and columns[5] == path and "w" not in columns[1]:
            start, end = (int(bound, 16) for bound in columns[0].split("-"))
            madvise(start, end - start, _MADV_DONTNEED)


@contextmanager
def releasing_pages(file: Path) -> Iterator[None]:
    """A context that drops the pages of ``file`` periodically, and at its end, while the block reads it once."""
    is_over = threading.Event()

    def release() -> None:
        while not is_over.wait(_EVERY_S):
            release_pages(file)

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        release_pages(file)
