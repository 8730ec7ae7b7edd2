"""grpcio's own services, health and reflection, with bounds: they need no key, and a call of theirs holds a place of
``max_connections`` for as long as it is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from bei.server.grpc.idle_streams import end_idle, next_message, only_message


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Health, watched by so many calls at once at most: one that watches stays open for as long as its client lives.
    Questions must come within ``timeout_s``."""

    def __init__(self, most_watching: int, timeout_s: float) -> None:
        super().__init__()
        self._most_watching = most_watching
        self._timeout_s = timeout_s
        self._num_watching = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """Of the service's methods."""
        forms = (health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString)
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(partial(self._asked, self.Check), *forms),
            "Watch": grpc.stream_stream_rpc_method_handler(partial(self._asked, self.Watch), *forms),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    async def _asked(self, answer: Any, _: AsyncIterator[Any], context: Any) -> Any:
        return await answer(await only_message(context, self._timeout_s), context)

    async def Watch(self, request: Any, context: Any) -> None:
        """The status, and each that follows. RESOURCE_EXHAUSTED above the bound."""
        if self._num_watching >= self._most_watching:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._most_watching} calls watch the health already, half of max_connections: ask with Check.",
            )
        self._num_watching += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watching -= 1


class ReflectionServicer(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # the library has no types
    """Reflection over streams that end when no question came for ``idle_s``."""

    def __init__(self, names: tuple[str, ...], pool: Any, idle_s: float) -> None:
        super().__init__(names, pool=pool)
        self._idle_s = idle_s

    async def ServerReflectionInfo(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """An answer for each question."""
        async for answer in super().ServerReflectionInfo(self._questions(request_iterator, context), context):
            yield answer

    async def _questions(self, given: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        iterator = given.__aiter__()
        while True:
            try:
                question = await asyncio.wait_for(next_message(iterator), self._idle_s)
            except asyncio.TimeoutError:
                await end_idle(context, self._idle_s)
            if question is None:
                return
            yield question
