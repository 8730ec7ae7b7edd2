"""Asks the ASGI application from within its process, without a socket: what a client would get, routes and errors."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import NamedTuple
from urllib.parse import unquote

import orjson
from starlette.types import ASGIApp, Message, Scope

from bei.errors import BeiError, NotAcceptableError, OverloadedError
from bei.server.auth.keys import Key
from bei.server.auth.priority import OF_A_BATCH
from bei.server.http.accept import OCTETS
from bei.server.http.errors import JSON, UNEXPECTED, own_form, status_of
from bei.server.http.request_id import HEADER as REQUEST_ID
from bei.server.scope import SCOPE_API_KEY, SCOPE_CONNECTION, SCOPE_URGENCY

log = logging.getLogger(__name__)

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_LEAST_RETRY_S = 0.1


class LineAnswer(NamedTuple):
    """``body``: JSON in one line. ``retry_after_s`` 0: it does not ask for a retry."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0


class BatchClient(NamedTuple):
    """Who asks. ``key``: None where the server asks for none. ``flow``: as of a connection."""

    flow: int
    key: Key | None = None


async def post(app: ASGIApp, url: str, body: bytes, client: BatchClient) -> LineAnswer:
    """The answer of ``app`` to a bulk request."""
    exchange = _Exchange(body)
    try:
        await app(_scope(url, body, client), exchange.receive, exchange.send)
    except Exception:  # a border: a bug costs its own line the answer
        log.exception("unexpected error on %s", url)
        return _failed()
    return exchange.answer()


def _scope(url: str, body: bytes, client: BatchClient) -> Scope:
    path, _, query = url.partition("?")
    scope: Scope = {
        "type": "http",
        "asgi": _ASGI,
        "http_version": "1.1",
        "server": None,
        "client": None,
        "scheme": "http",
        "method": "POST",
        "root_path": "",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [
            (b"content-type", JSON.encode()),
            (b"content-length", b"%d" % len(body)),
        ],
        SCOPE_CONNECTION: client.flow,
        SCOPE_URGENCY: OF_A_BATCH,
    }
    if client.key is not None:
        scope[SCOPE_API_KEY] = client.key
    return scope


class _Exchange:
    """One request and its answer, as ASGI's messages."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._is_complete = False

    async def receive(self) -> Message:
        """The body, once. Then nothing comes any more: this client does not leave."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Keep a part of the answer."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
        else:
            self._pieces.append(bytes(message.get("body", b"")))
            self._is_complete = not message.get("more_body", False)

    def answer(self) -> LineAnswer:
        """What was sent."""
        if not self._is_complete:  # it had to yield to others, as of a client that takes its answer slowly
            return _failed(OverloadedError("The answer was ended: retry.", 1.0))
        if self._status < 400 and self._headers.get(b"content-type", b"").startswith(OCTETS.encode()):
            return _failed(
                NotAcceptableError(
                    "A line of a batch holds JSON, and this answer is bytes: ask for numbers or base64.", "body"
                )
            )
        # By this header: dialects give such errors statuses of their own.
        retry_ms = self._headers.get(b"retry-after-ms")
        return LineAnswer(
            self._status,
            self._headers.get(REQUEST_ID, b"").decode("latin-1"),
            _in_one_line(b"".join(self._pieces), self._headers.get(b"content-type", b"")),
            0.0 if retry_ms is None else max(_number(retry_ms) / 1000, _LEAST_RETRY_S),
        )


def _failed(error: BeiError = UNEXPECTED) -> LineAnswer:
    status, body = own_form(error, status_of(error), "")
    retry_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
    return LineAnswer(status, "", orjson.dumps(body), retry_s)


def _number(text: bytes | None) -> float:
    try:
        number = float(text or 0)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _in_one_line(body: bytes, media_type: bytes) -> bytes:
    """``body`` as JSON without a line's end: another media type's as a string."""
    if not body:
        return b"null"
    if not media_type.startswith(JSON.encode()):
        return orjson.dumps(body.decode("utf-8", "replace"))
    return orjson.dumps(orjson.loads(body)) if b"\n" in body else body
