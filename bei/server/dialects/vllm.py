"""vLLM's pooling API: ``/score`` and ``/detokenize`` (and ``/pooling``, in ``vllm_pooling``), which have paths of their
own, and all of it under ``/vllm``, where the code of an error is its status.

Reference: docs.vllm.ai, "OpenAI-Compatible Server", "Pooling API", "Score API", "Re-rank API";
github.com/vllm-project/vllm, ``vllm/entrypoints``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict, cast

import msgspec
from msgspec import UNSET, Meta
from starlette.responses import Response

from bei.config.settings import ServeConfig
from bei.errors import BeiError, EngineDeadError, InvalidRequestError, MalformedRequestError, ModelNotFoundError
from bei.image.source import placed
from bei.server.dialects import vllm_pooling
from bei.server.dialects.base import Dialect, StatusErrorBody, StatusErrorDetail, add_metrics, adjusted
from bei.server.dialects.vllm_pooling import answer_of
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import (
    CREATED,
    DOCUMENTS,
    EMBEDDER,
    HEX,
    IDS,
    QUERY,
    RERANK_TOKENS,
    RERANKER,
    SCORES,
    Example,
    token_usage,
)
from bei.server.endpoint.field_schema import Limits, exactly_one, limits, limits_of_inputs
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.input_parts import ComparedInput
from bei.server.endpoint.models import Models
from bei.server.endpoint.parse import TokenId, parser, with_unique_keys
from bei.server.endpoint.refused_fields import (
    Padding,
    PairTemplateOptions,
    ProcessorOptions,
    QueryLimit,
    Refused,
    refused,
)
from bei.server.endpoint.render import Items, Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.scoring_fields import Label, Mode, Weights, pair_scores, scoring_task
from bei.server.endpoint.shared_fields import Controls, Model
from bei.server.http.routing import ApiRouter
from bei.server.routes import classify, openai_embeddings, rerank, tokenize
from bei.server.routes.chat_embeddings import with_chats
from bei.server.routes.openai_embeddings import EmbeddingResponse, SparseEmbeddingResponse, Usage
from bei.server.status.whole_server import WholeServer
from bei.service.call import ModelInput
from bei.service.service import InferenceService
from bei.tasks.compare import Compared, ComparedPair, CompareTask, check_alone, checked_weights, compare, read_apart
from bei.tasks.rerank import num_around, pairs_to_read
from bei.version import __version__

_SCORE_BYTES = 50

_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


Side: TypeAlias = str | ComparedInput | Annotated[list[str | ComparedInput], limits_of_inputs]


class ScoreRequest(Controls, kw_only=True):
    """One text with one or many, or as many with as many: ``text_1`` and ``text_2``, or one of the newer pairs. Of
    rerankers one side may be empty."""

    text_1: Side | None = None
    text_2: Side | None = None
    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    use_activation: bool | None = None
    label: Label | None = None
    score_mode: Mode | None = None
    score_weights: Weights | None = None
    instruction: Annotated[str | None, Meta(description="For rerankers with a template that has a slot.")] = None
    max_tokens_per_query: QueryLimit = UNSET
    max_tokens_per_doc: Annotated[Refused, refused("send the documents to /rerank", 0)] = UNSET
    chat_template_kwargs: PairTemplateOptions = UNSET
    padding: Padding = UNSET
    mm_processor_kwargs: ProcessorOptions = UNSET

    _limits: ClassVar[Limits] = (exactly_one(*_SIDES),)


class Score(TypedDict):
    """The score of the pair at this place."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(TypedDict):
    """vLLM's."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class MadeEmbeddingResponse(EmbeddingResponse):
    """OpenAI's, with what vLLM says beside it."""

    id: str
    created: int


class MadeSparseEmbeddingResponse(SparseEmbeddingResponse):
    """Where `output_dtype` is sparse."""

    id: str
    created: int


class Version(TypedDict):
    """This server's, not vLLM's."""

    version: str


class Load(TypedDict):
    """Requests that are accepted and not answered yet."""

    server_load: int


class ServedModel(TypedDict):
    """``root`` is the checkpoint; bei has neither parents nor permissions."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["vllm"]
    root: str
    parent: str | None
    max_model_len: int
    permission: list[str]


class ModelList(TypedDict):
    """Every served model."""

    object: Literal["list"]
    data: list[ServedModel]


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The ids of one text."""

    tokens: Annotated[list[TokenId], limits(minItems=1, maxItems=tokenize.MOST_IDS)]
    model: Model | None = None


class DetokenizeResponse(TypedDict):
    """vLLM's."""

    prompt: str


