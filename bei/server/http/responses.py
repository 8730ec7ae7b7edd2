"""Bodies within their limit, waiting for an answer or for the client to leave, answers that are rendered while they are
sent, and the header about cut inputs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from bei.errors import PayloadTooLargeError
from bei.server.http.compression import content_coding, decoded
from bei.server.http.fast_response import exchange_of
from bei.server.http.memory_budgets import AnswerAccount, Body
from bei.server.scope import SCOPE_BODY, names_of
from bei.utils.threads import off_loop

log = logging.getLogger(__name__)

T = TypeVar("T")

_CODING = b"content-encoding"

TRUNCATED_HEADER = "x-truncated-inputs"
_MOST_RANGES = 100  # about a kilobyte: clients and proxies refuse answers with large headers

# A client has so long to take a piece of a long answer, and one more second for every so many bytes of it: what it does
# not take stays in memory.
_TAKE_S = 30.0
_BYTES_PER_S = 10_000

_DROPPED = 64_000_000  # bytes of an oversized body that are read to be polite


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, decoded. A longer one than ``limit`` is refused at once where its head says so; of others some
    more is read and dropped, so that the client, which is still sending, gets to see the answer. ``limit`` holds for
    what arrives and for what it decodes to.

    Raises EncodingNotSupportedError, PayloadTooLargeError, InvalidRequestError, ClientDisconnect, and what its body was
    given up with: RequestTimeoutError, OverloadedError.
    """
    coding = content_coding(_content_encoding(request.scope["headers"]))
    body: Body | None = request.scope.get(SCOPE_BODY)
    received = await _received(request, body, limit)
    content = await decoded(received, coding, limit)
    if body is not None:
        body.grow(len(content) - len(received))
        _check(body)
    return content


def _check(body: Body) -> None:
    if body.error is not None:
        raise body.error


def whole_body(request: Request, limit: int) -> bytes | None:
    """The body where it is there, within ``limit``, and needs no decoding. None: ``read_body`` says what it is."""
    exchange = exchange_of(request.receive)
    if exchange is None or _CODING in names_of(request.scope["headers"]):
        return None
    return exchange.received(limit)


def _content_encoding(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if name == _CODING:
            return value.decode("latin-1")
    return None


async def _received(request: Request, body: Body | None, limit: int) -> bytes:
    if _announced(request) > limit:
        # Before the first part is asked for: a client that waits for "100 Continue" is not told to send it.
        raise _too_large(limit)
    chunks: list[bytes] = []
    size, is_last = 0, False
    while not is_last and size <= limit + _DROPPED:
        message = await request.receive()
        if body is not None:
            _check(body)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
            if body is not None:
                body.release()
    if size > limit:
        raise _too_large(limit)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body is larger than {limit} bytes: send fewer or shorter inputs.")


def _announced(request: Request) -> int:
    """The length of the body that the head announces; 0: none."""
    length = next((value for name, value in request.scope["headers"] if name == b"content-length"), b"")
    return int(length) if length.isdigit() else 0


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``; cancels it and raises ClientDisconnect when the client leaves before.

    The request's body must have been read: the next message can then only be the disconnect.
    """
    task = asyncio.current_task()
    assert task is not None  # ASGI servers run requests in tasks
    left = False

    def on_left() -> None:
        nonlocal left
        left = True
        task.cancel()

    unwatch = _watched(request, on_left)
    try:
        return await work
    except asyncio.CancelledError:
        if left:
            raise ClientDisconnect from None
        raise
    finally:
        unwatch()


def _watched(request: Request, on_left: Callable[[], None]) -> Callable[[], object]:
    """Call ``on_left`` when the client leaves, or soon if it has left. Returns what ends this."""
    body: Body | None = request.scope.get(SCOPE_BODY)
    if body is None:
        return _watched_by_messages(request, on_left)
    if body.is_lost:
        return asyncio.get_running_loop().call_soon(on_left).cancel
    body.watch(on_left)  # without a task: one for each request shows in profiles
    return body.unwatch


def _watched_by_messages(request: Request, on_left: Callable[[], None]) -> Callable[[], object]:
    """The same, of a server that says it in no other way."""
    watcher = asyncio.ensure_future(_next_message(request))

    def on_message(_: asyncio.Task[Message]) -> None:
        on_left()

    watcher.add_done_callback(on_message)

    def unwatch() -> None:
        watcher.remove_done_callback(on_message)
        watcher.cancel()

    return unwatch


async def _next_message(request: Request) -> Message:
    return await request.receive()


class WholeResponse(Response):
    """200 with a body. Its headers are put together here: Starlette's general way shows in profiles."""

    def __init__(self, body: bytes, headers: Mapping[str, str], media_type: str) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type.encode())]
        if headers:
            self.raw_headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


class StreamedResponse(Response):
    """200 with a body of ``first`` and ``pieces``, each rendered off the event loop when the client has taken those
    before it. Where the ``length`` of all is not known it is sent in HTTP's chunks.

    ``on_end`` is called when the last piece is with the client, or the client has left, takes nothing any more, or
    ``answer`` has to yield to others (ClientDisconnect), or rendering fails. Then the error leaves, and the connection
    is closed without the last chunk: what the client has is no whole body to it.
    """

    def __init__(
        self,
        first: bytes | memoryview,
        pieces: Iterator[bytes | memoryview],
        headers: Mapping[str, str] | None,
        media_type: str,
        on_end: Callable[[], None],
        answer: AnswerAccount,
        length: int | None = None,
    ) -> None:
        super().__init__(None, 200, headers, media_type)
        if length is None:
            del self.headers["content-length"]
        else:
            self.headers["content-length"] = str(length)
        self._first = first
        self._pieces = pieces
        self._on_end = on_end
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_disconnected(Request(scope, receive), self._send_pieces(send))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()

    async def _send_pieces(self, send: Send) -> None:
        piece: bytes | memoryview | None = self._first
        self._first = b""
        while piece is not None:
            # Not asyncio.wait_for: before Python 3.12 it loses the cancellation of who leaves as the socket empties.
            sent = asyncio.ensure_future(send({"type": "http.response.body", "body": piece, "more_body": True}))
            self._answer.waits(sent.cancel)
            try:
                await asyncio.wait([sent], timeout=_TAKE_S + len(piece) / _BYTES_PER_S)  # for the socket
            finally:
                self._answer.goes_on(len(piece))
                sent.cancel()
            if self._answer.error is not None:
                log.info("an answer is ended: %s", self._answer.error)
                raise ClientDisconnect
            if not sent.done():
                raise ClientDisconnect
            sent.result()
            piece = await off_loop(next, self._pieces, None)


def index_ranges(indices: Seq[int]) -> str:
    """Ascending ``indices`` as ``0,4-7,9``; ``,...`` at the end where there are more than a header should hold."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MOST_RANGES]]
    return ",".join(texts + ["..."] * (len(ranges) > _MOST_RANGES))
