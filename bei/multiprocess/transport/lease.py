"""Vectors on their way to another process: it maps the memory they lie in, and says when it uses them no more.

A vector is copied into shared memory once, by the process that has computed it. Whoever passes it on names the place
where it lies; only what lies elsewhere (unit vectors, rows of a cache) is copied, once, by who lends it. The few
vectors of a small answer go over the channel instead: there is nothing to be given back then.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.core import Held, Row
from bei.multiprocess.shared_memory.arena import Arena
from bei.multiprocess.shared_memory.segment import Segment, place_of
from bei.multiprocess.transport.channel import Channel, ChannelClosedError, Frame
from bei.multiprocess.transport.messages import INLINE, Announce, ArrayAt, Forget, Lent, Release

log = logging.getLogger(__name__)

_Array = npt.NDArray[Any]

# Leases that end within this time are released together.
_TOGETHER_S = 0.002
# Up to so many bytes, to be copied in any case, cost less on the channel than a lease does.
_SMALL_BYTES = 1 << 13


class Lender:
    """Lends arrays over one channel, from ``arena`` if they lie in no segment. Safe in threads.

    What is lent is kept as it is until it is released; what is small, or the arena has no room for, goes over the
    channel, and is not kept.
    """

    def __init__(self, channel: Channel[Any], arena: Arena) -> None:
        self._channel = channel
        self._arena = arena
        self._lock = threading.Lock()
        self._announced: dict[int, weakref.ref[Segment]] = {}
        self._leases: dict[int, list[_Array]] = {}
        self._ids = itertools.count(1)
        self.num_copied = 0  # arrays; for measurements
        self.num_referred = 0

    @property
    def num_leases(self) -> int:
        """Those that have not been released."""
        return len(self._leases)

    def lend(self, rows: Seq[Row], wait_s: float = 0.0) -> tuple[list[Lent], list[_Array]]:
        """What is to be said of each of ``rows``, and the arrays to be sent behind the message.

        ``wait_s``: how long to wait for room. Raises ChannelClosedError.
        """
        inlined = _inlined(rows)
        if inlined is not None:
            return inlined
        values = [array for row in rows for array in row.values()]
        places = [place_of(array) for array in values]
        homeless = [index for index, place in enumerate(places) if place is None]
        payload = [np.ascontiguousarray(values[index]) for index in homeless]
        copies = self._copied(payload, wait_s)
        if copies is not None:
            payload = []
            for index, copy in zip(homeless, copies, strict=True):
                values[index], places[index] = copy, place_of(copy)
        with self._lock:
            self._announce({place.segment for place in places if place is not None})
            self.num_copied += len(copies or ())
            self.num_referred += len(values) - len(homeless)
            placed, offset, lent = zip(values, places, strict=True), 0, []
            for row in rows:
                arrays, kept = [], []
                for name, (array, place) in zip(row, placed, strict=False):
                    if place is None:
                        arrays.append(ArrayAt(name, array.dtype.str, array.shape, INLINE, offset))
                        offset += array.nbytes
                    else:
                        arrays.append(ArrayAt(name, array.dtype.str, array.shape, place.segment.key, place.offset))
                        kept.append(array)
                lent.append(Lent(self._kept(kept), arrays))
        return lent, payload

    def release(self, leases: Seq[int]) -> None:
        """The other process uses these no more."""
        with self._lock:
            released = [self._leases.pop(lease, None) for lease in leases]
        del released  # outside the lock: that may end segments

    def forget_segments(self) -> None:
        """Tell the other process which segments are gone. Raises ChannelClosedError."""
        with self._lock:
            gone = [key for key, segment in self._announced.items() if segment() is None]
            for key in gone:
                del self._announced[key]
            if gone:
                self._channel.send(Forget(gone))

    def release_all(self) -> None:
        """The other process has ended, or has left by itself: it uses nothing any more.

        Not where this side has closed the channel: then others may still read what was lent, and it must stay as it is.
        """
        with self._lock:
            leases, self._leases = self._leases, {}
        del leases

    def _copied(self, homeless: list[_Array], wait_s: float) -> list[_Array] | None:
        """Copies in the arena, in one block; None where it is full, or that is not worth it."""
        if sum([values.nbytes for values in homeless]) <= _SMALL_BYTES:
            return None
        block = self._arena.block(sum([_aligned(values.nbytes) for values in homeless]), wait_s)
        if block is None:
            return None
        copies, start = [], 0
        for values in homeless:
            copy = block[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
            copy[...] = values
            copies.append(copy)
            start += _aligned(values.nbytes)
        return copies

    def _announce(self, segments: set[Segment]) -> None:
        for segment in segments:
            if segment.key not in self._announced:
                self._announced[segment.key] = weakref.ref(segment)
                self._channel.send(Announce(segment.key, segment.size), segment=segment)

    def _kept(self, arrays: list[_Array]) -> int:
        if not arrays:
            return 0
        lease = next(self._ids)
        self._leases[lease] = arrays
        return lease


def _inlined(rows: Seq[Row]) -> tuple[list[Lent], list[_Array]] | None:
    """As ``lend``, of a small answer that lies in no segment, as most do; None of any other."""
    lent: list[Lent] = []
    payload: list[_Array] = []
    offset = 0
    for row in rows:
        arrays = []
        for name, array in row.items():
            if offset + array.nbytes > _SMALL_BYTES or place_of(array) is not None:
                return None
            arrays.append(ArrayAt(name, array.dtype.str, array.shape, INLINE, offset))
            payload.append(np.ascontiguousarray(array))
            offset += array.nbytes
        lent.append(Lent(0, arrays))
    return lent, payload


def _aligned(num_bytes: int) -> int:
    """Every array begins where any type may."""
    return -(-num_bytes // 16) * 16


class _Lease(Held):
    """The base of arrays that were lent together; released when the last of them is gone."""

    __slots__ = ("__array_interface__", "_id", "_released", "_segments")

    def __init__(self, lease: int, released: queue.SimpleQueue[int | None]) -> None:
        self._id, self._released = lease, released
        self._segments: list[Segment] = []

    def array(self, segment: Segment, at: ArrayAt) -> _Array:
        """A view, not to be written to."""
        self._segments.append(segment)
        self.__array_interface__ = {
            "version": 3,
            "data": (segment.address + at.offset, True),
            "shape": at.shape,
            "typestr": at.dtype,
        }
        return np.asarray(self)

    def __del__(self) -> None:
        self._released.put(self._id)  # in any thread, and in the middle of anything


class Borrower:
    """Gives the arrays that the other end of ``channel`` lends, and tells it when they are gone.

    ``hears``, ``add``, ``forget`` and ``row`` are of the thread that reads the channel. Arrays outlive all of this:
    their memory stays mapped. A lender whose process lives writes into it again, though, as soon as it reads the end of
    the channel. So where it does, the channel is kept open by ``close_when_unused``.
    """

    def __init__(self, channel: Channel[Any]) -> None:
        self._channel = channel
        self._segments: dict[int, Segment] = {}
        self._released: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._num_leases = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._release_all, name="bei-releases", daemon=True)
        self._thread.start()

    def add(self, segment: int, size: int, fd: int) -> None:
        """A segment of the lender's. Raises OSError."""
        self._segments[segment] = Segment.attach(fd, size)

    def forget(self, segments: Seq[int]) -> None:
        """They hold nothing any more."""
        for segment in segments:
            del self._segments[segment]

    def hears(self, frame: Frame[Any]) -> bool:
        """Whether ``frame`` tells of segments; then that is done. Raises OSError."""
        message = frame.message
        if isinstance(message, Announce):
            assert frame.fd is not None, "its descriptor comes along"
            self.add(message.segment, message.size, frame.fd)
        elif isinstance(message, Forget):
            self.forget(message.segments)
        else:
            return False
        return True

    def row(self, lent: Lent, payload: npt.NDArray[np.uint8]) -> dict[str, _Array]:
        """The arrays by their names. Those in shared memory cannot be written to."""
        lease = None
        if lent.lease:
            self._num_leases += 1
            lease = _Lease(lent.lease, self._released)
        found: dict[str, _Array] = {}
        for at in lent.arrays:
            if at.segment == INLINE:
                found[at.name] = np.ndarray(at.shape, at.dtype, payload, at.offset)
            else:
                assert lease is not None, "what lies in a segment is lent"
                found[at.name] = lease.array(self._segments[at.segment], at)
        return found

    def close_when_unused(self) -> None:
        """Close the channel as soon as no array is left."""
        self._is_closing = True
        self._released.put(None)

    def wait_closed(self) -> None:
        """Return when ``close_when_unused`` has closed the channel."""
        self._thread.join()

    def end(self) -> None:
        """The channel has ended: nobody is told anything any more."""
        self._channel.close()
        self._released.put(None)
        self._thread.join()

    def _release_all(self) -> None:
        try:
            num_released = 0
            while True:
                first = self._released.get()
                if first is not None:
                    time.sleep(_TOGETHER_S)
                leases = [] if first is None else [first]
                while not self._released.empty():
                    lease = self._released.get()
                    if lease is not None:
                        leases.append(lease)
                self._channel.send(Release(leases))
                num_released += len(leases)
                if self._is_closing and num_released == self._num_leases:
                    self._channel.close()
                    return
        except ChannelClosedError:
            return
