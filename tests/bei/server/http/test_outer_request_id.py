"""Request ids behind another server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bei.server.http.request_id import with_outer_request_id


@pytest.mark.parametrize("given", [[], [(b"X-Request-Id", b"client's")]])
def test_the_application_gets_the_outer_id_and_answers_without_one(given: list[tuple[bytes, bytes]]) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "headers": [(b"x-request-id", b"inner"), (b"a", b"b")]})

    async def receive() -> dict[str, str]:
        return {}

    async def send(message: Any) -> None:
        seen.append(message["headers"])

    scope = {"type": "http", "headers": [(b"host", b"h"), *given]}
    served = with_outer_request_id(app, lambda: "outer")

    async def ask() -> None:
        await served(scope, receive, send)

    asyncio.run(ask())
    assert seen == [(b"host", b"h"), (b"x-request-id", b"outer"), [(b"a", b"b")]]
