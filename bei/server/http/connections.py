"""All open connections of a process: their limit, the idle ones, and the clock that ends slow ones."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import Sequence as Seq
from itertools import count, islice
from secrets import randbits
from typing import NamedTuple, Protocol

from bei.config.settings import ServeConfig
from bei.errors import BeiError, ConfigError, TooManyConnectionsError
from bei.metrics.registry import Metrics
from bei.server.http.memory_budgets import NO_PEERS, AnswerMemory, BodyMemory, MemoryPeers
from bei.server.telemetry.access_log import RequestLog

log = logging.getLogger(__name__)

# How often deadlines are looked at: one pass over all connections costs less than a timer for each request.
_TICK_S = 0.5

# Clients that have connected when the server ends have so long for the headers of a request.
_LAST_HEADERS_S = 0.5

# Connections that have their last answer and are read until the client has seen it (Connections.set_lingering).
MOST_LINGERING = 64

# So many idle connections are looked at for one whose answers are taken.
_MOST_LOOKED_AT = 100


# Descriptors for files that the process opens later, and for connections that are refused or closing.
_RESERVED_FILES = 32 + MOST_LINGERING


class Member(Protocol):
    """A connection, as ``Connections`` uses it."""

    deadline_s: float

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not taken."""

    def expire(self, now_s: float) -> None:
        """The deadline has passed."""

    def refuse(self, error: BeiError) -> None:
        """Answer with ``error`` and close."""

    def drop(self) -> None:
        """Close at once."""


class ConnectionCounts(NamedTuple):
    """The connections of one process: those that are open, those that were accepted and are not made yet, and how many
    of the open ones are idle."""

    num_open: int = 0
    num_coming: int = 0
    num_idle: int = 0


class FrontEnds(Protocol):
    """The other processes that accept connections on the same sockets."""

    def tell(self, own: ConnectionCounts) -> None:
        """This one's connections have changed."""

    def come_by(self, *, accepts: bool) -> None:
        """Now and then: this one lives, and accepts connections or not."""

    def num_open_elsewhere(self) -> int:
        """Connections of all others."""

    def accepting(self) -> Seq[ConnectionCounts]:
        """The others that accept connections now."""


