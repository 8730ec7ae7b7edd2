"""``/health`` (the server works), ``/ping`` and ``/`` for those who ask there, ``/ready`` (every model answers),
``/metrics``, ``/stats``.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from bei.metrics.registry import CONTENT_TYPE
from bei.server.endpoint.examples import EMBEDDER, METRICS
from bei.server.endpoint.get_responses import answers
from bei.server.http.errors import JSON
from bei.server.http.routing import ApiRouter
from bei.server.status import stats as minute
from bei.server.status.whole_server import WholeServer
from bei.version import __version__


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


def _requests_example(answered: int, seconds: float | None) -> dict[str, Any]:
    """So many requests in each second, each of which took ``seconds``; None: there were none."""
    return {
        "answered": {"200": answered * 60} if answered else {},
        "latency_s": {"p50": seconds, "p90": seconds, "p99": seconds},
        "per_second": {"answered": [answered] * 60, "p50": [seconds] * 60, "p99": [seconds] * 60},
    }


_NOTHING_WAITS = {"sequences": 0, "tokens": 0, "seconds": 0.0}
_MODEL_EXAMPLE = {
    "name": EMBEDDER,
    "target": "cpu",
    "precision": "bf16",
    "device": "Intel(R) Xeon(R) Processor",
    "unshared_prefixes": "its tokens see those behind them",
    "is_alive": True,
    "open_requests": 0,
    "queue": {"interactive": _NOTHING_WAITS, "bulk": _NOTHING_WAITS},
    "sequences_per_second": 4.0,
    "tokens_per_second": 48.0,
    "steps_per_second": 4.0,
    "busy": 0.02,
    "batch": {
        "sequences": 1.0,
        "tokens": 12.0,
        "fill": 0.0117,
        "padding": 0.0,
        "max_sequences": 128,
        "max_tokens": 1024,
    },
    "per_second": {"tokens": [48] * 60},
}
_STATS_EXAMPLE = {
    "version": __version__,
    "window_s": 60.0,
    "requests": {
        "interactive": _requests_example(4, 0.0068),
        "bulk": _requests_example(0, None),
        "other": _requests_example(1, 0.0004),
    },
    "models": [_MODEL_EXAMPLE],
    "silent": [],
}


def health_router(server: WholeServer, page: str | None = None) -> ApiRouter:
    """The routes, bound to the server. ``page``: where ``/`` leads browsers, relative to it."""
    router = ApiRouter()

    @answers(bodies={200: Alive, 503: Dead}, example={"status": "alive"})
    async def health() -> Response:
        """200 while every thread of every model works; 503 means: restart me."""
        dead = await server.dead()
        if dead:
            return JSONResponse(Dead(status="dead", models=dead), 503)
        return JSONResponse(Alive(status="alive"))

    for path, summary in (("/health", "Liveness"), ("/ping", "Liveness (SageMaker)")):
        router.get(path, summary)(health)

    @router.get("/", summary="Liveness")
    @answers(bodies={200: Alive, 503: Dead}, example={"status": "alive"})
    async def root(request: Request) -> Response:
        """As `/health`; browsers are led to the page."""
        if page is not None and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(page)
        return await health()

    @router.get("/ready", summary="Readiness")
    @answers(bodies={200: Ready, 503: NotReady}, example={"status": "ready"})
    async def ready() -> Response:
        """200 when every model answers a canary text, through the whole path, as it did at build time."""
        problems = await server.problems()
        if problems:
            return JSONResponse(NotReady(status="not ready", models=problems), 503)
        return JSONResponse(Ready(status="ready"))

    @router.get("/metrics", summary="Prometheus metrics")
    @answers(bodies={200: str}, example=METRICS, media_type=CONTENT_TYPE)
    async def metrics_text() -> Response:
        """Exposition format; docs/reference.md lists the names."""
        return Response(await server.metrics(), media_type=CONTENT_TYPE)

    @router.get(minute.PATH, summary="The last minute")
    @answers(bodies={200: minute.Stats}, example=_STATS_EXAMPLE)
    async def stats() -> Response:
        """Requests by lane and status with their times, what waits, and what each engine does."""
        return Response(msgspec.json.encode(await server.stats()), media_type=JSON)

    return router
