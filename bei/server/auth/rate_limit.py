"""Rate limits: a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable

# A smaller shortage is a rounding error of float sums, and counts as none.
_ROUNDING = 1e-9


class Bucket:
    """A token bucket: it fills at ``rate`` a second, and holds the amount of one second, but at least 1.

    An amount larger than the bucket can be taken from a full one and leaves it in debt, so the average rate holds for
    requests of any size. Not thread-safe: used on the event loop.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._most = max(1.0, rate)
        self._level = self._most
        self._clock = clock
        self._filled_s = clock()

    def ask(self, amount: float) -> float:
        """Take ``amount`` and return 0, or take nothing and return the seconds until it can be taken."""
        wait_s = self.wait_s(amount)
        if wait_s == 0:
            self.take(amount)
        return wait_s

    def wait_s(self, amount: float) -> float:
        """Seconds until ``amount`` can be taken; 0: it can be taken now."""
        now_s = self._clock()
        self._level = min(self._most, self._level + (now_s - self._filled_s) * self.rate)
        self._filled_s = now_s
        missing = min(amount, self._most) - self._level
        return missing / self.rate if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take ``amount``, for which ``wait_s`` has returned 0."""
        self._level -= amount

    def go_on_from(self, other: Bucket) -> None:
        """Take over the level of ``other``, which this bucket replaces, up to the size of this bucket."""
        other.wait_s(0.0)
        self._level = other._level  # wait_s limits it to the size