def fitting_connections(max_connections: int, num_reserved: int = 0) -> int:
    """``max_connections``, or as many as there are descriptors for. Call it with everything else loaded.

    ``num_reserved``: descriptors to keep for what is not counted among connections.

    Raises ConfigError if there is none left.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    room = limit - len(os.listdir("/dev/fd")) - _RESERVED_FILES - num_reserved
    if room < 1:
        raise ConfigError(f"The limit of {limit} open files leaves none for connections: raise it (ulimit -n).")
    if room < max_connections:
        log.warning(
            "max_connections is lowered from %d to %d: the limit of open files is %d (ulimit -n)",
            max_connections,
            room,
            limit,
        )
    return min(room, max_connections)


def leaves_to_others(own: ConnectionCounts, others: Seq[ConnectionCounts], most: int) -> bool:
    """Whether the next connection is for one of ``others``, which accept connections.

    It is where one of them has fewer; so their numbers stay even. Once there are ``most`` in all, it is for one that
    can close an idle one, if there is any.
    """
    if own.num_open + sum(front.num_open for front in others) >= most:
        return not own.num_idle and any(front.num_idle for front in others)
    return any(front.num_open + front.num_coming < own.num_open + own.num_coming for front in others)


class Connections:
    """The connections of a process. Of the event loop's thread.

    A connection is idle while no request of its has arrived up to the end of the headers: clients that keep
    connections for later and clients that never finish their headers are the same to it.

    ``max_connections``: of this process, which may have descriptors for fewer than ``config`` allows. With ``others``
    the connections of all together are bound by ``config``, and spread evenly; what they hold of ``bodies`` and of
    ``answers`` yields to them, too.
    """

    def __init__(
        self,
        config: ServeConfig,
        metrics: Metrics,
        max_connections: int,
        request_log: RequestLog | None = None,
        others: FrontEnds | None = None,
        bodies: MemoryPeers = NO_PEERS,
        answers: AnswerMemory | None = None,
    ) -> None:
        self.config = config
        self.numbers = count(randbits(62))  # for connections; those of another process are elsewhere among 2**63
        self.bodies = BodyMemory(config.body_memory, bodies)
        self._answers = answers
        self.is_draining = False  # then each connection ends with the answer to its next request
        self.header_timeout_s: float = config.header_timeout
        self._max_connections = max_connections
        self._others = others
        self._num_coming = 0
        self._num_listeners = 0
        self._metrics = metrics
        self._request_log = request_log
        self._open: set[Member] = set()
        self._idle: dict[Member, None] = {}  # the one idle for longest comes first
        self._lingering: dict[Member, None] = {}
        self._clock: asyncio.TimerHandle | None = None

    def add(self, connection: Member) -> None:
        """A connection was made. Over the limit the one idle for longest is closed, or else this one, with a 503."""
        self._open.add(connection)
        self._tell()
        limit = self._limit_passed()
        if limit and not self.close_oldest_idle():
            connection.refuse(
                TooManyConnectionsError(
                    f"All {limit} connections have a request under way: retry later, or ask another replica."
                )
            )
        else:
            self._idle[connection] = None

    def _limit_passed(self) -> int:
        """The limit that is exceeded; 0: none."""
        num_open = len(self._open) - len(self._lingering)
        if num_open > self._max_connections:
            return self._max_connections
        most = self.config.max_connections
        return most if self._others is not None and num_open + self._others.num_open_elsewhere() > most else 0

    def discard(self, connection: Member) -> None:
        """Remove a connection that is closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._lingering.pop(connection, None)
        self._tell()

    def set_idle(self, connection: Member) -> None:
        """Mark a connection whose requests are answered as idle."""
        self._idle[connection] = None

    def set_busy(self, connection: Member) -> None:
        """Mark a connection with an open request as busy."""
        self._idle.pop(connection, None)

    def set_lingering(self, connection: Member) -> None:
        """Move ``connection`` to the lingering ones, which do not count against the limit; of too many the oldest is
        closed."""
        self._idle.pop(connection, None)
        self._lingering[connection] = None
        self._tell()
        if len(self._lingering) > MOST_LINGERING:
            self._drop(next(iter(self._lingering)))

    def close_oldest_idle(self) -> bool:
        """Make room for another connection. False if none is idle.

        To close one loses what its client has not taken of its answers: one without such is closed, if there is any.
        """
        oldest = [*islice(self._idle, _MOST_LOOKED_AT)]
        if oldest:
            self._drop(next((connection for connection in oldest if not connection.unsent_bytes), oldest[0]))
        return bool(oldest)

    def _drop(self, connection: Member) -> None:
        self.discard(connection)  # at once: its own word that it is gone comes in a later turn of the loop
        connection.drop()

    # What the listeners ask.

    def is_left_to_others(self) -> bool:
        """True if another process is to accept the next connection."""
        if self._others is None:
            return False
        return leaves_to_others(self._tell(), self._others.accepting(), self.config.max_connections)

    def coming(self, change: int) -> None:
        """Change the number of connections that were accepted and are not made yet."""
        self._num_coming += change
        self._tell()

    def listening(self, change: int) -> None:
        """Change the number of listeners that accept connections."""
        self._num_listeners += change
        if self._others is not None:
            self._others.come_by(accepts=self._num_listeners > 0)

    def _tell(self) -> ConnectionCounts:
        own = ConnectionCounts(len(self._open) - len(self._lingering), self._num_coming, len(self._idle))
        if self._others is not None:
            self._others.tell(own)
        return own

    def count_refusal(self, status: int, request_id: bytes) -> None:
        """Count and log an answer that was given without a route."""
        self._metrics.requests.labels("unmatched", str(status)).inc()
        if self._request_log is not None:
            self._request_log.refused(status, request_id.decode())

    def begin_drain(self) -> None:
        """Close each connection with the answer to its next request, from now on."""
        self.is_draining = True

    def end(self) -> None:
        """The server ends: clients that have connected have a moment for one more request."""
        self.begin_drain()
        self.header_timeout_s = min(self.header_timeout_s, _LAST_HEADERS_S)

    def start_clock(self) -> None:
        """Enforce deadlines from now on."""
        loop = asyncio.get_running_loop()
        self._clock = loop.call_later(_TICK_S, self._tick, loop, loop.time() + _TICK_S)

    def stop_clock(self) -> None:
        """Enforce no deadlines any more."""
        if self._clock is not None:
            self._clock.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        self._clock = loop.call_later(_TICK_S, self._tick, loop, now_s + _TICK_S)  # first: it goes on whatever fails
        self.listening(0)
        self._tell()  # of the idle ones, who come and go with each request
        self.bodies.yield_to_others()
        if self._answers is not None:
            self._answers.yield_to_others()
        if now_s - due_s < _TICK_S:  # else the loop was held up: what clients sent meanwhile is still to be read
            for connection in [connection for connection in self._open if connection.deadline_s < now_s]:
                connection.expire(now_s)
