"""How many connections the process has descriptors for, and a listener that runs out of them."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import uvloop

from bei.config.settings import ServeConfig
from bei.errors import ConfigError
from bei.metrics.registry import Metrics
from bei.multiprocess.shared_memory import limits as shared_limits
from bei.multiprocess.shared_memory.limits import SharedLimits
from bei.server.http import listener as module
from bei.server.http.connections import Connections, fitting_connections
from bei.server.http.listener import Listener
from bei.server.http.tls import TLS
from tests.bei.multiprocess.pages import pages
from tests.bei.server.http.test_connections import Member
from tests.support.engines import DEADLINE_S
from tests.support.tls_certificates import make_authority, make_certificate


def limited_to(monkeypatch: pytest.MonkeyPatch, limit: int, num_open: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * num_open)


def test_connections_are_as_many_as_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limited_to(monkeypatch, 1000, 100)
    room = fitting_connections(10_000)
    assert 700 < room < 900
    assert f"from 10000 to {room}" in caplog.text
    caplog.clear()
    assert fitting_connections(room) == room
    assert not caplog.text
    limited_to(monkeypatch, resource.RLIM_INFINITY, 100)
    assert fitting_connections(10_000) == 10_000


def test_a_process_without_descriptors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    limited_to(monkeypatch, 100, 50)
    with pytest.raises(ConfigError, match="limit of 100 open files leaves none"):
        fitting_connections(10)


class Accepted(asyncio.Protocol):
    """The server's end of connections, which the test closes: one that is left open is a warning in another test."""

    def __init__(self, on_made: Callable[[], object]) -> None:
        self._on_made = on_made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._on_made()
        transport.close()


class Socket:
    """A listening socket of which ``accept`` does what the test says, each time another thing."""

    def __init__(self, real: socket.socket, *steps: Callable[[], object]) -> None:
        self._real = real
        self._steps = list(steps)

    def fileno(self) -> int:
        return self._real.fileno()

    def setblocking(self, flag: bool) -> None:
        self._real.setblocking(flag)

    def accept(self) -> tuple[socket.socket, object]:
        if self._steps:
            self._steps.pop(0)()
        return self._real.accept()


def fails(number: int) -> Callable[[], object]:
    def fail() -> None:
        raise OSError(number, "no")

    return fail


@pytest.mark.parametrize(("number", "makes_room"), [(errno.EMFILE, 1), (errno.ECONNABORTED, 0)])
def test_a_listener_outlives_what_accept_raises(number: int, makes_room: int) -> None:
    """Out of descriptors it makes room and tries again; of a client that has left it takes no notice."""
    room: list[int] = []

    class Greeting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hello")
            transport.close()

    async def run() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as real:
            listener = Listener(Socket(real, fails(number)), Greeting, lambda: room.append(1))  # type: ignore[arg-type]
            reader, writer = await asyncio.open_connection(*real.getsockname())
            found = await reader.read()
            writer.close()
            listener.close()
            await listener.wait_closed()
            return found

    assert asyncio.run(asyncio.wait_for(run(), DEADLINE_S)) == b"hello"
    assert len(room) == makes_room


def test_of_too_many_unfinished_handshakes_the_oldest_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MOST_HANDSHAKES", 3)
    monkeypatch.setattr(module, "_LAST_HANDSHAKES_S", 0.0)
    authority = make_authority(tmp_path)
    pair = make_certificate(tmp_path, "server", authority)
    tls = TLS(str(pair.cert), str(pair.key), None, DEADLINE_S)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as real:
            listener = Listener(real, asyncio.Protocol, lambda: None, tls)
            idle = [await asyncio.open_connection(*real.getsockname()) for _ in range(4)]
            assert await idle[0][0].read() == b""  # closed; an honest client is faster
            reader, writer = await asyncio.open_connection(
                *real.getsockname(), ssl=ssl.create_default_context(cafile=str(authority.cert))
            )
            listener.close()
            await listener.wait_closed()  # at once, though handshakes are under way
            assert [await one.read() for one, _ in idle[1:]] == [b""] * 3
            for _, one in (*idle, (reader, writer)):
                one.close()

    loop = uvloop.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(run(), DEADLINE_S))
    loop.close()


def test_descriptors_are_kept_for_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    limited_to(monkeypatch, 1000, 100)
    assert fitting_connections(10_000, 200) == fitting_connections(10_000) - 200


class Gate:
    """Leaves connections to others while it is closed, and notes what it is told."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_asked = self.num_coming = self.most_coming = self.num_listening = 0

    def is_left_to_others(self) -> bool:
        self.num_asked += 1
        return self.is_closed

    def coming(self, change: int) -> None:
        self.num_coming += change
        self.most_coming = max(self.most_coming, self.num_coming)

    def listening(self, change: int) -> None:
        self.num_listening += change


def test_what_is_left_to_others_is_accepted_after_all_if_none_of_them_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAVE_S", 0.05)
    gate = Gate()
    gate.is_closed = True

    async def run() -> float:
        with socket.create_server(("127.0.0.1", 0)) as real:
            loop, made = asyncio.get_running_loop(), asyncio.Event()
            listener = Listener(real, partial(Accepted, made.set), lambda: None, None, gate)
            assert gate.num_listening == 1
            began_s = loop.time()
            _, writer = await asyncio.open_connection(*real.getsockname())
            await made.wait()
            seconds = loop.time() - began_s
            await listener.wait_closed()
            listener.close()
            writer.close()
            return seconds

    assert asyncio.run(asyncio.wait_for(run(), DEADLINE_S)) >= 0.05
    assert (gate.most_coming, gate.num_coming, gate.num_listening) == (1, 0, 0)
    assert gate.num_asked >= 1


def test_two_listeners_on_one_socket_share_its_connections_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither gives up waiting for the other, nor takes it to be dead, which a pause of the machine would make it do.
    monkeypatch.setattr(module, "_LEAVE_S", DEADLINE_S)
    monkeypatch.setattr(shared_limits, "_ALIVE_NS", 3600 * 10**9)

    async def run() -> list[int]:
        made = [0, 0]
        with pages(2) as (_, *fronts), socket.create_server(("127.0.0.1", 0), backlog=64) as real:
            listeners = []
            for index, page in enumerate(fronts):
                limits = SharedLimits(page)
                connections = Connections(ServeConfig(), Metrics(), 100, None, limits.front_ends, limits.bodies)

                def count(index: int = index, connections: Connections = connections) -> None:
                    made[index] += 1
                    connections.add(Member())

                protocol = partial(Accepted, count)
                listeners.append(Listener(real.dup(), protocol, lambda: None, None, connections))
            writers = []
            for number in range(1, 21):
                writers.append((await asyncio.open_connection(*real.getsockname()))[1])
                while sum(made) < number:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                for listener in listeners:  # of those that come together some are counted twice for a moment
                    await listener.wait_closed()
            for listener in listeners:
                listener.close()
                listener._listener.close()
            for writer in writers:
                writer.close()
        return made

    first, second = asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert abs(first - second) <= 1
