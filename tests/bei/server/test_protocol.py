"""In how many parts answers go to a connection's transport; whole connections are in tests/e2e."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tests.bei.server.connected import GET, answered


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
