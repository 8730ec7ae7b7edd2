"""Segments of anonymous shared memory (memfd), and where the arrays of this process lie in them.

A segment has no name, so nothing is left of it whoever is killed: its pages are freed with its last mapping.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_keys = itertools.count(1)


def in_pages(num_bytes: int) -> int:
    """``num_bytes``, rounded up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Segment:
    """Shared memory, mapped into this process for as long as this object lives. ``key`` is its own in this process."""

    __slots__ = ("__weakref__", "_mapping", "address", "fd", "key", "size")

    def __init__(self, fd: int, size: int, *, is_writable: bool) -> None:
        """Maps ``size`` bytes of ``fd``, which it owns from now on. Raises OSError, ValueError."""
        self.fd = fd
        self.size = size
        self.key = next(_keys)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self._mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        self.address: int = np.frombuffer(self._mapping, np.uint8).__array_interface__["data"][0]
        _remember(self)

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """A new one, of at least ``num_bytes``. Its size is sealed: nobody who maps it can meet its end early."""
        size = in_pages(num_bytes)
        fd = os.memfd_create("bei", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, size, is_writable=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size: int) -> Segment:
        """One that another process has made, to be read. Takes ``fd`` over, also where it raises OSError."""
        try:
            return cls(fd, size, is_writable=False)
        except BaseException:
            os.close(fd)
            raise

    def discard(self) -> None:
        """Give its pages back now, whoever still maps them; what is in it is lost."""
        self._mapping.madvise(mmap.MADV_REMOVE)

    def __del__(self) -> None:
        if hasattr(self, "_mapping"):
            os.close(self.fd)


class Place(NamedTuple):
    """Where bytes lie."""

    segment: Segment
    offset: int


class _Table(NamedTuple):
    """The segments of this process by their addresses, ascending; some of them may be gone."""

    addresses: list[int]
    segments: list[weakref.ref[Segment]]


# Replaced as a whole, so that it is read without a lock: segments end in finalizers, in whichever thread.
_table = _Table([], [])
_lock = threading.Lock()


def _remember(segment: Segment) -> None:
    global _table
    with _lock:
        known = [other for ref in _table.segments if (other := ref()) is not None]
        ordered = sorted([*known, segment], key=lambda other: other.address)
        _table = _Table([other.address for other in ordered], [weakref.ref(other) for other in ordered])


def place_of(values: npt.NDArray[Any]) -> Place | None:
    """Where ``values`` lie; None where that is no segment of this process, or not one after the other."""
    addresses, segments = _table
    if not addresses or not values.flags.c_contiguous:
        return None
    address: int = values.__array_interface__["data"][0]
    index = bisect_right(addresses, address) - 1
    segment = segments[index]() if index >= 0 else None
    if segment is None or address + values.nbytes > segment.address + segment.size:
        return None
    return Place(segment, address - segment.address)
