"""A connection without a network: what an application sends to a client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from bei.config.settings import ServeConfig
from bei.metrics.registry import Metrics
from bei.server.http.connection import Connection
from bei.server.http.connections import Connections
from tests.support.engines import DEADLINE_S

GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


class Transport(asyncio.Transport):
    """Notes what is sent, a string for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.is_closed = False
        self.is_aborted = False
        self.unsent_bytes = 0  # for the test to set

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data).decode())

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.sent.append(b"".join(list_of_data).decode())

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def connect(app: ASGIApp) -> tuple[Connection, Transport]:
    """A client of ``app``, on the running loop."""
    transport = Transport()
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    connections = Connections(ServeConfig(), Metrics(), 10)
    connection = Connection(config, ServerState(), connections, asyncio.get_running_loop())
    connection.connection_made(transport)
    return connection, transport


async def all_answered(connection: Connection) -> None:
    """Return when no request is under way."""
    while connection.tasks:
        await asyncio.gather(*connection.tasks)


def answered(app: ASGIApp, *requests: bytes) -> Transport:
    """What ``app`` sends to a client that sends ``requests``, each when the one before it is answered."""

    async def scenario() -> Transport:
        connection, transport = connect(app)
        for request in requests:
            connection.data_received(request)
            await all_answered(connection)
        connection.connection_lost(None)
        return transport

    return asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
