"""``/health`` (the server works), ``/ping`` and ``/`` for those who ask there, ``/ready`` (every model answers),
``/metrics``, ``/stats``.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from bei.metrics.registry import CONTENT_TYPE
from bei.server.endpoint.get_responses import answers
from bei.server.http.errors import JSON
from bei.server.http.routing import ApiRouter
from bei.server.status import stats as minute
from bei.server.status.whole_server import WholeServer


class Alive(TypedDict):
    """Every thread of every model works."""

    status: Literal["alive"]


class Dead(TypedDict):
    """``models`` are those of which a thread has died."""

    status: Literal["dead"]
    models: list[str]


class Ready(TypedDict):
    """Every model answers."""

    status: Literal["ready"]


class NotReady(TypedDict):
    """``models``: what keeps each of them from answering."""

    status: Literal["not ready"]
    models: dict[str, str]


def health_router(server: WholeServer, page: str | None = None) -> ApiRouter:
    """The routes, bound to the server. ``page``: where ``/`` leads browsers, relative to it."""
    router = ApiRouter()

    @answers(bodies={200: Alive, 503: Dead})
    async def health() -> Response:
        """200 while every thread of every model works; 503 means: restart me."""
        dead = await server.dead()
        if dead:
            return JSONResponse(Dead(status="dead", models=dead), 503)
        return JSONResponse(Alive(status="alive"))

    for path, summary in (("/health", "Liveness"), ("/ping", "Liveness (SageMaker)")):
        router.get(path, summary)(health)
        router.head(path, summary)(health)

    @router.head("/", summary="Liveness")
    @router.get("/", summary="Liveness")
    @answers(bodies={200: Alive, 503: Dead})
    async def root(request: Request) -> Response:
        """As `/health`; browsers are led to the page."""
        if page is not None and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(page)
        return await health()

    @router.head("/ready", summary="Readiness")
    @router.get("/ready", summary="Readiness")
    @answers(bodies={200: Ready, 503: NotReady})
    async def ready() -> Response:
        """200 when every model answers a canary text, through the whole path, as it did at build time."""
        problems = await server.problems()
        if problems:
            return JSONResponse(NotReady(status="not ready", models=problems), 503)
        return JSONResponse(Ready(status="ready"))

    @router.get("/metrics", summary="Prometheus metrics")
    @answers(bodies={200: str}, media_type=CONTENT_TYPE)
    async def metrics_text() -> Response:
        """Exposition format; docs/reference.md lists the names."""
        return Response(await server.metrics(), media_type=CONTENT_TYPE)

    @router.get(minute.PATH, summary="The last minute")
    @answers(bodies={200: minute.Stats})
    async def stats() -> Response:
        """Requests by lane and status with their times, what waits, and what each engine does."""
        return Response(msgspec.json.encode(await server.stats()), media_type=JSON)

    return router
