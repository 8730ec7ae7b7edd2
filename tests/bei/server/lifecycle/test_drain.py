"""How an HTTP server ends: on real sockets, with clients that come in its last moments."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bei.config.settings import ServeConfig
from bei.metrics.registry import Metrics
from bei.server.endpoint.models import Models
from bei.server.http.connections import Connections
from bei.server.http.tls import TLS
from bei.server.lifecycle.drain import DrainingServer, uvicorn_config
from tests.support.engines import DEADLINE_S
from tests.support.tls_certificates import make_authority, make_certificate

GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


async def greet(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before it has read anything."""
    await Response(b"hello")(scope, receive, send)


class Serving:
    """A server that listens, and its clients, which block: the kernel connects them, whatever the event loop does."""

    def __init__(self, tls: TLS | None = None) -> None:
        config = uvicorn_config(greet)
        config.load()
        self.server = DrainingServer(config, [Models([])], Connections(ServeConfig(), Metrics(), 100), tls)
        self.server.lifespan = config.lifespan_class(config)
        self._sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._address = self._sock.getsockname()
        self.clients: list[socket.socket] = []

    async def start(self) -> None:
        await self.server.startup([self._sock])

    def client(self) -> socket.socket:
        """One that is connected, and perhaps not accepted."""
        self.clients.append(socket.create_connection(self._address, timeout=DEADLINE_S))
        return self.clients[-1]

    async def end(self) -> None:
        await self.server.shutdown([self._sock])


@asynccontextmanager
async def serving(tls: TLS | None = None) -> AsyncIterator[Serving]:
    found = Serving(tls)
    await found.start()
    try:
        yield found
    finally:
        for client in found.clients:
            client.close()


async def read_all(client: socket.socket) -> bytes:
    """Until the server closes. Raises ConnectionResetError."""

    def read() -> bytes:
        found = b""
        while part := client.recv(65_536):
            found += part
        return found

    return await asyncio.to_thread(read)


async def read_answer(client: socket.socket) -> bytes:
    def read() -> bytes:
        found = b""
        while not found.endswith(b"hello"):
            part = client.recv(65_536)
            assert part, found
            found += part
        return found

    return await asyncio.to_thread(read)


def check_last(answer: bytes) -> None:
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert answer.endswith(b"hello"), answer
    assert b"\r\nconnection: close\r\n" in answer


def test_who_waits_in_the_sockets_queue_when_the_server_ends_is_answered() -> None:
    async def run() -> None:
        async with serving() as it:
            clients = [it.client() for _ in range(100)]  # more than are accepted at once, and none of them yet
            for client in clients:
                client.sendall(GET)
            answers, _ = await asyncio.gather(asyncio.gather(*map(read_all, clients)), it.end())
            assert len(answers) == 100
            for answer in answers:
                check_last(answer)
            with pytest.raises(ConnectionRefusedError):
                it.client()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_clients_that_have_just_connected_have_a_moment_for_their_request() -> None:
    async def run() -> None:
        async with serving() as it:
            asks, says_half, says_nothing = [it.client() for _ in range(3)]
            reading = asyncio.gather(*map(read_all, (asks, says_half, says_nothing)))
            ending = asyncio.ensure_future(it.end())
            await asyncio.sleep(0.05)
            asks.sendall(GET)
            says_half.sendall(GET[:-2])
            answered, half, nothing = await reading
            check_last(answered)
            assert half.startswith(b"HTTP/1.1 408 ")
            assert nothing == b""
            says_half.close()
            await ending

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_while_it_drains_a_connection_ends_with_its_next_answer() -> None:
    async def run() -> None:
        async with serving() as it:
            client, idle = it.client(), it.client()
            client.sendall(GET)
            idle.sendall(GET)
            assert b"connection: close" not in await read_answer(client)
            await read_answer(idle)
            it.server.begin_drain()
            client.sendall(GET)
            check_last(await read_all(client))
            late = it.client()  # the port is open until the end
            late.sendall(GET)
            check_last(await read_all(late))
            found, _ = await asyncio.gather(read_all(idle), it.end())
            assert found == b""

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_a_client_that_still_sends_when_it_is_answered_takes_its_answer() -> None:
    """Closed at once, it would be reset by its own bytes, and lose what it has not read."""

    async def run() -> None:
        async with serving() as it:
            client = it.client()
            client.sendall(b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 8\r\n\r\nhalf")
            await asyncio.to_thread(select.select, [client], [], [], DEADLINE_S)  # answered, and not read by the client
            ending = asyncio.ensure_future(it.end())
            await asyncio.sleep(0.05)
            client.sendall(b"rest")
            await asyncio.sleep(0.05)
            client.sendall(b"and more")
            answer = await read_all(client)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"hello")
            client.close()
            await ending

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_handshakes_that_are_under_way_have_a_moment(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    pair = make_certificate(tmp_path, "server", authority)
    context = ssl.create_default_context(cafile=str(authority.cert))

    async def run() -> None:
        async with serving(TLS(str(pair.cert), str(pair.key), None, DEADLINE_S)) as it:
            client, silent = it.client(), it.client()
            ending = asyncio.ensure_future(it.end())
            await asyncio.sleep(0.05)
            secret = await asyncio.to_thread(context.wrap_socket, client, server_hostname="127.0.0.1")
            it.clients.append(secret)
            secret.sendall(GET)
            check_last(await read_all(secret))
            assert await read_all(silent) == b""
            await ending

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_an_error_of_one_part_keeps_no_drain_from_waiting_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """The first error ended the drain: front ends were stopped before what they had accepted was answered."""
    drained: list[str] = []

    class Part:
        def __init__(self, error: Exception | None) -> None:
            self._error = error

        def begin_drain(self) -> None: ...

        async def wait_drained(self) -> None:
            if self._error is not None:
                raise self._error
            await asyncio.sleep(0.01)
            drained.append("answered")

    server = DrainingServer(
        uvicorn_config(greet), [Part(KeyError("a bug")), Part(None)], Connections(ServeConfig(), Metrics(), 100), None
    )
    asyncio.run(server.wait_drained())
    assert drained == ["answered"]
    assert "a bug" in caplog.text
