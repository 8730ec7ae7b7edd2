"""In how many parts answers go to a connection's transport; whole connections are in tests/e2e."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
import uvicorn
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from bei.config import ServeConfig
from bei.metrics import Metrics
from bei.server.connections import Connections
from bei.server.protocol import Connection


class Transport(asyncio.Transport):
    """Notes what is sent, a string for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data).decode())

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.sent.append(b"".join(list_of_data).decode())

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def answered(app: ASGIApp, *requests: bytes) -> Transport:
    """What ``app`` sends to a client that sends ``requests``, each when the one before it is answered."""
    transport = Transport()

    async def scenario() -> None:
        config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, proxy_headers=False)
        config.load()
        connections = Connections(ServeConfig(), Metrics(), 10)
        connection = Connection(config, ServerState(), connections, asyncio.get_running_loop())
        connection.connection_made(transport)
        for request in requests:
            connection.data_received(request)
            await asyncio.gather(*connection.tasks)
        connection.connection_lost(None)

    asyncio.run(scenario())
    return transport


GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


def test_an_answer_goes_out_at_once_with_its_head() -> None:
    sent = answered(Response("content-length: 9"), GET, GET).sent
    assert [text.partition("\r\n")[0] for text in sent] == ["HTTP/1.1 200 OK"] * 2
    assert all(text.endswith("\r\n\r\ncontent-length: 9") for text in sent)


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


def test_a_client_that_asks_is_told_at_once_to_go_on() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await Response("done")(scope, receive, send)

    asks = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
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
