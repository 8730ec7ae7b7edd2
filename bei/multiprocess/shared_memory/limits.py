"""Limits that several front ends keep together, in the page of memory that they share (``limits_page``).

Each class implements a protocol of one part of the server: ``bei.server.http.memory_budgets``,
``bei.service.admission.Elsewhere``, ``bei.server.http.connections.FrontEnds``, ``bei.server.auth.rate_limit.Bucket``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

from bei.multiprocess.shared_memory import limits_page
from bei.multiprocess.shared_memory.limits_page import SharedPage
from bei.server.auth.rate_limit import Bucket
from bei.server.http.connections import ConnectionCounts
from bei.service.admission import NOTHING_ACCEPTED, Accepted

# A front end whose event loop has not come by for so long accepts nothing.
_ALIVE_NS = 2_000_000_000

# The wait that a client is told where a process that does not run has its bucket.
_BUSY_S = 0.1


class SharedLimits:
    """The limits of one front end, of the ``page`` that it has a cell of."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page
        self._models: dict[int, ModelCell] = {}
        self.answers = SharedMemory(page, limits_page.ANSWER_BYTES, limits_page.ANSWERS_REFUSED)
        self.bodies = SharedMemory(page, limits_page.BODY_BYTES, limits_page.BODIES_REFUSED)
        self.front_ends = SharedFrontEnds(page)

    def accepted(self, model: int) -> AcceptedElsewhere:
        """For one service of the model of this number; while it is swapped there are two."""
        return AcceptedElsewhere(self._models.setdefault(model, ModelCell(self._page, model)))

    def bucket(self, name: str, what: str, rate: float) -> Bucket:
        """Of a key's name, for what is counted. Raises ConfigError where there have been too many."""
        return SharedBucket(rate, self._page, self._page.word_of_bucket(name, what))


class SharedMemory:
    """The bytes of one memory budget (``bei.server.http.memory_budgets.MemoryPeers``). ``held`` and ``refused``: words
    of the cell."""

    def __init__(self, page: SharedPage, held: int, refused: int) -> None:
        self._page = page
        self._held, self._refused = held, refused
        self._seen = self._refused_before()

    def tell(self, own: int) -> None:
        """This process holds ``own``."""
        self._page.write(self._held, own)

    def others(self) -> int:
        """What the others hold together."""
        return sum(self._page.of_others(self._held))

    def refuse(self) -> None:
        """A transfer was refused because of what others hold."""
        self._page.write(self._refused, self._page.read(self._refused) + 1)

    def refused(self) -> int:
        """How many the others have refused since the last call."""
        seen, self._seen = self._seen, self._refused_before()
        return max(0, self._seen - seen)  # less where one of them has died

    def _refused_before(self) -> int:
        return sum(self._page.of_others(self._refused))


class SharedFrontEnds:
    """The connections of all front ends. ``bei.server.http.connections.FrontEnds``."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page

    def tell(self, own: ConnectionCounts) -> None:
        self._page.write(limits_page.NUM_OPEN, own.num_open)
        self._page.write(limits_page.NUM_COMING, own.num_coming)
        self._page.write(limits_page.NUM_IDLE, own.num_idle)

    def come_by(self, *, accepts: bool) -> None:
        """Now and then: this front end lives, and accepts connections or not."""
        self._page.write(limits_page.ALIVE_NS, time.monotonic_ns() if accepts else 0)

    def num_open_elsewhere(self) -> int:
        return sum(self._page.of_others(limits_page.NUM_OPEN))

    def accepting(self) -> Seq[ConnectionCounts]:
        since_ns = max(0, time.monotonic_ns() - _ALIVE_NS)  # a machine may have started just now
        words = (limits_page.NUM_OPEN, limits_page.NUM_COMING, limits_page.NUM_IDLE)
        rows = zip(*(self._page.of_others(word) for word in (limits_page.ALIVE_NS, *words)), strict=True)
        return [ConnectionCounts(*found) for alive_ns, *found in rows if alive_ns > since_ns]


class ModelCell:
    """The words of one model in the cell, summed over the services that this process has of it: two while it is
    swapped."""

    def __init__(self, page: SharedPage, model: int) -> None:
        self._page = page
        self._model = model
        self._held: dict[object, Accepted] = {}  # by service, but for those that have accepted nothing
        self._lock = threading.Lock()

    def tell(self, service: object, own: Accepted) -> None:
        with self._lock:
            if own.num_open:
                self._held[service] = own
            else:
                self._held.pop(service, None)
            is_alone = len(self._held) <= bool(own.num_open)  # no other service has accepted anything
            self._page.write_model(self._model, own if is_alone else _sum(self._held.values()))

    def others(self, service: object) -> Accepted:
        """The sum over all services of all front ends but one."""
        here = [accepted for other, accepted in list(self._held.items()) if other is not service]
        held = [*self._page.model_of_others(self._model), *here]
        return Accepted(*held[0]) if len(held) == 1 else _sum(held)


def _sum(held: Iterable[Seq[Any]]) -> Accepted:
    return Accepted(*(sum(words) for words in zip(NOTHING_ACCEPTED, *held, strict=True)))


class AcceptedElsewhere:
    """What all but one service of this process have accepted of a model. ``bei.service.admission.Elsewhere``."""

    def __init__(self, cell: ModelCell) -> None:
        self._cell = cell

    def tell(self, own: Accepted) -> None:
        self._cell.tell(self, own)

    def others(self) -> Accepted:
        return self._cell.others(self)


class SharedBucket(Bucket):
    """A bucket that all front ends take from. Where another process has it and does not run, nothing is let in."""

    def __init__(self, rate: float, page: SharedPage, word: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(rate, clock)
        self._page = page
        self._word = word

    def ask(self, amount: float) -> float:
        if not self._page.lock(self._word):
            return _BUSY_S
        try:
            filled_s, level = self._page.pair(self._word)
            if filled_s:  # else it is full, as it was never asked
                self._filled_s, self._level = filled_s, level
            wait_s = super().ask(amount)
            # The time first: who is killed between the two has not filled the bucket twice for one time.
            self._page.set_pair(self._word, self._filled_s, self._level)
        finally:
            self._page.unlock(self._word)
        return wait_s

    def go_on_from(self, other: Bucket) -> None:
        """There is one bucket of a name, which goes on by itself."""
