"""Memory budgets of a server: bodies of requests that are not admitted yet, and answers under way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from bei.errors import BeiError, OverloadedError
from bei.server.http.shared_limits import NO_PEERS, Tally, Uploads

# Whoever sends for less time than this is not measured: a first packet has no rate.
_GRACE_S = 1.0

# Clients that are refused for want of memory are asked to come back after so long, each after another time.
_RETRY_S = 1.0
_JITTER = 1.2


class BodyMemory:
    """A limit on the bytes of all bodies of a server until their requests are admitted. Of the event loop's thread.

    Bytes count as they arrive, not as a Content-Length announces them: a header that costs the client nothing would
    else reserve what others need. Over the limit the slowest upload of those under way for a second yields, and only
    if there is none the one that asked: clients that trickle large bodies cannot keep the others out. Where those are
    uploads to another process, it is asked to end as many (``yield_to_others``).
    """

    def __init__(self, limit: int, elsewhere: Uploads = NO_PEERS) -> None:
        self.limit = limit
        self.held = 0
        self._bodies: dict[Body, None] = {}
        self._elsewhere = elsewhere

    def yield_to_others(self) -> None:
        """End slow uploads: one for each upload that a process without slow ones has refused. Called periodically."""
        for _ in range(self._elsewhere.refused()):
            slowest = self._slowest()
            if slowest is None:
                return
            slowest.fail(self._too_much())

    def _take(self, body: Body, size: int) -> None:
        self._bodies[body] = None
        self.held += size
        others = self._elsewhere.tell(self.held)
        while self.held + others > self.limit:
            slowest = self._slowest()
            if slowest is None:
                self._elsewhere.refuse()
            yielding = slowest or body
            yielding.fail(self._too_much())
            if yielding is body:
                return

    def _too_much(self) -> OverloadedError:
        return OverloadedError(
            f"The unfinished requests hold more than {self.limit} bytes: retry later, or send smaller ones.", _retry_s()
        )

    def _give_back(self, body: Body, size: int) -> None:
        self._bodies.pop(body, None)
        self.held -= size
        self._elsewhere.tell(self.held)

    def _slowest(self) -> Body | None:
        now_s = time.monotonic()
        slow = [body for body in self._bodies if not body.complete and now_s - body.started_s > _GRACE_S]
        return min(slow, key=lambda body: body.size / (now_s - body.started_s), default=None)


class Body:
    """One request's body until it is admitted. ``size`` is what has arrived; ``complete`` is set with its last byte.

    ``error`` is set once it cannot arrive any more, or is too large beside the others: who reads it raises that, the
    bytes still to come are dropped, and ``on_fail`` is called, once. ``is_lost``: the client has left before its
    answer; whoever watches for that is called then. ``on_watch`` is called when somebody starts to watch: the
    connection must then go on reading, or it would not notice that the client leaves.
    """

    __slots__ = (
        "_held",
        "_memory",
        "_on_lost",
        "complete",
        "error",
        "is_lost",
        "on_fail",
        "on_watch",
        "size",
        "started_s",
    )

    def __init__(self, memory: BodyMemory) -> None:
        self._memory: BodyMemory | None = memory
        self._held = 0
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
            self._held += size
            self._memory._take(self, size)

    def fail(self, error: BeiError) -> None:
        """Give the bytes back, and have the reader raise ``error``."""
        self.error = error
        self.release()
        on_fail, self.on_fail = self.on_fail, None
        if on_fail is not None:
            on_fail()

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call ``on_lost`` when the client leaves, which it has not done yet."""
        self._on_lost = on_lost
        if self.on_watch is not None:
            self.on_watch()

    def unwatch(self) -> None:
        """Stop watching."""
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
            self._memory._give_back(self, self._held)
        self._memory, self._held = None, 0

    def end(self) -> None:
        """Its request is answered, or the client has left."""
        self.release()
        self.on_fail = None  # which leads to the request and back


class AnswerMemory:
    """A limit on the bytes of all answers under way in a server, as estimated. Safe in threads.

    Each is held to a limit of its own, but many at once would still take all memory there is.
    """

    def __init__(self, limit: int, elsewhere: Tally = NO_PEERS) -> None:
        self.limit = limit
        self.held = 0
        self._elsewhere = elsewhere
        self._lock = threading.Lock()

    def take(self, size: int, *, may_exceed: bool) -> None:
        """Count ``size`` bytes more. Raises OverloadedError where they do not fit, unless they ``may_exceed``: of an
        answer whose request is accepted already."""
        with self._lock:
            others = self._elsewhere.tell(self.held + size)
            if self.held + others + size > self.limit and not may_exceed:
                self._elsewhere.tell(self.held)
                raise OverloadedError(
                    f"The answers under way take about {self.held + others} bytes, and this one {size}, more than "
                    f"{self.limit} together: retry later, or ask for less at a time.",
                    _retry_s(),
                )
            self.held += size

    def give_back(self, size: int) -> None:
        """Give ``size`` bytes back: the answer was sent or dropped."""
        with self._lock:
            self.held -= size
            self._elsewhere.tell(self.held)


def _retry_s() -> float:
    """A second or a little more, so that clients that are refused together come back apart."""
    return _RETRY_S * random.uniform(1.0, _JITTER)
