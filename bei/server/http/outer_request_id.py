"""Request ids behind a server that gives them itself."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_REQUEST_ID = b"x-request-id"


def with_outer_request_id(app: ASGIApp, request_id: Callable[[], str]) -> ASGIApp:
    """``app`` with the id that ``request_id`` gives for each request, and without it in answers: the outer server says
    it there."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return

        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0].lower() != _REQUEST_ID]
            await send(message)

        others = [pair for pair in scope["headers"] if pair[0].lower() != _REQUEST_ID]
        await app({**scope, "headers": [*others, (_REQUEST_ID, request_id().encode())]}, receive, without_id)

    return served
