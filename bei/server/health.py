"""``/health`` (the process works), ``/ready`` (every model answers), ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from bei.metrics import CONTENT_TYPE, Metrics
from bei.server.models import Models


def health_router(models: Models, metrics: Metrics) -> APIRouter:
    """The routes, bound to the served models."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Liveness")
    async def health() -> Response:
        """200 while every thread of every model works; 503 means: restart me."""
        dead = [service.name for service in models if not service.is_alive]
        if dead:
            return JSONResponse({"status": "dead", "models": dead}, 503)
        return JSONResponse({"status": "alive"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="Readiness")
    async def ready() -> Response:
        """200 when every model answers a canary text, through the whole path, as it did at build time."""
        problems = await models.problems()
        if problems:
            return JSONResponse({"status": "not ready", "models": problems}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics_text() -> Response:
        """Exposition format; docs/reference.md lists the names."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return router
