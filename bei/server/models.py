"""The served models by name, and ``GET /v1/models``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter

from bei.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from bei.service import InferenceService


class Models:
    """Services by the name that clients use. Names are unique."""

    def __init__(self, services: list[InferenceService]) -> None:
        self._services: dict[str, InferenceService] = {}
        self.started_s = int(time.time())
        for service in services:
            if service.name in self._services:
                raise ConfigError(f"Two models are called {service.name!r}: build one of them with another --name.")
            self._services[service.name] = service

    def __iter__(self) -> Iterator[InferenceService]:
        return iter(self._services.values())

    def named(self, name: str | None) -> InferenceService:
        """The service called ``name``; None is the only one. Raises ModelNotFoundError, InvalidRequestError."""
        if name is None:
            if len(self._services) == 1:
                return next(iter(self._services.values()))
            raise InvalidRequestError(f"Several models are served; set model to one of {self._names()}.", "model")
        try:
            return self._services[name]
        except KeyError:
            raise ModelNotFoundError(f"Model {name!r} is not served here. Served: {self._names()}.", "model") from None

    def begin_drain(self) -> None:
        """Refuse new work on every model."""
        for service in self:
            service.begin_drain()

    def abandon(self) -> None:
        """Answer everything that waits with ShuttingDownError."""
        for service in self:
            service.abandon()

    async def wait_drained(self) -> None:
        """Return when nothing accepted is unanswered."""
        await asyncio.gather(*(service.wait_drained() for service in self))

    def close(self) -> None:
        """End all threads and free all engines."""
        for service in self:
            service.close()

    def _names(self) -> str:
        return ", ".join(self._services)


def models_router(models: Models) -> APIRouter:
    """``GET /v1/models`` and ``GET /v1/models/{name}`` in OpenAI's form, with what a client may want to know."""
    router = APIRouter()

    @router.get("/v1/models", summary="List the served models")
    async def list_models() -> dict[str, Any]:
        """Every served model."""
        return {"object": "list", "data": [_describe(service, models.started_s) for service in models]}

    @router.get("/v1/models/{name:path}", summary="Describe a model")
    async def get_model(name: str) -> dict[str, Any]:
        """One served model."""
        return _describe(models.named(name), models.started_s)

    return router


def _describe(service: InferenceService, created: int) -> dict[str, Any]:
    manifest = service.manifest
    return {
        "id": manifest.name,
        "object": "model",
        "created": created,
        "owned_by": "bei",
        "max_model_len": manifest.max_seq_len,
        "embedding_dimension": manifest.dimension("embedding"),
        "tasks": manifest.tasks,
        "prompts": sorted(manifest.prompts),
        "labels": manifest.classification.labels if manifest.classification else None,
        "target": manifest.target,
        "precision": manifest.precision,
    }
