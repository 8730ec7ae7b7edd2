"""Paths of Hugging Face's inference service: the model, and often the task, in the path of ``POST /``.

Older versions of huggingface_hub's InferenceClient, langchain4j, langchaingo and chroma-go send requests there.
``options`` (``wait_for_model``, ``use_cache``) changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request

from bei.errors import RouteNotFoundError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.routes.root import read_by_kind
from bei.tasks.support import require

# What each task of theirs asks of a model.
_TASKS: Mapping[str, str] = {
    "feature-extraction": "embed",
    "sentence-similarity": "embed",
    "text-classification": "classify",
    "zero-shot-classification": "zero_shot",
    "token-classification": "classify_tokens",
    "text-ranking": "rerank",
}


class _Asked(NamedTuple):
    """The content of a request, and what its path says."""

    content: bytes
    model: str | None = None
    task: str | None = None


async def infer(request: _Asked, context: RequestContext) -> Reply:
    """What `POST /` answers for the model in the path; a task in the path must be one that the model has."""
    if request.task is not None and request.task not in _TASKS:
        raise RouteNotFoundError(f"There is no task {request.task[:40]!r}: there are {', '.join(_TASKS)}.")
    asked = await read_by_kind(request.content, context, model=request.model, is_named=True)
    if request.task is not None:
        require(asked.service, _TASKS[request.task])
    return await asked.handle(asked.body, context)


def _parse_for(request: Request) -> Callable[[bytes], _Asked]:
    path = request.path_params
    return lambda content: _Asked(content, path["name"], path.get("task"))


def hub_routes(by_address: Route[Any]) -> Iterator[Route[Any]]:
    """The routes, as ``by_address``, that of ``POST /``. The longest comes first: a model's name may have slashes."""
    for path in ("/models/{name:path}/pipeline/{task}", "/pipeline/{task}/{name:path}", "/models/{name:path}"):
        yield replace(
            by_address,
            path=path,
            summary="Do what the model is for (Hugging Face)",
            parse=_Asked,
            parse_for=_parse_for,
            handle=infer,
        )
