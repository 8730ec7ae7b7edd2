"""The request id: the client's X-Request-Id, else a new one. Every answer has it, and so has the log."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bei.server.scope import SCOPE_RECORD, SCOPE_REQUEST_ID, names_of

HEADER = b"x-request-id"

# UUIDs, ULIDs, base64 and the ids of gateways; nothing that means something to a terminal, a log or a header.
_VALID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")


class RequestIds:
    """Middleware: leaves the id in the scope, as text, and among the headers of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        request_id = request_id_of(scope["headers"])
        scope[SCOPE_REQUEST_ID] = request_id.decode()
        scope[SCOPE_RECORD].answer_headers.append((HEADER, request_id))
        return self._app(scope, receive, send)


def request_id_of(headers: Seq[tuple[bytes, bytes]]) -> bytes:
    """The first that the client sent, if it is valid; else a new one of 32 hexadecimal digits."""
    if HEADER in names_of(headers):
        given = next(value for name, value in headers if name == HEADER)
        if _VALID.fullmatch(given):
            return given
    return b"%032x" % random.getrandbits(128)


def with_outer_request_id(app: ASGIApp, request_id: Callable[[], str]) -> ASGIApp:
    """``app`` with the id that ``request_id`` gives for each request, and without it in answers: the outer server says
    it there."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return

        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0].lower() != HEADER]
            await send(message)

        others = [pair for pair in scope["headers"] if pair[0].lower() != HEADER]
        await app({**scope, "headers": [*others, (HEADER, request_id().encode())]}, receive, without_id)

    return served
