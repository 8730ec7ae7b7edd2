"""text-embeddings-inference's API: its routes stand without a mount point too, where errors have our form.

Reference: github.com/huggingface/text-embeddings-inference, ``router/src/http``. ``/`` and ``/invocations`` do what the
model is for. Under ``/tei`` the model's name is not looked at, as there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, cast

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bei import errors
from bei.config.settings import ServeConfig
from bei.errors import InvalidRequestError
from bei.metrics.request_timing import Timing
from bei.server.dialects.base import Dialect, add_metrics, adjusted
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import IDS, TEXTS, VECTORS, Example
from bei.server.endpoint.field_schema import MAX_INPUTS, limits, limits_of_inputs
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.models import Models
from bei.server.endpoint.parse import (
    TokenId,
    check_inputs,
    is_one_input,
    parser,
    read_long_ids,
)
from bei.server.endpoint.render import FLOAT_BYTES, Items, Reply, num_bytes_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Model, Tiered
from bei.server.endpoint.vector_encoding import OCTET_HEADERS
from bei.server.http.routing import ApiRouter
from bei.server.routes import classify, embed, openai_embeddings, rerank, tokenize
from bei.server.routes.info import info_router
from bei.server.routes.pages import docs_router
from bei.server.routes.root import REQUESTS, RESPONSES, Asked, by_kind, read_by_kind
from bei.server.routes.tokenize import MOST_IDS, decoded
from bei.server.status.whole_server import WholeServer
from bei.service.service import InferenceService
from bei.tasks.mixed import Given, read_inputs

# So many are read, or begun, before the event loop serves others: a few milliseconds.
_INSTANCES_AT_ONCE = 32

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
    """Long lists in pieces. Raises InvalidRequestError, also for more than ``max_inputs`` lists."""
    found = read_long_ids(content, "ids", max_inputs, _decode_long_request)
    if found is not None:
        body, lists = found
        return DecodeRequest(ids=[*lists], model=body.model, skip_special_tokens=body.skip_special_tokens)
    request = _decode_request(content)
    check_inputs(request.ids, max_inputs, "ids", "ids mixes token ids and lists of them: send one kind.")
    return request


async def decode(body: DecodeRequest, context: RequestContext, *, skip_unknown: bool = False) -> Reply:
    """The texts of token ids."""
    lists = cast(list[list[int]], [body.ids] if is_one_input(body.ids) else body.ids)
    service = context.named(body.model)
    texts = await decoded(
        context, service, lists, "ids", skip_special_tokens=body.skip_special_tokens, skip_unknown=skip_unknown
    )
    return Reply(texts)


async def decode_as_tei(body: DecodeRequest, context: RequestContext) -> Reply:
    """The texts of token ids. An id that is no token is left out, as TEI's tokenizer does, and a header says so."""
    return await decode(body, context, skip_unknown=True)


class VertexRequest(Tiered, kw_only=True):
    """Vertex AI's envelope. Each instance is the body of a request for the kind of the model; ``model`` is that of
    instances that name none."""

    instances: Annotated[list[Annotated[msgspec.Raw, limits(type="object")]], limits_of_inputs]
    model: Model | None = None


class VertexResponse(TypedDict):
    """For each instance what the route for its kind answers, in their order."""

    predictions: list[Any]


