"""When a process that has ended is started again: at once, and later and later where it ends again and again."""

from __future__ import annotations

from collections import deque

# So many ends within so many seconds are nobody's loss: a poisonous input ends an engine twice.
_FREE = 10
_WITHIN_S = 60.0
_FIRST_S = 0.25
_MOST_S = 5.0


class Backoff:
    """Of one place. Told the time."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque()

    def delay_s(self, now_s: float) -> float:
        """The process has ended now: how long to wait before another one is started."""
        self._ends_s.append(now_s)
        while now_s - self._ends_s[0] > _WITHIN_S:
            self._ends_s.popleft()
        beyond = len(self._ends_s) - _FREE
        return 0.0 if beyond <= 0 else min(_MOST_S, _FIRST_S * 2.0 ** (beyond - 1))
