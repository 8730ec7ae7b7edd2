"""The short ways of a request whose body is there and whose answer is whole."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from bei.engine.fake import FakeEngine
from bei.server.http.fast_response import exchange_of, head
from bei.server.http.responses import WholeResponse
from tests.bei.server.app import ROUTE
from tests.bei.server.conftest import MakeApp
from tests.bei.server.connected import GET, all_answered, answered, connect
from tests.support.artifacts import LIMITS

LIMIT = 100


def post(body: bytes, version: bytes = b"1.1") -> bytes:
    return b"POST / HTTP/%s\r\nhost: here\r\ncontent-length: %d\r\n\r\n%s" % (version, len(body), body)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """The body comes back, if it is there; else how it came."""
    exchange = exchange_of(send)
    assert exchange is not None
    assert exchange is exchange_of(receive)
    content = exchange.received(LIMIT)
    if content is None:
        content = b"in messages: " + (await receive())["body"]
    exchange.answer(WholeResponse(content, {"x-one": "1"}, "text/plain"))


def test_an_answer_says_what_uvicorn_would_say_and_goes_out_at_once() -> None:
    async def by_messages(scope: Scope, receive: Receive, send: Send) -> None:
        await WholeResponse((await receive())["body"], {"x-one": "1"}, "text/plain")(scope, receive, send)

    for version in (b"1.0", b"1.1"):
        ours, theirs = (answered(app, post(b"text", version)) for app in (echo, by_messages))
        assert ours.sent == theirs.sent
        (sent,) = ours.sent
        assert ("connection: close" in sent) is (version == b"1.0")


def test_one_connection_has_many_exchanges() -> None:
    sent = answered(echo, post(b"one"), post(b"two"), post(b"")).sent
    assert [text.partition("\r\n\r\n")[2] for text in sent] == ["one", "two", ""]


@pytest.mark.parametrize("body", [b"x" * LIMIT, b"x" * (LIMIT + 1)])
def test_a_body_beyond_the_limit_comes_in_messages(body: bytes) -> None:
    (sent,) = answered(echo, post(body)).sent
    assert sent.endswith("\r\n\r\n" + ("in messages: " if len(body) > LIMIT else "") + body.decode())


def test_a_body_is_received_once() -> None:
    async def twice(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(send)
        assert exchange is not None
        first, second = exchange.received(LIMIT), exchange.received(LIMIT)
        await Response(f"{first!r} {second!r}")(scope, receive, send)

    (sent,) = answered(twice, post(b"text")).sent
    assert sent.endswith("b'text' b''")


def test_whoever_wraps_the_ways_sees_all_messages() -> None:
    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def other(message: Message) -> None:
            await send(message)

        assert exchange_of(other) is None
        await Response("done")(scope, receive, send)

    assert answered(wrapped, GET).sent[0].endswith("done")


@given(st.lists(st.tuples(st.binary(), st.binary()), min_size=1))
def test_a_header_never_makes_another_line(headers: list[tuple[bytes, bytes]]) -> None:
    broken = any(mark in part for header in headers for part in header for mark in (b"\r", b"\n"))
    try:
        lines = head(200, headers, closes=False).split(b"\r\n")
    except ValueError:
        assert broken
    else:
        assert lines == [b"HTTP/1.1 200 OK", *(b": ".join(header) for header in headers), b"", b""]
        assert not broken


def test_an_answer_that_is_no_http_costs_its_request_alone() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(send)
        assert exchange is not None
        exchange.answer(WholeResponse(b"", {"x-one": "1\r\nset-cookie: a"}, "text/plain"))

    sent = "".join(answered(app, GET).sent)
    assert sent.startswith("HTTP/1.1 500 ")
    assert "set-cookie" not in sent


@pytest.mark.parametrize("then", ["it goes on", "it leaves"])
def test_an_answer_waits_for_a_client_that_does_not_take_those_before(make_app: MakeApp, then: str) -> None:
    app = make_app(FakeEngine(LIMITS))
    body = b'{"input": "cat"}'
    lines = [b"POST %s HTTP/1.1" % ROUTE.encode(), b"host: here", b"x-request-id: same"]
    request = b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])

    async def scenario() -> None:
        prompt, expected = connect(app.asgi)
        prompt.data_received(request)
        await all_answered(prompt)
        connection, transport = connect(app.asgi)
        connection.pause_writing()
        connection.data_received(request)
        _, waiting = await asyncio.wait(connection.tasks, timeout=0.3)
        assert waiting
        assert transport.sent == []
        if then == "it goes on":
            connection.resume_writing()
        else:
            connection.connection_lost(None)
        await all_answered(connection)
        assert not connection._due
        assert len(expected.sent) == 1
        assert "".join(transport.sent) == ("".join(expected.sent) if then == "it goes on" else "")

    app.run(scenario())
