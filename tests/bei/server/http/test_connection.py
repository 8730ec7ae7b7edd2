"""In how many parts answers go to a connection's transport; whole connections are in tests/e2e."""

from __future__ import annotations

import asyncio
import gc
import gzip
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from bei.errors import BeiError, OverloadedError
from bei.server.http.errors import error_response
from bei.server.http.responses import read_body
from bei.server.scope import SCOPE_CONNECTION
from tests.bei.server.connected import GET, Transport, all_answered, answered, connect
from tests.support.engines import DEADLINE_S

POST = b"POST / HTTP/1.1\r\nhost: here\r\n"


def test_an_answer_goes_out_at_once_with_its_head() -> None:
    sent = answered(Response("content-length: 9"), GET, GET).sent
    assert [text.partition("\r\n")[0] for text in sent] == ["HTTP/1.1 200 OK"] * 2
    assert all(text.endswith("\r\n\r\ncontent-length: 9") for text in sent)


@pytest.mark.parametrize("blank", [b"\r\n", b"\n\r\n"])
def test_empty_lines_between_requests_are_passed_over(blank: bytes) -> None:
    """As RFC 9112 asks, section 2.2."""
    sent = answered(Response("here"), GET, blank, GET + blank, GET).sent
    assert [text[-4:] for text in sent] == ["here"] * 3


@pytest.mark.parametrize(
    ("request_", "response"),
    [(GET.replace(b"GET", b"HEAD"), Response("body")), (GET, Response(status_code=204)), (GET, Response(""))],
    ids=["HEAD", "204", "empty"],
)
def test_a_head_without_a_body_goes_out(request_: bytes, response: Response) -> None:
    texts = "".join(answered(response, request_, request_).sent).split("HTTP/1.1 ")[1:]
    assert len(texts) == 2
    assert all(text.endswith("\r\n\r\n") for text in texts)


def test_the_head_of_an_answer_in_pieces_waits_for_none_of_them() -> None:
    async def pieces() -> AsyncIterator[str]:
        yield "\r\ncontent-length: "
        yield "end"

    sent = answered(StreamingResponse(pieces()), GET).sent
    assert sent[0].endswith("\r\n\r\n")
    assert "".join(sent[1:]).endswith("3\r\nend\r\n0\r\n\r\n")
    assert len(sent) == 4