def sides_of(body: ScoreRequest, context: RequestContext) -> dict[str, list[Compared]]:
    """The texts and images of both sides, by their fields. Raises InvalidRequestError."""
    fields = {side for sides in _SIDES for side in sides if getattr(body, side) is not None}
    given = [sides for sides in _SIDES if fields == {*sides}]
    if not given:
        raise InvalidRequestError("The request must have text_1 and text_2, or one of queries and documents.", "text_1")
    sides = {}
    for side in given[0]:
        value: Side = getattr(body, side)
        inputs = value if isinstance(value, list) else [value]
        context.check_count(inputs, side)
        compared = [one if isinstance(one, str) else one.compared(side) for one in inputs]
        sides[side] = [placed(one, place) for place, one in enumerate(compared)] if len(compared) > 1 else compared
    return sides


def pairs_of(sides: dict[str, list[Compared]]) -> list[ComparedPair]:
    """The pairs to score. Raises InvalidRequestError where the sides cannot be matched."""
    (one, first), (other, second) = sides.items()
    if len(first) == 1:
        return [(first[0], text) for text in second]
    if len(first) != len(second):
        raise InvalidRequestError(
            f"{one} has {len(first)} texts and {other} {len(second)}: send one with many, or as many.", one
        )
    return list(zip(first, second, strict=True))


async def score(body: ScoreRequest, context: RequestContext) -> Reply:
    """How alike two texts are: the score of a reranker, the cosine of an embedder's vectors, or MaxSim of its tokens'.
    Models that have vectors of images compare these too: `{"content": [{"type": "image_url", ...}]}`.

    `score_mode` names the vectors of a model with several kinds, `label` the label of a classifier.
    """
    sides = sides_of(body, context)
    pairs = pairs_of(sides)
    service = _scoring(body, context)
    context.check_answer(len(pairs) * _SCORE_BYTES)
    raw = body.use_activation is False
    if body.label is not None or (body.score_mode is None and "rerank" in service.manifest.tasks):
        read = await pairs_to_read(service, pairs, body.instruction)
        ticket = context.admit(service, read, num_around=num_around(service, body.instruction))
        scores = await pair_scores(body, service, pairs, ticket, raw=raw, instruction=body.instruction)
    else:
        if body.instruction is not None:
            message = f"{service.name} compares vectors, which take no instruction: leave it out."
            raise InvalidRequestError(message, "instruction")
        for side, texts in sides.items():  # which are read by themselves
            context.check_inputs(texts, side)
        asked_apart = read_apart(service, dict.fromkeys(text for pair in pairs for text in pair))
        asked = CompareTask(
            cast("Seq[ModelInput]", pairs), body.encoding_options(), mode=body.score_mode, weights=body.score_weights
        )
        kinds = checked_weights(service, asked.mode, asked.weights)
        if body.score_mode is not None or "multi_vector" in kinds:  # cosines never depended on the field
            check_alone(body.score_mode or "multi_vector", {"use_activation": raw or None})
        scores = await compare(service, asked, ticket=context.admit(service, asked_apart))
    values, num_tokens, truncated = scores.values[:, 0], scores.num_tokens, scores.truncated

    def items(start: int, stop: int) -> list[Score]:
        return [{"index": index, "object": "score", "score": values[index]} for index in range(start, stop)]

    data = Items(len(pairs), len(pairs) * _SCORE_BYTES, items)
    return Reply(answer_of("score", service, data, num_tokens), truncated)


def _scoring(body: ScoreRequest, context: RequestContext) -> InferenceService:
    """The model that scores as asked: without a mode or label a reranker, or what gives vectors."""
    if body.score_mode is not None or body.label is not None:
        return context.able(scoring_task(body), body.model)
    service = context.named(body.model)
    tasks = service.manifest.tasks
    return service if {"rerank", "embed_tokens", "embed_sparse"} & {*tasks} else context.able("embed", body.model)


async def detokenize(body: DetokenizeRequest, context: RequestContext) -> Reply:
    """The text of token ids, special tokens included."""
    service = context.named(body.model)
    texts = await tokenize.decoded(context, service, [body.tokens], "tokens", skip_special_tokens=False)
    return Reply({"prompt": texts.make(0, 1)[0]})


# What vLLM calls the errors of a request.
_TYPES: dict[type[BeiError], str] = {ModelNotFoundError: "NotFoundError", MalformedRequestError: "BadRequestError"}


def error_form(error: BeiError, status: int, _: str) -> tuple[int, object]:
    """The status is the code; types are vLLM's for what it has one for."""
    kind = _TYPES.get(type(error), "BadRequestError" if status == 400 else type(error).__name__)
    detail = StatusErrorDetail(message=str(error), type=kind, param=getattr(error, "param", None), code=status)
    return status, StatusErrorBody(error=detail)


_SCORE_EXAMPLE = Example(
    {"text_1": QUERY, "text_2": DOCUMENTS},
    {
        "id": f"score-{HEX}",
        "object": "list",
        "created": CREATED,
        "model": RERANKER,
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(reversed(SCORES))],
        "usage": token_usage(RERANK_TOKENS),
    },
)
_parse_score = with_unique_keys(parser(ScoreRequest), "score_weights")

