"""The HTTP server of a process: its listeners and connections, and the drain, in which what is accepted is answered."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from bei.server.http.connection import Connection
from bei.server.http.connections import Connections
from bei.server.http.listener import Listener
from bei.server.http.tls import TLS

log = logging.getLogger(__name__)

# When everything accepted is answered, clients have this long to take the answers; one that never ends its own
# request does not keep the process.
LINGER_S = 10


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """uvicorn's settings for ``app``."""
    return uvicorn.Config(
        app,
        http=Connection,  # made by the server below; named here so that no other implementation is loaded
        ws="none",  # a request to upgrade is answered as if it had not asked
        lifespan="off",
        log_config=None,
        access_log=False,  # bei.server.telemetry.access_log has a better one
        timeout_graceful_shutdown=LINGER_S,
        proxy_headers=False,  # nothing here reads the client's address
        server_header=False,
    )


def _nothing() -> None:
    """No-op."""


class Drains(Protocol):
    """What takes on work, and can stop to."""

    def begin_drain(self) -> None:
        """Take on no more."""

    async def wait_drained(self) -> None:
        """Return when nothing is under way."""


async def wait_all_drained(workers: Seq[Drains]) -> None:
    """Return when nothing is under way in any of ``workers``. An error of one is logged, and keeps no other from it."""
    for error in await asyncio.gather(*(worker.wait_drained() for worker in workers), return_exceptions=True):
        if error is not None:  # a border: what the others have accepted is still to be answered
            log.error("a part of the server has not drained", exc_info=error)


class DrainingServer(uvicorn.Server):
    """Accepts and answers until ``stop``. ``begin_drain`` refuses new requests with 503; what is accepted is answered.
    Connections end with the answers to requests that come while it drains, so that clients go elsewhere.

    ``workers`` stop in their order. ``on_started`` is called when it accepts connections, ``take_signals`` when signals
    can be taken over.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        workers: Seq[Drains],
        connections: Connections,
        tls: TLS | None,
        on_started: Callable[[], None] = _nothing,
        take_signals: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(config)
        self._workers = workers
        self._connections = connections
        self._tls = tls
        self._on_started = on_started
        self._take_signals = take_signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start our own listeners and connections in place of uvicorn's."""
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(self.config, self.server_state, self._connections, loop)

        def listener(sock: socket.socket) -> Listener:
            tls = None if sock.family == socket.AF_UNIX else self._tls
            return Listener(sock, connection, self._connections.close_oldest_idle, tls, self._connections)

        self.servers = [listener(sock) for sock in sockets or []]  # type: ignore[misc]
        self._connections.start_clock()
        self._on_started()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is under way, and who has connected already; clients have a while to take it."""
        self._connections.end()
        listeners, self.servers = self.servers, []
        for listener in listeners:
            listener.close()
        for sock in sockets or []:
            sock.close()
        for listener in listeners:
            await listener.wait_closed()
        await super().shutdown()
        self._connections.stop_clock()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not uvicorn's handlers: they stop listening at once, and end the process by the signal instead of exit 0."""
        self._take_signals()
        yield

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        for worker in self._workers:
            worker.begin_drain()
        self._connections.begin_drain()

    async def wait_drained(self) -> None:
        """Return when everything accepted is answered."""
        await wait_all_drained(self._workers)

    def stop(self) -> None:
        """Accept nothing more, and end when clients have their answers, or have had time to take them."""
        self.should_exit = True
