"""Heads of requests that RFC 9112 has refused, and those that it has not; on a connection."""

from __future__ import annotations

import json

import pytest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tests.bei.server.connected import GET, answered

CHUNKED = b"POST / HTTP/%s\r\nhost: here\r\n%s\r\n\r\n2\r\n{}\r\n0\r\n\r\n"

HOSTS = [b"here", b"HERE:80", b"", b" ", b"127.0.0.1:8080", b"[::1]", b"[::1]:80", b"a_b-c.d~e", b"%C3%A9.fr", b"a:"]
NO_HOSTS = [b"a b", b"a, b", b"a/b", b"http://a", b"user@a", b"a:b", b"a:1:2", b"::1", b"[::1", b"\xc3\xa9", b"a\tb"]


def status(request: bytes) -> int:
    sent = "".join(answered(Response("here"), request).sent)
    return int(sent.split()[1])


@pytest.mark.parametrize("host", HOSTS)
def test_one_host_is_what_http_1_1_asks_for(host: bytes) -> None:
    assert status(b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host) == 200


@pytest.mark.parametrize("host", NO_HOSTS)
def test_a_host_that_is_none_is_refused(host: bytes) -> None:
    assert status(b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host) == 400


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1",
        b"GET http://here/ HTTP/1.1",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\nhost: a",
        b"GET / HTTP/1.0\r\nHost: a\r\nHost: b",
        b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c",
        b"CONNECT here:443 HTTP/1.1",
    ],
    ids=["none", "none, in the target", "two", "twice the same", "two, HTTP/1.0", "none, upgrade", "none, CONNECT"],
)
def test_a_request_with_no_host_or_two_is_refused_in_our_form_and_ends_the_connection(head: bytes) -> None:
    sent = "".join(answered(Response("here"), head + b"\r\n\r\n").sent)
    start, _, body = sent.partition("\r\n\r\n")
    assert start.startswith("HTTP/1.1 400")
    assert "connection: close" in start
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert "Host" in json.loads(body)["error"]["message"]


def test_http_1_0_needs_no_host() -> None:
    assert status(b"GET / HTTP/1.0\r\n\r\n") == 200


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"chunked "])
def test_chunks_are_a_transfer_coding(coding: bytes) -> None:
    assert status(CHUNKED % (b"1.1", b"transfer-encoding: %s" % coding)) == 200


@pytest.mark.parametrize(
    "lines",
    [
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: gzip\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked, chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding: identity",
        b"transfer-encoding: xchunked",
        b"transfer-encoding: ",
    ],
)
def test_no_other_transfer_coding_is_taken_for_chunks(lines: bytes) -> None:
    assert status(CHUNKED % (b"1.1", lines)) == 400


def test_http_1_0_has_no_transfer_codings() -> None:
    assert status(CHUNKED % (b"1.0", b"transfer-encoding: chunked")) == 400


def read(*lines: bytes) -> dict[str, str]:
    """The headers that an application gets, or the error of the head."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse([(name.decode(), value.decode()) for name, value in scope["headers"]])(scope, receive, send)

    request = b"\r\n".join((b"POST / HTTP/1.1", b"Host: here", *lines, b"Content-Length: 0", b"", b""))
    content = json.loads("".join(answered(app, request).sent).partition("\r\n\r\n")[2])
    found: dict[str, str] = content["error"] if isinstance(content, dict) else dict(content)
    assert isinstance(content, dict) or len(content) == len(found)
    return found


@pytest.mark.parametrize("name", ["accept", "accept-encoding", "content-encoding"])
def test_lines_of_a_list_are_one_list(name: str) -> None:
    lines = [f"{name.title()}: {value}".encode() for value in ("a", "b;q=0.1,c", "", " d ")]
    assert read(*lines, b"X: y")[name] == "a, b;q=0.1,c, d"


@pytest.mark.parametrize(
    "name", ["content-type", "x-bei-lane", "x-bei-dialect", "x-bei-report", "inference-header-content-length"]
)
def test_two_values_of_what_has_one_are_refused_by_name(name: str) -> None:
    same, other = f"{name.title()}: a".encode(), f"{name}: b".encode()
    error = read(same, b"X: y", other)
    assert (error["code"], error["param"]) == ("invalid_request", name)
    assert f"The header {name} has several values: send one." in error["message"]
    assert read(same, b"X: y", same)[name] == "a"


def test_a_request_before_a_refused_one_gets_its_answer_first() -> None:
    sent = "".join(answered(Response("here"), GET + b"GET / HTTP/1.1\r\n\r\n").sent)
    assert sent.startswith("HTTP/1.1 200")
    assert sent.endswith("here")
