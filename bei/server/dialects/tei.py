"""text-embeddings-inference's API: its routes stand without a mount point too, where errors have our form.

Reference: github.com/huggingface/text-embeddings-inference, ``router/src/http``. ``/`` and ``/invocations`` do what the
model is for. Under ``/tei`` the model's name is not looked at, as there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from bei import errors
from bei.config import ServeConfig
from bei.errors import InvalidRequestError
from bei.server import classify, embed, embeddings, rerank, tokenize
from bei.server.controls import Model
from bei.server.dialect import Dialect, adjusted
from bei.server.endpoint import Call, Reply, Route
from bei.server.fields import MAX_INPUTS, limits
from bei.server.info import info_router
from bei.server.models import Models
from bei.server.parsing import PLACEHOLDER_TEXT, TokenId, long_id_lists, parser, too_many_inputs
from bei.server.pipelines import REQUESTS, RESPONSES, by_kind
from bei.server.reads import answers
from bei.server.tokenize import MOST_IDS, decoded

Ids: TypeAlias = Annotated[list[TokenId], limits(minItems=1, maxItems=MOST_IDS)]
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


_ONE_OR_MANY = [
    {"items": {"type": "integer"}, "maxItems": MOST_IDS},
    {"items": {"type": "array"}, "maxItems": MAX_INPUTS},
]


class DecodeRequest(msgspec.Struct, kw_only=True):
    """The ids of one text, or a list of them for each."""

    ids: Annotated[list[TokenId | Ids], limits(minItems=1, anyOf=_ONE_OR_MANY)]
    model: Model | None = None
    skip_special_tokens: bool = True


class _LongRequest(DecodeRequest, kw_only=True):
    """Whose ``ids`` were taken out: the placeholder stands there, unless they stood deeper in the body."""

    ids: str | list[TokenId | list[TokenId]]  # type: ignore[assignment]


_decode_request = parser(DecodeRequest)
_decode_long_request = parser(_LongRequest)


def parse_ids(content: bytes, max_inputs: int) -> DecodeRequest:
    """Long lists in pieces. Raises InvalidRequestError, also for more than ``max_inputs`` of them."""
    found = long_id_lists(content, "ids", max_inputs)
    if found is not None:
        body = _decode_long_request(found.rest)
        if body.ids == PLACEHOLDER_TEXT:
            if len(found.lists) > max_inputs:
                raise too_many_inputs(len(found.lists), max_inputs, "ids")
            skip = body.skip_special_tokens
            return DecodeRequest(ids=[*found.lists], model=body.model, skip_special_tokens=skip)
    return _decode_request(content)


async def decode(body: DecodeRequest, call: Call) -> Reply:
    """The texts of token ids."""
    lists = [given for given in body.ids if isinstance(given, list)]
    ids = [given for given in body.ids if isinstance(given, int)]
    if ids and lists:
        raise InvalidRequestError("ids mixes token ids and lists of them: send one kind.", "ids")
    skip = body.skip_special_tokens
    return Reply(decoded(call, call.named(body.model), [ids] if ids else lists, "ids", skip_special_tokens=skip))


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
    errors.NotAcceptableError: ("Validation", 406),
    errors.RequestTimeoutError: ("Validation", 408),
    errors.PayloadTooLargeError: ("Validation", 413),
    errors.AnswerTooLargeError: ("Validation", 413),
    errors.EncodingNotSupportedError: ("Validation", 415),
    errors.RequestError: ("Validation", 422),
    errors.OverloadedError: ("Overloaded", 429),
    errors.ShuttingDownError: ("Unhealthy", 503),
    errors.EngineDeadError: ("Unhealthy", 503),
    errors.NotReadyError: ("Unhealthy", 503),
    errors.EngineError: ("Backend", 424),
    errors.DeadlineExceededError: ("Overloaded", 504),
}


def decode_route(max_inputs: int) -> Route[Any]:
    """Of a server whose requests have at most ``max_inputs`` inputs."""
    read = partial(parse_ids, max_inputs=max_inputs)
    return Route("/decode", "Decode token ids (TEI)", DecodeRequest, list[str], read, decode)


def _unit_length(body: embeddings.EmbeddingRequest) -> None:
    """Vectors have unit length on OpenAI's route, whatever the checkpoint says."""
    body.normalize = True if body.normalize is None else body.normalize


def root_routes() -> tuple[Route[Any], ...]:
    """``/``, for clients that are given nothing but a server's address, and SageMaker's path."""
    return tuple(
        Route(path, "Do what the model is for (TEI)", REQUESTS, RESPONSES, bytes, by_kind, has_report=True)
        for path in ("/", "/invocations")
    )


def dialect(models: Models, config: ServeConfig) -> Dialect:
    """Bound to the served models."""
    max_inputs = config.max_client_batch_size
    accepts_ids = config.openai_token_ids == "accept"
    openai = adjusted(embeddings.route(max_inputs, accepts_ids=accepts_ids), _unit_length)
    routes = (
        *root_routes(),
        *embed.routes(max_inputs),
        *(route for route in classify.ROUTES if route.path == "/predict"),
        *(route for route in rerank.ROUTES if route.path == "/rerank"),
        tokenize.ROUTE,
        decode_route(max_inputs),
        openai,
        replace(openai, path="/embeddings"),
    )
    reads = APIRouter()
    reads.include_router(info_router(models, config))

    @answers(errors.NotReadyError, bodies={200: None})
    async def health() -> Response:
        """200 when every model answers as it did when it was built."""
        await models.check_ready()
        return Response()

    for path in ("/health", "/ping", "/"):
        reads.get(path, summary="Health (TEI)")(health)
        reads.head(path, summary="Health (TEI)")(health)

    return Dialect("tei", routes, error_form, (ErrorBody, OpenAIErrorBody), reads, any_model=True)