@pytest.mark.parametrize("asking", [b"100-continue", b"100-Continue"])
def test_a_client_that_asks_is_told_at_once_to_go_on(asking: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await Response("done")(scope, receive, send)

    asks = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\nexpect: %s\r\n\r\n" % asking
    sent = answered(app, asks + b"{}").sent
    assert sent[0] == "HTTP/1.1 100 Continue\r\n\r\n"
    assert sent[1].endswith("done")
    assert len(sent) == 2


def test_a_head_whose_body_does_not_come_goes_out_before_the_connection_ends() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        raise RuntimeError("a bug")

    transport = answered(app, GET)
    assert "content-length: 4" in "".join(transport.sent)
    assert transport.is_closed


LATE_S = 1e9


def test_headers_that_the_server_itself_does_not_read_are_not_late() -> None:
    """Reading pauses while a pipelined request waits for the answer before it."""
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await done.wait()
        await Response("done")(scope, receive, send)

    async def scenario() -> list[str]:
        connection, transport = connect(app)
        connection.data_received(GET + GET + GET[:-10])
        connection.expire(LATE_S)
        assert connection.deadline_s > LATE_S
        done.set()
        await all_answered(connection)
        connection.data_received(GET[-10:])
        await all_answered(connection)
        return transport.sent

    sent = asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    assert [text[:12] for text in sent] == ["HTTP/1.1 200"] * 3


def test_headers_that_the_client_does_not_send_are_late() -> None:
    async def scenario() -> list[str]:
        connection, transport = connect(Response("done"))
        connection.data_received(GET[:-10])
        connection.expire(LATE_S)
        return transport.sent

    (sent,) = asyncio.run(scenario())
    assert sent.startswith("HTTP/1.1 408")


@pytest.mark.parametrize("error", [None, RuntimeError("a bug")], ids=["given up", "a bug"])
def test_an_answer_that_is_given_up_ends_the_connection_and_only_a_bug_is_logged(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def begins(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if error is not None:
            raise error

    transport = answered(begins, GET)
    assert transport.is_closed
    assert "".join(transport.sent).endswith("half\r\n")  # without the last chunk
    assert bool(caplog.records) is (error is not None), caplog.text


@pytest.mark.parametrize("behind", [GET[:-10], POST + b"content-length: 9\r\n\r\n{"], ids=["head", "body"])
@pytest.mark.parametrize(("unsent", "is_cut_off"), [([9, 8, 7], False), ([9, 9], True), ([9, 8, 8], True)])
def test_who_is_not_read_is_cut_off_if_it_does_not_take_its_answers(
    behind: bytes, unsent: list[int], is_cut_off: bool
) -> None:
    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def scenario() -> list[bool]:
        connection, transport = connect(waits)
        connection.data_received(GET + GET + behind)
        connection.pause_writing()
        aborted = []
        for transport.unsent_bytes in unsent:
            connection.expire(LATE_S)
            aborted.append(transport.is_aborted)
        for task in connection.tasks:
            task.cancel()
        return aborted

    *before, last = asyncio.run(scenario())
    assert not any(before)
    assert last is is_cut_off


def test_requests_of_a_connection_have_its_number_and_those_of_another_one_another() -> None:
    found: list[int] = []

    async def notes(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope[SCOPE_CONNECTION])
        await Response()(scope, receive, send)

    async def scenario() -> None:
        for _ in range(2):  # as of two processes: each has connections of its own
            connection, _ = connect(notes)
            for _ in range(2):
                connection.data_received(GET)
                await all_answered(connection)

    asyncio.run(scenario())
    first, same, second, as_well = found
    assert first == same != second == as_well
    assert all(0 < number < 2**63 for number in found)


async def reads(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that takes bodies of 100 bytes."""
    try:
        await read_body(Request(scope, receive), 100)
    except BeiError as error:
        await error_response(error)(scope, receive, send)
    else:
        await Response("read")(scope, receive, send)


def test_a_body_that_decodes_to_too_much_for_the_memory_costs_its_request_alone() -> None:
    body = gzip.compress(b" " * 100)
    request = POST + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async def scenario() -> list[str]:
        connection, transport = connect(reads)
        memory = connection._connections.bodies
        for others in (memory.limit - 99, 0):
            memory.held = others
            connection.data_received(request)
            await all_answered(connection)
            assert memory.held == others
        return transport.sent

    refused, answer = asyncio.run(scenario())
    assert refused.startswith("HTTP/1.1 429")
    assert "connection: close" not in refused
    assert answer.endswith("read")


@pytest.mark.parametrize("wrong", ["it stalls", "a bad chunk"])
def test_a_body_that_fails_after_it_was_found_too_large_is_answered_and_the_connection_ends(wrong: str) -> None:
    async def scenario() -> Transport:
        connection, transport = connect(reads)
        connection.data_received(POST + b"transfer-encoding: chunked\r\n\r\nc8\r\n" + b" " * 200 + b"\r\n")
        for _ in range(3):  # turns of the loop: the application drops what it has read
            await asyncio.sleep(0)
        if wrong == "a bad chunk":
            connection.data_received(b"not hex\r\n")
        else:
            connection.expire(LATE_S)
        await all_answered(connection)
        assert not connection._due
        return transport

    transport = asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    (sent,) = transport.sent
    assert sent.startswith("HTTP/1.1 400" if wrong == "a bad chunk" else "HTTP/1.1 408")
    assert "connection: close" in sent


@pytest.mark.parametrize("ends", ["it is slow", "it stalls", "a bad chunk", "it leaves"])
def test_a_body_that_has_failed_is_freed_with_its_answer(ends: str) -> None:
    """Not by the garbage collector, which comes by rarely: an error that is kept keeps all frames that it went through,
    and what they hold."""

    class Held:
        pass

    held: list[weakref.ref[Held]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        there = Held()
        held.append(weakref.ref(there))
        with suppress(ClientDisconnect):
            try:
                await read_body(Request(scope, receive), 100)
            except BeiError as error:
                await error_response(error)(scope, receive, send)

    async def scenario() -> None:
        connection, _ = connect(app)
        connection.data_received(POST + b"transfer-encoding: chunked\r\n\r\n32\r\n" + b" " * 50 + b"\r\n")
        await asyncio.sleep(0)
        if ends == "it is slow":
            assert connection._body is not None
            connection._body.fail(OverloadedError("others are faster", 1.0))
        elif ends == "it stalls":
            connection.expire(LATE_S)
        elif ends == "a bad chunk":
            connection.data_received(b"not hex\r\n")
        else:
            connection.connection_lost(None)
        await all_answered(connection)

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
        assert [there() for there in held] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("ends", ["others hold the memory", "a bad chunk", "too many headers"])
def test_the_bytes_that_end_a_connection_are_freed_before_it_is_closed(ends: str) -> None:
    """It is read for a while after its answer."""
    freed: list[int] = []

    class Data(bytes):
        def __del__(self) -> None:
            freed.append(len(self))

    data = {
        "others hold the memory": POST + b"content-length: 100\r\n\r\n" + b" " * 50,
        "a bad chunk": POST + b"transfer-encoding: chunked\r\n\r\nnot hex\r\n",
        "too many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
    }[ends]

    async def scenario() -> str:
        connection, transport = connect(reads)
        connection._connections.bodies.held = connection._connections.bodies.limit
        connection.data_received(Data(data))
        await all_answered(connection)
        assert freed == [len(data)]
        return "".join(transport.sent)

    gc.disable()
    try:
        sent = asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    finally:
        gc.enable()
    assert "connection: close" in sent


@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"], ids=["", "100-continue"])
def test_a_length_above_the_limit_is_refused_before_the_body(expect: bytes) -> None:
    head = POST + b"content-length: 101\r\n" + expect + b"\r\n"
    (sent,) = answered(reads, head).sent
    assert sent.startswith("HTTP/1.1 413 ")
    assert ("connection: close" in sent) is bool(expect)


def test_without_an_expectation_the_next_request_is_read_behind_a_body_that_was_refused() -> None:
    async def scenario() -> list[str]:
        connection, transport = connect(reads)
        for part in (POST + b"content-length: 101\r\n\r\n", b"x" * 101 + POST + b"content-length: 2\r\n\r\n{}"):
            connection.data_received(part)
            await all_answered(connection)
        return transport.sent

    sent = asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    assert [text[:12] for text in sent] == ["HTTP/1.1 413", "HTTP/1.1 200"]


def test_a_final_answer_to_an_unmet_expectation_closes_the_connection() -> None:
    """Whether the body comes nobody can know: what follows would be read as the next request, or as the body."""
    head = POST + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n"
    transport = answered(Response("early", 401), head)
    (sent,) = transport.sent
    assert "connection: close" in sent
    assert transport.is_closed
    assert "connection: close" not in answered(reads, head + b"{}").sent[-1]
    whole = POST + b"content-length: 0\r\nexpect: 100-continue\r\n\r\n"
    assert "connection: close" not in "".join(answered(Response("early", 401), whole).sent)


@pytest.mark.parametrize("rest", [b"", b"SM\r\n\r\n", b"SM\r\n\r\n\0\0\0\4\0\0\0\0\0"])
def test_http_2_is_told_which_version_there_is(rest: bytes) -> None:
    """RFC 9113, sections 3.4, 6.8 and 7: SETTINGS, as the first frame must be, and GOAWAY with HTTP_1_1_REQUIRED."""

    async def scenario() -> Transport:
        connection, transport = connect(reads)
        connection.data_received(b"PRI * HTTP/2.0\r\n\r\n" + rest)
        connection.data_received(b"\0\0\0\4\1\0\0\0\0")
        return transport

    transport = asyncio.run(scenario())
    (sent,) = [text.encode() for text in transport.sent]
    settings, goaway = sent[:9], sent[9:]
    assert settings == b"\0\0\0\4\0\0\0\0\0"
    assert goaway[3:17] == b"\7\0" + b"\0" * 4 + b"\0" * 4 + b"\0\0\0\x0d"
    assert int.from_bytes(goaway[:3], "big") == len(goaway) - 9
    assert b"HTTP/1.1" in goaway


def test_a_request_with_the_method_of_http_2_s_preface_is_no_preface() -> None:
    async def scenario() -> list[str]:
        connection, transport = connect(reads)
        connection.data_received(b"PRI * HTTP/1.1\r\nhost: here\r\n\r\n")
        await all_answered(connection)
        return transport.sent

    (sent,) = asyncio.run(scenario())
    assert sent.startswith("HTTP/1.1 400 ")
