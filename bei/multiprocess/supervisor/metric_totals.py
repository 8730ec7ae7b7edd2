"""What is kept of processes that have ended: counters of a server must never fall, nor count anything twice.

Of kinds that are kept, a process's last answer is remembered. When the process ends it is added to what others have
left. So one who asks is told of each process either its answer, or what it has left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from bei.metrics.aggregate import counts_of_ended
from bei.server.status.peers import ENDED

# Makes one answer of several, of which some may be its own.
Merge = Callable[[Seq[bytes]], bytes]

METRICS = "metrics"

KEPT: Mapping[str, Merge] = {METRICS: counts_of_ended}


class Kept:
    """The sum of the last answers of processes that have ended, by kind."""

    def __init__(self) -> None:
        self._left: dict[str, bytes] = {}

    def add(self, last: Mapping[str, bytes]) -> None:
        """A process has ended, whose last answers these are, by kind."""
        for kind in last.keys() & KEPT.keys():
            self._left[kind] = self._sum(kind, [last[kind]])

    def left(self, kind: str, silent: Seq[bytes]) -> dict[str, bytes]:
        """What is to be told under ``ENDED``; ``silent``: last answers of processes that live and do not answer."""
        if kind not in KEPT or not (silent or kind in self._left):
            return {}
        return {ENDED: self._sum(kind, silent)}

    def _sum(self, kind: str, more: Seq[bytes]) -> bytes:
        return KEPT[kind]([self._left[kind], *more] if kind in self._left else more)
