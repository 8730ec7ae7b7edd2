"""What every hot route shares: the raw body within its limit, and waiting for an answer or for the client to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from bei.errors import PayloadTooLargeError

T = TypeVar("T")


class RawRoute(APIRoute):
    """A route that is in the OpenAPI page but answers from bytes: no dependency solving, no response model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. A longer one than ``limit`` is read to its end and dropped, so that the client sees the answer.

    Raises PayloadTooLargeError, ClientDisconnect.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
    if size > limit:
        raise PayloadTooLargeError(f"The body has {size} bytes, the limit is {limit}: send fewer or shorter inputs.")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancels it and raises ClientDisconnect when the client leaves before."""
    task = asyncio.ensure_future(work)
    # The body has been read: the next message can only be the disconnect.
    watcher = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
