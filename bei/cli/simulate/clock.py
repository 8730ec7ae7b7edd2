"""Simulated time: an event queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SimulatedClock:
    """Jumps from event to event. Events of one instant run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_set = 0

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        """Schedule ``event`` for ``when_s``. Raises ValueError for a time in the past, or NaN."""
        if not when_s >= self.now_s:
            raise ValueError(f"an event at {when_s} s, when it is {self.now_s} s already")
        heapq.heappush(self._events, (when_s, self._num_set, event))
        self._num_set += 1

    def run(self) -> None:
        """Run all events, including those scheduled meanwhile."""
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
