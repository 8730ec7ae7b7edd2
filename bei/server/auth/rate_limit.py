"""How much may come a second: a bucket that fills steadily."""

from __future__ import annotations

import time
from collections.abc import Callable

# Sums of floats: what is missing by less is there.
_ROUNDING = 1e-9


class Bucket:
    """``rate`` a second on average, and a second's worth at once, one at least. Of the event loop's thread.

    What is larger than the bucket needs a full one and leaves it in debt: the average holds for requests of any size.
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
        """Seconds until ``amount`` can be taken; 0: now."""
        now_s = self._clock()
        self._level = min(self._most, self._level + (now_s - self._filled_s) * self.rate)
        self._filled_s = now_s
        missing = min(amount, self._most) - self._level
        return missing / self.rate if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """What ``wait_s`` has let in."""
        self._level -= amount

    def go_on_from(self, other: Bucket) -> None:
        """Be as full as ``other``, which this one stands for from now on, but no fuller than this one can be."""
        other.wait_s(0.0)
        self._level = other._level  # wait_s cuts it
