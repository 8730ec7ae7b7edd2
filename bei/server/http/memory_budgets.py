"""Memory budgets of a server: bodies of requests that are not admitted yet, and answers under way.

Over a budget's limit clients that send or take their bytes slowly yield to others, the slowest first.

A budget is the server's: each process publishes what it holds, including what it is about to take, and then reads that
of the others (``MemoryPeers``). Of two that take at once at least one sees the other, so together they never exceed the
limit. Both may see each other and both be refused; clients try again.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from bei.errors import BeiError, OverloadedError

# Who has been waited for less time than this is not measured: a first packet has no rate.
_GRACE_S = 1.0

# A client that is faster does not yield, as what it holds is free soon: an answer that is ended half-way was computed
# for nothing, and under more load than the memory is for, of fast clients, none would ever be complete.
_FAST_BYTES_PER_S = 10_000_000

# Clients that are refused for want of memory are asked to come back after so long, each after another time.
_RETRY_S = 1.0
_JITTER = 1.2


class MemoryPeers(Protocol):
    """The bytes of one memory budget in this process and in the others. Thread-safe as long as ``tell`` calls do not
    overlap."""

    def tell(self, own: int) -> None:
        """Publish that this process holds ``own``."""

    def others(self) -> int:
        """The sum that the others have published."""

    def refuse(self) -> None:
        """Count a transfer that was refused because of what the others hold: one of them ends a slow one."""

    def refused(self) -> int:
        """Number of refusals of the others since the last call."""


class NoPeers:
    """The server is one process."""

    def tell(self, own: int) -> None:
        """No-op."""

    def others(self) -> int:
        return 0

    def refuse(self) -> None:
        """No-op."""

    def refused(self) -> int:
        return 0


NO_PEERS = NoPeers()


class Transfer(Protocol):
    """Bytes of one request, counted in a budget."""

    held: int

    def slow_rate(self, now_s: float) -> float | None:
        """Bytes a second at which its client has sent or taken them. None: it cannot yield, or is fast."""

    def fail(self, error: BeiError) -> None:
        """Give the bytes back, and end the request."""


TransferT = TypeVar("TransferT", bound=Transfer)


class MemoryBudget(ABC, Generic[TransferT]):
    """A limit on the bytes of all transfers of one kind, in all processes of a server.

    Where those that could yield are another process's, it is asked to end one (``yield_to_others``).
    """

    def __init__(self, limit: int, elsewhere: MemoryPeers = NO_PEERS) -> None:
        self.limit = limit
        self.held = 0
        self._transfers: dict[TransferT, None] = {}
        self._elsewhere = elsewhere

    def yield_to_others(self) -> None:
        """End slow transfers: one for each that a process without slow ones has refused. Called periodically."""
        for _ in range(self._elsewhere.refused()):
            slow = self._slow()
            if not slow:
                return
            slow[0].fail(self._ended())

    def _make_room(self) -> bool:
        """True if what is held fits, once the slowest have yielded. False if it would not, even if all slow ones did:
        then none does."""
        self._elsewhere.tell(self.held)
        others = self._elsewhere.others()
        excess = self.held + others - self.limit
        if excess <= 0:
            return True
        slow = self._slow()
        if sum(transfer.held for transfer in slow) < excess:
            self._elsewhere.refuse()
            return False
        for transfer in slow:
            transfer.fail(self._ended())
            if self.held + others <= self.limit:
                break
        return True

    def _slow(self) -> list[TransferT]:
        """Those that may yield, the slowest first."""
        now_s = time.monotonic()
        rates = [(transfer.slow_rate(now_s), transfer) for transfer in self._transfers]
        slow = [(rate, transfer) for rate, transfer in rates if rate is not None]
        return [transfer for _, transfer in sorted(slow, key=lambda of: of[0])]

    @abstractmethod
    def _ended(self) -> OverloadedError:
        """The error of a transfer that yields."""

    def _give_back(self, transfer: TransferT, size: int) -> None:
        self._transfers.pop(transfer, None)
        self.held -= size
        self._elsewhere.tell(self.held)


def _slow_rate(moved: int, waited_s: float) -> float | None:
    is_slow = waited_s > _GRACE_S and moved < (waited_s - _GRACE_S) * _FAST_BYTES_PER_S
    return moved / waited_s if is_slow else None


class BodyMemory(MemoryBudget["Body"]):
    """A limit on the bytes of all bodies of a server until their requests are admitted. Of the event loop's thread.

    Bytes count as they arrive, not as a Content-Length announces them: a header that costs the client nothing would
    else reserve what others need.
    """

    def _take(self, body: Body, size: int) -> None:
        self._transfers[body] = None
        self.held += size
        if not self._make_room():
            body.fail(self._ended())

    def _ended(self) -> OverloadedError:
        return OverloadedError(
            f"The unfinished requests hold more than {self.limit} bytes: retry later, or send smaller ones.", _retry_s()
        )


class Body:
    """One request's body until it is admitted. ``size`` is what has arrived; ``complete`` is set with its last byte.

    ``error`` is set once it cannot arrive any more, or is too large beside the others: who reads it raises that, the
    bytes still to come are dropped, and ``on_fail`` is called, once. ``is_lost``: the client has left before its
    answer; whoever watches for that is called then. ``on_watch`` is called when somebody starts to watch: the
    connection must then go on reading, or it would not notice that the client leaves.
    """

    __slots__ = (
        "_memory",
        "_on_lost",
        "complete",
        "error",
        "held",
        "is_lost",
        "on_fail",
        "on_watch",
        "size",
        "started_s",
    )

    def __init__(self, memory: BodyMemory) -> None:
        self._memory: BodyMemory | None = memory
        self.held = 0
        self.started_s = time.monotonic()
        self.size = 0
        self.complete = False
        self.error: BeiError | None = None
        self.on_fail: Callable[[], None] | None = None
        self.is_lost = False
        self.on_watch: Callable[[], None] | None = None
        self._on_lost: Callable[[], None] | None = None

    def add(self, size: int) -> None:
        """Count ``size`` bytes that have arrived. May fail this body or others."""
        self.size += size
        self.grow(size)

    def grow(self, size: int) -> None:
        """Count ``size`` bytes that decoding has added, or, below 0, saved. May fail this body or others."""
        if self._memory is not None:
            self.held += size
            self._memory._take(self, size)

    def fail(self, error: BeiError) -> None:
        """Give the bytes back, and have the reader raise ``error``."""
        self.error = error
        self.release()
        on_fail, self.on_fail = self.on_fail, None
        if on_fail is not None:
            on_fail()

    def slow_rate(self, now_s: float) -> float | None:
        """Bytes a second, of a client that is slow to send them."""
        return None if self.complete else _slow_rate(self.size, now_s - self.started_s)

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call ``on_lost`` when the client leaves, which it has not done yet."""
        self._on_lost = on_lost
        if self.on_watch is not None:
            self.on_watch()

    def unwatch(self) -> None:
        self._on_lost = None

    def lose(self) -> None:
        """Note that the client has left."""
        self.is_lost = True
        self.end()
        if self._on_lost is not None:
            self._on_lost()

    def release(self) -> None:
        """Give the bytes back for good: the request is admitted, or nobody wants the body, which may still fail."""
        if self._memory is not None:
            self._memory._give_back(self, self.held)
        self._memory, self.held = None, 0

    def end(self) -> None:
        """Its request is answered, or the client has left."""
        self.release()
        # Both lead to the request and back: the first by a call, the second, once it is raised, by its traceback, whose
        # frames hold what has arrived. The garbage collector comes by rarely.
        self.on_fail = self.error = None


