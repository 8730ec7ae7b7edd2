"""The ASGI application: routes, error handlers, request metrics."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bei import __version__
from bei.config import ServeConfig
from bei.metrics import Metrics
from bei.server.embeddings import embeddings_router
from bei.server.errors import HANDLERS
from bei.server.health import health_router
from bei.server.models import Models, models_router


def create_app(models: Models, config: ServeConfig, metrics: Metrics) -> FastAPI:
    """The application over ``models``. It holds no state of its own."""
    app = FastAPI(
        title="bei",
        version=__version__,
        description="Embedding inference server.",
        exception_handlers=HANDLERS,  # type: ignore[arg-type]
    )
    app.include_router(embeddings_router(models, config.max_client_batch_size, config.payload_limit))
    app.include_router(models_router(models))
    app.include_router(health_router(models, metrics))
    app.add_middleware(_RequestMetrics, metrics=metrics)
    return app


class _RequestMetrics:
    """Counts and times requests by route. Plain ASGI: Starlette's BaseHTTPMiddleware costs more than the route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(route, str(status or 500)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - started)