async def vertex(body: VertexRequest, context: RequestContext) -> Reply:
    """For each of `instances` what the route for the kind of the model answers: vectors, sparse vectors, labels or, for
    an instance with `query` and `texts`, ranks. All instances ask one model."""
    context.check_inputs(body.instances, "instances")
    parts: list[Asked] = []
    for instance in body.instances:
        parts.append(await read_by_kind(bytes(instance), context, body.model))
        await _pause(parts)
    service = parts[0].service
    if any(part.service is not service for part in parts):
        raise InvalidRequestError("instances name several models: send a request for each.", "instances")
    inputs = read_inputs(service.manifest, "", [one for part in parts for one in _inputs_of(part)])
    context.check_inputs(inputs, "instances")
    context.check_answer(len(inputs) * _bytes_per_input(service))
    context.admit_whole(service, inputs, _num_around(parts) // len(inputs))
    replies = await _all_answered(parts, context)
    contents = [reply.content for reply in replies]
    predictions = Items(len(contents), sum(map(num_bytes_of, contents)), lambda start, stop: contents[start:stop])
    context.check_answer(predictions.num_bytes)
    return Reply({"predictions": predictions}, [index for index, reply in enumerate(replies) if reply.truncated])


def _inputs_of(part: Asked) -> Seq[Given]:
    body = part.body
    if isinstance(body, embed.EmbedRequest | embed.SparseRequest):
        return embed.inputs_of(body.inputs)
    if isinstance(body, rerank.TextsRequest):
        return [(body.query, text) for text in body.texts]
    if isinstance(body, classify.PredictRequest):
        return classify.inputs_of(body.inputs)[0]
    raise InvalidRequestError("instances must ask for embeddings, sparse embeddings, labels or ranks.", "instances")


def _num_around(parts: Seq[Asked]) -> int:
    """Characters of the prompts and instructions that requests bring, as often as they are read."""

    def of(body: Any) -> int:
        return max(len(getattr(body, name, None) or "") for name in ("prompt", "instruction", "instruct"))

    return sum(len(_inputs_of(part)) * of(part.body) for part in parts)


def _bytes_per_input(service: InferenceService) -> int:
    return service.embedding_width * FLOAT_BYTES + classify.ranked_bytes(classify.labels_of(service))


async def _all_answered(parts: Seq[Asked], context: RequestContext) -> Seq[Reply]:
    """The replies of all parts. Where one fails the others are cancelled."""
    tasks: list[asyncio.Future[Reply]] = []
    try:
        for part in parts:
            tasks.append(asyncio.ensure_future(part.handle(part.body, context)))
            await _pause(tasks)
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _pause(done: Seq[object]) -> None:
    """Let the event loop serve others now and then."""
    if len(done) % _INSTANCES_AT_ONCE == 0:
        await asyncio.sleep(0)


# What runs on a GPU; TEI says "gpu+optimized" always.
_GPU_TARGETS = frozenset(("cuda", "tensorrt", "trtllm"))


def timing_headers(timing: Timing) -> dict[str, str]:
    """TEI's: whole milliseconds, and of the request's inputs the means."""
    means, total = timing.means(), _milliseconds(timing.total_s)
    return {
        "x-compute-type": f"{'gpu' if timing.target in _GPU_TARGETS else 'cpu'}+optimized",
        "x-compute-time": total,
        "x-compute-characters": str(timing.num_characters),
        "x-compute-tokens": str(timing.num_tokens),
        "x-total-time": total,
        "x-tokenization-time": _milliseconds(means.tokenization_s),
        "x-queue-time": _milliseconds(means.queue_s),
        "x-inference-time": _milliseconds(means.inference_s),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


_TIMED = frozenset(("/embed", "/embed_all", "/embed_sparse", "/similarity", "/predict", "/rerank"))


def with_timing(routes: Iterable[Route[Any]]) -> Iterator[Route[Any]]:
    """``routes``, those that TEI times with its headers."""
    for route in routes:
        yield replace(route, timing_headers=timing_headers) if route.path in _TIMED else route


def error_form(error: errors.BeiError, status: int, path: str) -> tuple[int, object]:
    """TEI's kinds of errors and their statuses; ours where TEI has none of the kind."""
    kind, status = next((row for cls, row in _KINDS.items() if isinstance(error, cls)), ("Backend", status))
    if path.endswith("/embeddings"):
        return status, OpenAIErrorBody(message=str(error), code=status, type=kind)
    return status, ErrorBody(error=str(error), error_type=kind)


# The first that fits.
_KINDS: dict[type[errors.BeiError], tuple[ErrorType, int]] = {
    errors.EmptyInputError: ("Empty", 400),
    errors.UnauthorizedError: ("Validation", 401),
    errors.ForbiddenError: ("Validation", 403),
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
    """The route of a server whose requests have at most ``max_inputs`` inputs."""
    read = partial(parse_ids, max_inputs=max_inputs)
    example = Example({"ids": IDS}, ["hello world"])
    return Route(
        "/decode", "Decode token ids (TEI)", DecodeRequest, list[str], read, decode, example, runs_engine=False
    )


# What TEI reads of a request on OpenAI's route.
_OPENAI_FIELDS = frozenset(("model", "input", "user", "encoding_format", "dimensions", "service_tier"))


def _as_tei_embeds(body: openai_embeddings.EmbeddingRequest) -> None:
    """Other fields than TEI's are passed over there, and vectors have unit length, whatever the checkpoint says."""
    for field in msgspec.structs.fields(body):
        if field.name not in _OPENAI_FIELDS:
            setattr(body, field.name, field.default)
    body.normalize = True


def root_routes() -> tuple[Route[Any], ...]:
    """``/``, for clients that are given nothing but a server's address, SageMaker's path, and Vertex AI's."""
    summary = "Do what the model is for (TEI)"
    inputs = [{"inputs": text} for text in TEXTS]
    by_example = Example({"instances": inputs}, {"predictions": [[vector] for vector in VECTORS]})
    by_address: Route[Any] = Route(
        "/",
        summary,
        REQUESTS,
        RESPONSES,
        bytes,
        by_kind,
        embed.VECTORS_EXAMPLE,
        has_report=True,
        octet_headers=OCTET_HEADERS,
        timing_headers=timing_headers,
    )
    by_instance: Route[Any] = Route(
        "/vertex",
        f"{summary[:-1]}, Vertex AI)",
        VertexRequest,
        VertexResponse,
        parser(VertexRequest),
        vertex,
        by_example,
    )
    return by_address, replace(by_address, path="/invocations"), by_instance


def openapi_router() -> ApiRouter:
    """The description of the API on TEI's path."""
    router = ApiRouter()

    @router.get("/api-doc/openapi.json", in_schema=False)
    async def openapi(request: Request) -> Response:
        """What /openapi.json answers."""
        return JSONResponse(request.app.state.openapi())

    return router


_PROBES = ("/health", "/ping", "/")


# Of paths that answer otherwise than at the root.
_HANDLERS: Mapping[str, Any] = {"/predict": classify.predict_as_tei}


def dialect(models: Models, config: ServeConfig, server: WholeServer) -> Dialect:
    """The dialect of Hugging Face's TEI, with routes that read the served models and their state."""
    max_inputs = config.max_client_batch_size
    accepts_ids = config.openai_token_ids == "accept"
    openai = adjusted(openai_embeddings.route(max_inputs, accepts_ids=accepts_ids), _as_tei_embeds)
    openai = replace(openai, timing_headers=timing_headers)
    shared = (*embed.routes(max_inputs), *classify.ROUTES, *rerank.routes(max_inputs))
    routes = (
        *root_routes(),
        *with_timing(
            replace(route, handle=_HANDLERS.get(route.path, route.handle)) for route in shared if route.path in _TIMED
        ),
        replace(tokenize.ROUTE, handle=tokenize.tokenize_as_tei),
        replace(decode_route(max_inputs), handle=decode_as_tei),
        openai,
        replace(openai, path="/embeddings"),
    )
    reads = ApiRouter()
    reads.include(info_router(models, config))
    reads.include(openapi_router())
    reads.include(docs_router(config))
    add_metrics(reads, "/metrics", server)

    @answers(errors.NotReadyError, bodies={200: None})
    async def health() -> Response:
        """200 when every model answers as it did when it was built."""
        await server.check_ready()
        return Response()

    for path in _PROBES:
        reads.get(path, summary="Health (TEI)")(health)

    return Dialect(
        "tei",
        "TEI",
        routes,
        error_form,
        (ErrorBody, OpenAIErrorBody),
        reads,
        any_model=True,
        probes=_PROBES,
        metrics_path="/metrics",
    )