SCORE: Route[Any] = Route(
    "/score", "Score pairs (vLLM)", ScoreRequest, ScoreResponse, _parse_score, score, _SCORE_EXAMPLE
)
DETOKENIZE: Route[Any] = Route(
    "/detokenize",
    "Decode token ids (vLLM)",
    DetokenizeRequest,
    DetokenizeResponse,
    parser(DetokenizeRequest),
    detokenize,
    Example({"tokens": IDS}, {"prompt": "[CLS] hello world [SEP]"}),
    runs_engine=False,
)


_MODELS_EXAMPLE = {
    "object": "list",
    "data": [
        {
            "id": EMBEDDER,
            "object": "model",
            "created": CREATED,
            "owned_by": "vllm",
            "root": "sentence-transformers/all-MiniLM-L6-v2",
            "parent": None,
            "max_model_len": 256,
            "permission": [],
        }
    ],
}


def _reads(models: Models, server: WholeServer) -> ApiRouter:
    router = ApiRouter()
    add_metrics(router, "/metrics", server)

    @answers(EngineDeadError, bodies={200: None})
    async def health() -> Response:
        """200 while every thread of every model works."""
        await server.check_alive()
        return Response()

    for path in ("/health", "/ping"):
        router.get(path, summary="Liveness (vLLM)")(health)
    router.post("/ping", summary="Liveness (vLLM, SageMaker)")(health)

    @router.get("/version", summary="Version (vLLM)")
    @answers(example={"version": __version__})
    async def version() -> Version:
        """This server's, not vLLM's."""
        return {"version": __version__}

    @router.get("/load", summary="Load (vLLM)")
    @answers(example={"server_load": 3})
    async def load() -> Load:
        """Requests that are accepted and not answered yet."""
        return {"server_load": sum(service.num_open for service in models)}

    @router.get("/v1/models", summary="List the served models (vLLM)")
    @answers(example=_MODELS_EXAMPLE)
    async def list_models() -> ModelList:
        """Every served model."""
        return {
            "object": "list",
            "data": [_described(name, service, models.started_s) for name, service in models.listed],
        }

    return router


def _described(name: str, service: InferenceService, created: int) -> ServedModel:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": service.manifest.source.model,
        "parent": service.manifest.name if service.adapter else None,
        "max_model_len": service.manifest.max_seq_len,
        "permission": [],
    }


def _uncut(body: Controls) -> None:
    """Refuse texts that are too long, as vLLM does, unless the request asks for truncation."""
    asked = (body.truncate, body.truncate_prompt_tokens, getattr(body, "truncation", None))
    if all(value is None for value in asked):
        body.truncate = False


def _as_vllm_embeds(body: openai_embeddings.EmbeddingRequest) -> None:
    """``embed_dtype`` is of base64: numbers in JSON stay float32."""
    _uncut(body)
    if body.encoding_format != "base64":
        body.embed_dtype = None


def _made(route: Route[Any]) -> Route[Any]:
    """``route`` of embeddings, with the id and the time that vLLM's answers have."""

    async def handle(request: Any, context: RequestContext) -> Reply:
        reply = await route.handle(request, context)
        content = {**cast("dict[str, object]", reply.content), "id": f"embd-{uuid.uuid4().hex}"}
        return msgspec.structs.replace(reply, content={**content, "created": int(time.time())})

    handle.__doc__ = route.handle.__doc__
    answer = {**route.example.answer, "id": f"embd-{HEX}", "created": CREATED}
    response = (MadeEmbeddingResponse, MadeSparseEmbeddingResponse)
    return replace(route, handle=handle, response=response, example=route.example._replace(answer=answer))


def dialect(models: Models, config: ServeConfig, server: WholeServer) -> Dialect:
    """The dialect of vLLM, with routes that read the served models and their state."""
    accepts_ids = config.openai_token_ids == "accept"
    classifying = next(route for route in classify.ROUTES if route.path == "/classify")
    embedding = with_chats(openai_embeddings.route(config.max_client_batch_size, accepts_ids=accepts_ids))
    routes: tuple[Route[Any], ...] = (
        SCORE,
        replace(SCORE, path="/v1/score"),
        vllm_pooling.ROUTE,
        *rerank.documents_routes(config.max_client_batch_size),
        classifying,
        replace(classifying, path="/v1/classify"),
    )
    inference = (adjusted(_made(embedding), _as_vllm_embeds), *(adjusted(route, _uncut) for route in routes))
    return Dialect(
        "vllm",
        "vLLM",
        (*inference, replace(tokenize.ROUTE, example=tokenize.PROMPT_EXAMPLE), DETOKENIZE),
        error_form,
        StatusErrorBody,
        _reads(models, server),
        probes=("/health", "/ping"),
        metrics_path="/metrics",
    )
