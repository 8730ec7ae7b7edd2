"""text-embeddings-inference's API: its routes stand without a mount point too, where errors have our form.

Reference: github.com/huggingface/text-embeddings-inference, ``router/src/http``. ``/`` and ``/invocations`` do what the
model is for. Under ``/tei`` the model's name is not looked at, as there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypedDict

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from bei import errors
from bei.config import ServeConfig
from bei.offload import off_loop
from bei.server import classify, embed, embeddings, rerank, tokenize
from bei.server.controls import Model
from bei.server.dialect import Dialect
from bei.server.endpoint import Call, Reply, Route
from bei.server.info import info_router
from bei.server.models import Models
from bei.server.parsing import TokenId, parser
from bei.server.pipelines import REQUESTS, RESPONSES, by_kind

# More are decoded off the event loop: these take a millisecond.
_MANY_IDS = 2_000

# What JSON takes, about: of a token's text, of what stands around a text.
_TOKEN_BYTES = 10
_AROUND_BYTES = 3

ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class ErrorBody(TypedDict):
    """An error, but on OpenAI's routes."""

    error: str
    error_type: ErrorType


class OpenAIErrorBody(TypedDict):
    """An error on OpenAI's routes: flat, with the status as its code."""

    message: str
    code: int
    type: ErrorType


class DecodeRequest(msgspec.Struct, kw_only=True):
    """The ids of one text, or a list of them for each."""

    ids: list[TokenId | list[TokenId]]
    model: Model | None = None
    skip_special_tokens: bool = True


async def decode(body: DecodeRequest, call: Call) -> Reply:
    """The texts of token ids."""
    lists = [given for given in body.ids if isinstance(given, list)]
    ids = [given for given in body.ids if isinstance(given, int)]
    if ids and lists:
        raise errors.InvalidRequestError("ids mixes token ids and lists of them: send one kind.", "ids")
    lists = [ids] if ids else lists
    service = call.named(body.model)
    call.check_inputs(lists, "ids")
    if [] in lists:
        raise errors.EmptyInputError(f"ids {lists.index([])} is empty: leave it out.", "ids")
    call.check_answer(sum(len(ids) * _TOKEN_BYTES + _AROUND_BYTES for ids in lists))
    call.admit(service, lists)

    def texts() -> list[str]:
        return [service.encoder.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]

    return Reply(await off_loop(texts) if sum(map(len, lists)) > _MANY_IDS else texts())


def error_form(error: errors.BeiError, status: int, path: str) -> tuple[int, object]:
    """TEI's kinds of errors and their statuses; ours where TEI has none of the kind."""
    kind, status = next((row for cls, row in _KINDS.items() if isinstance(error, cls)), ("Backend", status))
    if path.endswith("/embeddings"):
        return status, OpenAIErrorBody(message=str(error), code=status, type=kind)
    return status, ErrorBody(error=str(error), error_type=kind)


# The first that fits.
_KINDS: dict[type[errors.BeiError], tuple[ErrorType, int]] = {
    errors.EmptyInputError: ("Empty", 400),
    errors.TaskNotSupportedError: ("Backend", 424),
    errors.RouteNotFoundError: ("Validation", 404),
    errors.MethodNotAllowedError: ("Validation", 405),
    errors.RequestTimeoutError: ("Validation", 408),
    errors.PayloadTooLargeError: ("Validation", 413),
    errors.AnswerTooLargeError: ("Validation", 413),
    errors.EncodingNotSupportedError: ("Validation", 415),
    errors.RequestError: ("Validation", 422),
    errors.OverloadedError: ("Overloaded", 429),
    errors.ShuttingDownError: ("Unhealthy", 503),
    errors.EngineDeadError: ("Unhealthy", 503),
    errors.EngineError: ("Backend", 424),
    errors.DeadlineExceededError: ("Overloaded", 504),
}

DECODE: Route[Any] = Route("/decode", "Decode token ids (TEI)", DecodeRequest, list[str], parser(DecodeRequest), decode)


def root_routes() -> tuple[Route[Any], ...]:
    """``/``, for clients that are given nothing but a server's address, and SageMaker's path."""
    return tuple(
        Route(path, "Do what the model is for (TEI)", REQUESTS, RESPONSES, bytes, by_kind)
        for path in ("/", "/invocations")
    )


def dialect(models: Models, config: ServeConfig) -> Dialect:
    """Bound to the served models."""
    max_inputs = config.max_client_batch_size
    openai = embeddings.route(max_inputs, accepts_ids=config.openai_token_ids == "accept")
    routes = (
        *root_routes(),
        *embed.routes(max_inputs),
        *(route for route in classify.ROUTES if route.path == "/predict"),
        *(route for route in rerank.ROUTES if route.path == "/rerank"),
        tokenize.ROUTE,
        DECODE,
        openai,
        replace(openai, path="/embeddings"),
    )
    reads = APIRouter()
    reads.include_router(info_router(models, config))

    @reads.get("/health", summary="Health (TEI)")
    @reads.get("/ping", summary="Health (SageMaker)")
    @reads.get("/", summary="Health (TEI)")
    async def health() -> Response:
        """200 when every model answers as it did when it was built."""
        for service in models:
            await service.check_ready()
        return Response()

    return Dialect("tei", routes, error_form, (ErrorBody, OpenAIErrorBody), reads, any_model=True)
