"""Azure OpenAI: OpenAI's routes under ``/openai``, in the older form with the model, a deployment, in the path.

Reference: learn.microsoft.com, Azure OpenAI, "REST API reference". ``api-version`` in the query changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from bei.server.endpoint.models import Models, models_router
from bei.server.endpoint.route import Route
from bei.server.http.routing import ApiRouter
from bei.server.routes.openai_embeddings import ParsedRequest, route

PREFIX = "/openai"


def azure_routes(max_inputs: int, *, accepts_ids: bool) -> tuple[Route[Any], ...]:
    """The routes that embed."""
    openai = route(max_inputs, accepts_ids=accepts_ids, echoes_tier=True)

    def parse_for(request: Request) -> Callable[[bytes], ParsedRequest]:
        deployment: str = request.path_params["deployment"]

        def parse(content: bytes) -> ParsedRequest:
            parsed = openai.parse(content)
            parsed.body.model = deployment
            return parsed

        return parse

    return (
        replace(
            openai,
            path=f"{PREFIX}/deployments/{{deployment:path}}/embeddings",
            summary="Create embeddings (Azure OpenAI)",
            parse_for=parse_for,
        ),
        replace(openai, path=f"{PREFIX}/v1/embeddings", summary="Create embeddings (Azure OpenAI, v1)"),
    )


def azure_models_router(models: Models) -> ApiRouter:
    """``GET /openai/v1/models`` and its like."""
    router = ApiRouter()
    router.include(models_router(models), PREFIX)
    return router
