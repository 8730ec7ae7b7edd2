"""A pool of streams: one caller for each, and none after the engine is closed. Independent of devices."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from bei.errors import EngineError

T = TypeVar("T")


class StreamPool(Generic[T]):
    """Hands out ``streams``, the one that was free for longest first. Thread-safe."""

    def __init__(self, streams: Sequence[T]) -> None:
        self._free = deque(streams)
        self._num_streams = len(streams)
        self._is_closed = False
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, *, all_of_them: bool = False) -> Iterator[list[T]]:
        """One stream, or all of them; waits until enough are free. Raises EngineError after ``close``."""
        count = self._num_streams if all_of_them else 1
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._free) >= count)
            if self._is_closed:
                raise EngineError("The engine is closed.")
            streams = [self._free.popleft() for _ in range(count)]
        try:
            yield streams
        finally:
            with self._changed:
                self._free.extend(streams)
                self._changed.notify_all()

    def close(self, patience_s: float) -> bool:
        """Refuse further requests, and wait for all streams to return, ``patience_s`` at most. True if all did."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: len(self._free) == self._num_streams, patience_s)
