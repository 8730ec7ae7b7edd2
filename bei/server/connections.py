"""All open connections: how many there may be, which of them are idle, and the clock that ends the slow ones."""

from __future__ import annotations

import asyncio
from typing import Protocol

from bei.config import ServeConfig
from bei.errors import BeiError, TooManyConnectionsError
from bei.metrics import Metrics
from bei.server.bodies import BodyMemory
from bei.server.request_log import RequestLog

# How often deadlines are looked at: one pass over all connections costs less than a timer for each request.
_TICK_S = 0.5

# Connections that have their last answer and are read until the client has seen it (Connections.add_lingering).
MOST_LINGERING = 64


class Member(Protocol):
    """What a connection is to the others."""

    deadline_s: float

    def expire(self, now_s: float) -> None:
        """The deadline has passed."""

    def refuse(self, error: BeiError) -> None:
        """Answer with ``error`` and close."""

    def drop(self) -> None:
        """Close at once."""


class Connections:
    """The connections of a server. Of the event loop's thread.

    A connection is idle while no request of its has arrived up to the end of the headers: clients that keep
    connections for later and clients that never finish their headers are the same to it.
    """

    def __init__(
        self, config: ServeConfig, metrics: Metrics, max_connections: int, request_log: RequestLog | None = None
    ) -> None:
        self.config = config
        self.bodies = BodyMemory(config.body_memory)
        self._max_connections = max_connections
        self._metrics = metrics
        self._request_log = request_log
        self._open: set[Member] = set()
        self._idle: dict[Member, None] = {}  # the one idle for longest comes first
        self._lingering: dict[Member, None] = {}
        self._clock: asyncio.TimerHandle | None = None

    def add(self, connection: Member) -> None:
        """A connection was made. Over the limit the one idle for longest is closed, or else this one, with a 503."""
        self._open.add(connection)
        if len(self._open) - len(self._lingering) > self._max_connections and not self.close_oldest_idle():
            connection.refuse(
                TooManyConnectionsError(
                    f"All {self._max_connections} connections have a request under way: retry later, "
                    "or ask another replica."
                )
            )
        else:
            self._idle[connection] = None

    def discard(self, connection: Member) -> None:
        """The connection is gone."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._lingering.pop(connection, None)

    def set_idle(self, connection: Member) -> None:
        """Its requests are answered."""
        self._idle[connection] = None

    def set_busy(self, connection: Member) -> None:
        """A request has begun."""
        self._idle.pop(connection, None)

    def set_lingering(self, connection: Member) -> None:
        """It has got its last answer. Does not count any more; of too many the oldest is closed."""
        self._idle.pop(connection, None)
        self._lingering[connection] = None
        if len(self._lingering) > MOST_LINGERING:
            self._drop(next(iter(self._lingering)))

    def close_oldest_idle(self) -> bool:
        """Make room for another connection. False if none is idle."""
        oldest = next(iter(self._idle), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, connection: Member) -> None:
        self.discard(connection)  # at once: its own word that it is gone comes in a later turn of the loop
        connection.drop()

    def count_refusal(self, status: int, request_id: bytes) -> None:
        """An answer that no route has given."""
        self._metrics.requests.labels("unmatched", str(status)).inc()
        if self._request_log is not None:
            self._request_log.refused(status, request_id.decode())

    def start_clock(self) -> None:
        """Hold the deadlines from now on."""
        loop = asyncio.get_running_loop()
        self._clock = loop.call_later(_TICK_S, self._tick, loop, loop.time() + _TICK_S)

    def stop_clock(self) -> None:
        """Hold no deadlines any more."""
        if self._clock is not None:
            self._clock.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        if now_s - due_s < _TICK_S:  # else the loop was held up: what clients sent meanwhile is still to be read
            for connection in [connection for connection in self._open if connection.deadline_s < now_s]:
                connection.expire(now_s)
        self._clock = loop.call_later(_TICK_S, self._tick, loop, now_s + _TICK_S)
