"""Memory for what one process lends to others: segments, cut into blocks that return when their last array is gone.

It grows by segments up to a bound, and gives back the segments that stay empty.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from bei.core import EngineInfo, Held
from bei.multiprocess.shared_memory.segment import Segment, in_pages

log = logging.getLogger(__name__)

# Blocks begin at cache lines.
_ALIGNMENT = 64
_SEGMENT_BYTES = 8 << 20
# A segment that was empty for so long is given back.
_IDLE_S = 5.0

# The least bound, and how many of the largest steps fit: those that run, are being answered, and are being rendered.
_LEAST_BOUND = 256 << 20
_STEPS = 4


def bound_of(info: EngineInfo) -> int:
    """Bytes that the answers of an engine's steps may fill."""
    limits = info.limits
    rows = {name: limits.max_num_tokens if name in info.per_token else limits.max_batch_size for name in info.outputs}
    largest = sum(rows[name] * width * 4 for name, width in info.outputs.items())
    return max(_LEAST_BOUND, _STEPS * largest)


class FreeRanges:
    """The free bytes of a segment: ranges that neither overlap nor touch, in order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._starts = [0]
        self._ends = [size]

    @property
    def is_whole(self) -> bool:
        """Whether everything is free."""
        return self._starts == [0] and self._ends == [self._size]

    def take(self, size: int) -> int | None:
        """The start of ``size`` bytes, free before, in the first range that holds them; None if none does."""
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start > size:
                self._starts[index] = start + size
                return start
            if end - start == size:
                del self._starts[index], self._ends[index]
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """These bytes are free again."""
        end, index = start + size, bisect_left(self._starts, start)
        touches_next = index < len(self._starts) and self._starts[index] == end
        if index and self._ends[index - 1] == start:
            if touches_next:
                self._ends[index - 1] = self._ends[index]
                del self._starts[index], self._ends[index]
            else:
                self._ends[index - 1] = end
        elif touches_next:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)


class _Part:
    """A segment of an arena. ``empty_s``: since when it is empty."""

    def __init__(self, segment: Segment, now_s: float) -> None:
        self.segment = segment
        self.free = FreeRanges(segment.size)
        self.empty_s = now_s


class Block(Held):
    """Owns bytes of an arena; they are free again when it dies."""

    __slots__ = ("__array_interface__", "_freed", "_part", "_range")

    def __init__(self, part: _Part, start: int, size: int, freed: _Freed) -> None:
        self._part, self._range, self._freed = part, (start, size), freed
        self.__array_interface__ = {
            "version": 3,
            "data": (part.segment.address + start, False),
            "shape": (size,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:
        # In any thread, and in the middle of anything: the arena looks at it when it has its lock.
        self._freed.put((self._part, *self._range))


_Freed = queue.SimpleQueue[tuple[_Part, int, int]]


class Arena:
    """Blocks of shared memory, ``max_bytes`` in all. Safe in threads."""

    def __init__(self, max_bytes: int, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._parts: list[_Part] = []
        self._freed: _Freed = queue.SimpleQueue()

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        return sum(part.segment.size for part in self._parts)

    def block(self, num_bytes: int, wait_s: float = 0.0) -> npt.NDArray[np.uint8] | None:
        """At least one byte, in memory that is free again when the array and all its views are gone.

        None where it is full and stays so for ``wait_s``: whoever holds the memory may himself wait for the caller, so
        nobody may wait for it for ever.
        """
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        until_s = time.monotonic() + (wait_s if size <= self._max_bytes else 0.0)
        while True:
            with self._lock:
                block = self._block(size)
            if block is not None:
                return np.asarray(block)[:num_bytes]
            try:
                freed = self._freed.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                return None
            self._freed.put(freed)

    def trim(self, now_s: float) -> None:
        """Give back segments that have long been empty."""
        with self._lock:
            self._reclaim(now_s)
            self._drop([part for part in self._parts if part.free.is_whole and now_s - part.empty_s >= _IDLE_S])

    # Under the lock.

    def _block(self, size: int) -> Block | None:
        now_s = time.monotonic()
        self._reclaim(now_s)
        for part in self._parts:
            start = part.free.take(size)
            if start is not None:
                return Block(part, start, size, self._freed)
        grown = in_pages(max(size, self._segment_bytes))
        if self.num_bytes + grown > self._max_bytes:
            self._drop([part for part in self._parts if part.free.is_whole])
            grown = in_pages(max(size, min(self._segment_bytes, self._max_bytes - self.num_bytes)))
        if self.num_bytes + grown > self._max_bytes:
            return None
        try:
            part = _Part(Segment.create(grown), now_s)
        except OSError as error:  # no descriptors, or no memory
            log.warning("no shared memory: %s", error)
            return None
        self._parts.append(part)
        start = part.free.take(size)
        assert start == 0, "a new segment has room"
        return Block(part, start, size, self._freed)

    def _reclaim(self, now_s: float) -> None:
        while True:
            try:
                part, start, size = self._freed.get_nowait()
            except queue.Empty:
                return
            part.free.give(start, size)
            part.empty_s = now_s

    def _drop(self, parts: list[_Part]) -> None:
        for part in parts:
            part.segment.discard()
            self._parts.remove(part)
