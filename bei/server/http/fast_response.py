"""A request and its answer on a connection: uvicorn's cycle, and short ways for what comes and goes whole.

ASGI's messages and events are a tenth of what Python does for a short text (docs/decisions.md, "The hot route"). A hot
route whose body is there, and whose answer is, needs none. Whoever wraps the ways to receive and send sees all
messages: then there is no ``exchange_of`` them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from bei.server.http.memory_budgets import Body

# Marks of heads as uvicorn writes them.
_CONTINUE = b"HTTP/1.1 100 "
_LENGTH = b"\r\ncontent-length: "


class Exchange(RequestResponseCycle):
    """One request and its answer: uvicorn's RequestResponseCycle, with ``received`` and ``answer``, which do in one
    call what several ASGI messages do. ``account`` counts the body against ``body_memory``."""

    # uvicorn declares asyncio's, of which its cycle calls no other methods than these.
    transport: AnswerTransport  # type: ignore[assignment]

    def __init__(self, account: Body, **of_cycle: Any) -> None:
        super().__init__(**of_cycle)
        self.account = account

    async def run_asgi(self, app: ASGIApp) -> None:  # type: ignore[override]
        """uvicorn's, which logs an error where the application returns in the middle of an answer. Here it has given
        the answer up, for a client that takes too little of it: the connection ends, and that is all."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)
            if self.response_started and not self.response_complete and not self.disconnected:
                self.disconnected = True
                self.transport.close()

        await super().run_asgi(run)  # type: ignore[arg-type]

    async def send(self, message: ASGISendEvent) -> None:
        """uvicorn's. A final answer to a client that still waits for "100 Continue" is the last one of its connection:
        whether the body will follow, nobody can know (RFC 9110, section 10.1.1)."""
        if self.waiting_for_100_continue and self.more_body and message["type"] == "http.response.start":
            self.keep_alive = False
        await super().send(message)

    def received(self, limit: int) -> bytes | None:
        """Take the body, if all of it has arrived, it is at most ``limit`` bytes and nothing failed. A second call
        gives b"". None: read it with ``receive``, which waits for the rest or tells of the failure."""
        if self.more_body or self.disconnected or self.account.error is not None or len(self.body) > limit:
            return None
        self.flow.resume_reading()  # that a client leaves is read
        content = bytes(self.body)
        self.body = bytearray()
        self.message_event.clear()
        return content

    def answer(self, response: Response) -> None:
        """Send ``response``, whose body is whole and whose headers say its length and nothing of the connection."""
        if self.disconnected:
            return
        headers = [*self.default_headers, *response.raw_headers]
        self.transport.write_answer(head(response.status_code, headers, closes=not self.keep_alive), response.body)
        self.response_started = self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def exchange_of(way: Receive | Send) -> Exchange | None:
    """The exchange that this ``receive`` or ``send`` is a method of. None if it is another server's or a wrapper's:
    then ASGI messages must be used."""
    found = getattr(way, "__self__", None)
    return found if isinstance(found, Exchange) else None


def head(status: int, headers: Seq[tuple[bytes, bytes]], *, closes: bool) -> bytes:
    """Status line and headers as bytes. ``closes``: adds ``Connection: close``.

    Raises ValueError for CR or LF in a header (response splitting).
    """
    lines = [*map(b": ".join, headers)]
    if closes:
        lines.append(b"connection: close")
    written = b"\r\n".join(lines)
    if written.count(b"\n") != len(lines) - 1 or written.count(b"\r") != len(lines) - 1:
        raise ValueError("A response header contains CR or LF.")
    return b"".join([STATUS_LINE[status], written, b"\r\n\r\n"])


class Ending(Protocol):
    """The connection of an exchange."""

    def close_after_answer(self) -> None:
        """Close, but let the client take what was written."""


class AnswerTransport:
    """The transport as an exchange sees it: whether to close at once is the connection's decision.

    The head of an answer that says its length goes out with the first of its body: by itself it would be another call
    of the system, and wake the client for nothing.
    """

    __slots__ = ("_connection", "_has_begun", "_head", "_transport")

    def __init__(self, connection: Ending, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._head: bytes | None = None
        self._has_begun = False

    def write(self, data: bytes) -> None:
        """Send ``data``: a head, some of a body, or that the request's body may come."""
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines([head, data])
        elif self._has_begun:
            self._transport.write(data)
        else:
            self._has_begun = not data.startswith(_CONTINUE)
            if self._has_begun and _LENGTH in data:
                self._head = data
            else:
                self._transport.write(data)

    def write_answer(self, head: bytes, body: bytes | memoryview) -> None:
        """Send a whole answer."""
        self._transport.writelines([head, body])

    def end_answer(self) -> None:
        """Note that the answer is complete."""
        self._flush()
        self._has_begun = False

    def _flush(self) -> None:
        """Send a head that has no body."""
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head)

    def is_closing(self) -> bool:
        """True once the connection is being closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """End the connection."""
        self._flush()
        self._connection.close_after_answer()
