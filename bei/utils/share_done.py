"""How much of a long piece of work is done, and how long the rest may take, in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

# Called with what is done and what there is in all, in one unit.
Tell: TypeAlias = Callable[[int, int], None]

# Between two lines of a log.
_LOG_INTERVAL_S = 30.0
# Before this the time left is not known well enough.
_LEAST_S = 1.0


def untold(done: int, total: int) -> None:
    """Nobody wants to know."""


class ShareDone:
    """Called with what is done and what there is in all. ``show`` gets words at every call, for a terminal; ``log`` a
    line now and then."""

    def __init__(
        self,
        show: Callable[[str], object] | None = None,
        log: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show, self._log, self._clock = show, log, clock
        self._started = self._logged = clock()
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        """Tell it. Less than before, or nothing, begins other work."""
        now = self._clock()
        if not done or done < self._done:
            self._started = now
        self._done = done
        if self._show is not None:
            self._show(self._words(done, total, now))
        if self._log is not None and now - self._logged >= _LOG_INTERVAL_S:
            self._logged = now
            self._log(self._words(done, total, now))

    def _words(self, done: int, total: int, now: float) -> str:
        elapsed_s = now - self._started
        share = f"{done / max(1, total):.0%}"
        if not done or elapsed_s < _LEAST_S:
            return share
        return f"{share}, {shown_time(elapsed_s * (total - done) / done)} left"


def shown_time(seconds: float) -> str:
    """``95`` -> ``1 min 35 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