class AnswerMemory(MemoryBudget["AnswerAccount"]):
    """A limit on the bytes of all answers under way in a server, as estimated. Safe in threads, but for those that may
    not exceed it: they are of the event loop's.

    Each is held to a limit of its own, but many at once would still take all memory there is.
    """

    def __init__(self, limit: int, elsewhere: MemoryPeers = NO_PEERS) -> None:
        super().__init__(limit, elsewhere)
        self._lock = threading.RLock()

    def yield_to_others(self) -> None:
        """As the base class does, while no thread takes anything."""
        with self._lock:
            super().yield_to_others()

    def _hold(self, answer: AnswerAccount, size: int, *, may_exceed: bool) -> None:
        with self._lock:
            more = size - answer.held
            if answer.is_released or more <= 0:
                return
            self.held += more
            if may_exceed:
                self._elsewhere.tell(self.held)
            elif not self._make_room():
                self.held -= more
                self._elsewhere.tell(self.held)
                others = self._elsewhere.others()
                raise OverloadedError(
                    f"The answers under way take about {self.held + others} bytes, and this one {more}, more than "
                    f"{self.limit} together: retry later, or ask for less at a time.",
                    _retry_s(),
                )
            answer.held = size
            self._transfers[answer] = None

    def _release(self, answer: AnswerAccount) -> None:
        with self._lock:
            answer.is_released = True
            held, answer.held = answer.held, 0
            if held:
                self._give_back(answer, held)

    def _ended(self) -> OverloadedError:
        return OverloadedError(
            f"The answers under way take more than {self.limit} bytes, and this client takes its own slowest: ask for "
            "less at a time.",
            _retry_s(),
        )


class AnswerAccount:
    """One answer until the last of it is sent. ``held``: bytes that it is estimated to take in memory. Nothing is held
    once it ``is_released``: a tokenizer's thread may come late.

    ``error`` is set where it has to yield to others: the rest of it is not to be sent.
    """

    __slots__ = ("_memory", "_on_fail", "_taken", "_waited_s", "_waits_since_s", "error", "held", "is_released")

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self.held = 0
        self.is_released = False
        self.error: BeiError | None = None
        self._taken = 0
        self._waited_s = 0.0
        self._waits_since_s = 0.0
        self._on_fail: Callable[[], object] | None = None  # while it waits for its client

    def grow(self, size: int, *, may_exceed: bool) -> None:
        """Hold ``size`` bytes in all. Raises OverloadedError where they do not fit, even if slow clients yield, unless
        they ``may_exceed``: of an answer whose request is accepted already."""
        self._memory._hold(self, size, may_exceed=may_exceed)

    def release(self) -> None:
        """Give the bytes back for good: the answer was sent or dropped."""
        self._memory._release(self)

    def waits(self, on_fail: Callable[[], object]) -> None:
        """Its client is to take what was sent. ``on_fail`` is called if it has to yield meanwhile."""
        self._waits_since_s = time.monotonic()
        self._on_fail = on_fail

    def goes_on(self, taken: int) -> None:
        """Its client has taken ``taken`` bytes more."""
        self._waited_s += time.monotonic() - self._waits_since_s
        self._taken += taken
        self._on_fail = None

    def slow_rate(self, now_s: float) -> float | None:
        """Bytes a second, of a client that is slow to take them."""
        if self._on_fail is None:
            return None
        return _slow_rate(self._taken, self._waited_s + now_s - self._waits_since_s)

    def fail(self, error: BeiError) -> None:
        """Give the bytes back, and end the answer."""
        self.error = error
        self.release()
        on_fail, self._on_fail = self._on_fail, None
        if on_fail is not None:
            on_fail()


def _retry_s() -> float:
    """A second or a little more, so that clients that are refused together come back apart."""
    return _RETRY_S * random.uniform(1.0, _JITTER)
