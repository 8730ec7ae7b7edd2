"""Bodies as they arrive, and clients that leave: the ASGI messages are made by hand."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import pytest
from starlette.requests import ClientDisconnect, Request

from bei.engine.fake import FakeEngine
from bei.server.endpoint.route import Endpoint
from bei.server.http.memory_budgets import Body, BodyMemory
from bei.server.http.responses import unless_disconnected
from bei.server.scope import SCOPE_BODY
from tests.bei.server.app import ROUTE, App
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine, sequences_of

Message = dict[str, Any]


def scope() -> Message:
    """A POST to the embeddings route."""
    return {"type": "http", "method": "POST", "path": ROUTE, "query_string": b"", "headers": [], "root_path": ""}


class Client:
    """One request: the messages the server will receive, and those it sent."""

    def __init__(self, *messages: Message) -> None:
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        for message in messages:
            self._incoming.put_nowait(message)

    def leave(self) -> None:
        """Disconnect."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def send_to(self, app: App, more: Message | None = None) -> None:
        """Run the application for this request, whose scope has ``more``."""

        async def send(message: Any) -> None:
            self.sent.append(message)

        await app.asgi({**scope(), **(more or {})}, self._incoming.get, send)

    @property
    def status(self) -> int:
        """Of the answer."""
        status: int = self.sent[0]["status"]
        return status


def body(content: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": content, "more_body": more}


Scenario = Callable[[], Awaitable[None]]


def test_a_body_in_pieces_is_put_together(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    client = Client(body(b'{"inp', True), body(b"", True), body(b'ut": [5, 6]', True), body(b"}"))
    app.run(client.send_to(app))
    assert client.status == 200


def test_a_client_that_leaves_within_its_body_gets_no_further(make_app: MakeApp) -> None:
    engine = FakeEngine(LIMITS)
    app = make_app(engine)
    client = Client(body(b'{"input": [5]', True))
    client.leave()
    app.run(client.send_to(app))
    assert client.status == 499
    assert engine.batches == []


def test_the_queued_work_of_a_client_that_leaves_is_not_run(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine)

    async def scenario() -> None:
        stays, leaves = Client(body(b'{"input": [1]}')), Client(body(b'{"input": [[50], [51]]}'))
        first = asyncio.ensure_future(stays.send_to(app))
        await app.loop.run_in_executor(None, engine.wait_entered)
        second = asyncio.ensure_future(leaves.send_to(app))
        await asyncio.sleep(0)  # a turn of the loop: it waits for the engine now
        leaves.leave()
        await second
        assert leaves.status == 499
        third = Client(body(b'{"input": [2]}'))
        last = asyncio.ensure_future(third.send_to(app))
        engine.open()
        await asyncio.gather(first, last)
        assert (stays.status, third.status) == (200, 200)

    app.run(scenario())
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[2]]]
    assert 'status="499"' in app.get("/metrics").text


@pytest.mark.parametrize("leaves_before", [False, True])
def test_a_connection_that_says_when_its_client_leaves_is_not_asked(leaves_before: bool) -> None:
    body = Body(BodyMemory(100))

    async def receive() -> Message:
        raise AssertionError("it says so itself")

    async def scenario() -> None:
        waiting = asyncio.get_running_loop().create_future()
        request = Request({**scope(), SCOPE_BODY: body}, receive)
        if leaves_before:
            body.lose()
        else:
            asyncio.get_running_loop().call_soon(body.lose)
        with pytest.raises(ClientDisconnect):
            await unless_disconnected(request, waiting)
        assert waiting.cancelled()

    asyncio.run(scenario())


def test_a_client_that_leaves_after_its_answer_cancels_nothing() -> None:
    body = Body(BodyMemory(100))

    async def scenario() -> int:
        request = Request({**scope(), SCOPE_BODY: body})
        answer = await unless_disconnected(request, asyncio.sleep(0, 200))
        body.lose()
        await asyncio.sleep(0)
        return answer

    assert asyncio.run(scenario()) == 200


def test_a_request_that_the_stopping_server_gives_up_gets_503(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))

    async def scenario() -> int:
        client = Client(body(b'{"inp', True))
        request = asyncio.ensure_future(client.send_to(app))
        await asyncio.sleep(0)  # a turn of the loop: it waits for the rest of the body
        request.cancel()
        await request
        return client.status

    assert app.run(scenario()) == 503


def encoded(content: bytes, memory: BodyMemory) -> tuple[Client, Message]:
    """A request with a compressed body that has arrived, and its scope."""
    content = gzip.compress(content)
    account = Body(memory)
    account.add(len(content))
    account.complete = True
    return Client(body(content)), {"headers": [(b"content-encoding", b"gzip")], SCOPE_BODY: account}


def test_a_compressed_body_counts_as_what_it_decodes_to_until_it_is_admitted(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine)
    content = b'{"input": [5]' + b" " * 986 + b"}"
    memory = BodyMemory(1500)
    held: list[int] = []
    read = Endpoint._read

    async def noting(self: Endpoint, parse: Any, body: bytes, *, in_part: bool) -> Any:
        held.append(memory.held)
        return await read(self, parse, body, in_part=in_part)

    async def scenario() -> None:
        client, more = encoded(content, memory)
        first = asyncio.ensure_future(client.send_to(app, more))
        await app.loop.run_in_executor(None, engine.wait_entered)
        assert (held, memory.held) == ([1000], 0)
        memory.held += 1000  # another one, which waits for its thread
        late, more = encoded(content, memory)
        await late.send_to(app, more)
        assert (late.status, memory.held, len(held)) == (429, 1000, 1)
        engine.open()
        await first
        assert client.status == 200

    with mock.patch.object(Endpoint, "_read", noting):
        app.run(scenario())


@pytest.mark.parametrize("size", [10, 11])
def test_the_limit_counts_the_bytes_of_the_body(make_app: MakeApp, size: int) -> None:
    app = make_app(FakeEngine(LIMITS), payload_limit=10)
    client = Client(body(b" " * 5, True), body(b" " * (size - 5)))
    app.run(client.send_to(app))
    assert client.status == (400 if size <= 10 else 413)
