"""NVIDIA's retrieval microservices: ``/v1/ranking``, which answers logits, and all of it under ``/nim``.

Reference: docs.nvidia.com, NeMo Retriever, "API Reference" of the embedding and reranking NIM. What their errors look
like is not documented there; ours have the fields that their clients print.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import UNSET, Meta

from bei.errors import BeiError, EngineDeadError, InvalidRequestError, NotReadyError, OverloadedError, RateLimitedError
from bei.image.source import ImageInput
from bei.server.dialects.base import Dialect, add_metrics
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import DOCUMENTS, QUERY, RERANK_TOKENS, TEXTS, Example, token_usage
from bei.server.endpoint.field_schema import Text as NonEmptyText
from bei.server.endpoint.field_schema import Texts, limits, limits_of_inputs
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.inference import embedded, ranked, ranking
from bei.server.endpoint.models import Models, models_router
from bei.server.endpoint.parse import parser
from bei.server.endpoint.refused_fields import Refused
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered, contradiction
from bei.server.endpoint.vector_encoding import OCTET_HEADERS, VectorForm, dtype_of
from bei.server.http.routing import ApiRouter
from bei.server.routes.openai_embeddings import ANSWER_EXAMPLE, AROUND_BYTES, EmbeddingResponse, Usage, render, usage
from bei.server.status.whole_server import WholeServer
from bei.service.call import ModelInput
from bei.tasks.embed import EmbedTask
from bei.tokenizer.truncation import encoding_options
from bei.version import __version__

# A model's name may end in the kind of the text.
_SUFFIXES = ("query", "passage")


class Problem(TypedDict):
    """An error. ``detail`` is the message again: clients in Go read a text there."""

    object: Literal["error"]
    message: str
    type: str
    detail: str


class EmbeddingsRequest(Tiered, kw_only=True):
    """``truncate`` NONE: a text that is too long is an error. ``modality`` image: inputs are data URLs of images; a
    list has a word for each input."""

    input: NonEmptyText | Texts
    model: Model | None = None
    input_type: Literal["query", "passage"] | None = None
    truncate: Literal["NONE", "START", "END"] = "NONE"
    encoding_format: Literal["float", "base64"] = "float"
    embedding_type: Literal["float", "int8", "uint8", "binary", "ubinary"] = "float"
    dimensions: Dimensions | None = None
    modality: Literal["text", "image"] | list[Literal["text", "image"]] | None = None


class Text(msgspec.Struct):
    """A query or a passage. Pictures are not read here."""

    text: str
    image: Annotated[Refused, limits(type="null")] = UNSET


class RankingRequest(Tiered, kw_only=True):
    """``truncate`` NONE: a pair that is too long is an error. ``top_k`` null: all; LiteLLM sends it."""

    query: Text
    passages: Annotated[list[Text], limits_of_inputs]
    model: Model | None = None
    truncate: Literal["NONE", "END"] = "NONE"
    top_k: Annotated[int, Meta(ge=1)] | None = None


class Rank(TypedDict):
    """By descending logit."""

    index: int
    logit: float


class Health(TypedDict):
    """A message."""

    object: Literal["health.response"]
    message: str


class Live(Health):
    """Every thread works."""

    live: Literal[True]


class ReadyHealth(Health):
    """Every model answers."""

    ready: Literal[True]


class Version(TypedDict):
    """``api`` is what paths begin with."""

    release: str
    api: str


class RankingResponse(TypedDict):
    """NVIDIA's."""

    rankings: list[Rank]
    usage: Usage


async def create_embeddings(body: EmbeddingsRequest, context: RequestContext) -> Reply:
    """Embed texts or images, in their order. A model's name may end in `-query` or `-passage` instead of
    `input_type`."""
    inputs = _inputs(body)
    model, input_type = _without_suffix(context.models, body.model, body.input_type)
    form = VectorForm(
        dtype_of(body.embedding_type, "embedding_type"), body.encoding_format == "base64", "embedding_type"
    )
    service = context.able("embed", model)
    options = encoding_options(body.truncate)
    asked = EmbedTask(inputs, options, input_type=input_type, dimensions=body.dimensions, param="input")
    found = await embedded(context, service, asked, forms=[form], around_bytes=AROUND_BYTES)
    return found.reply(render(found.answer, service.name, form))


def _inputs(body: EmbeddingsRequest) -> list[ModelInput]:
    """Texts and images. Raises InvalidRequestError for a list of modalities of another length."""
    given = [body.input] if isinstance(body.input, str) else body.input
    asked = body.modality if isinstance(body.modality, list) else [body.modality or "text"] * len(given)
    if len(asked) != len(given):
        raise InvalidRequestError(
            f"modality has {len(asked)} entries for {len(given)} inputs: send one word for all, or one for each.",
            "modality",
        )
    return [ImageInput(value, "input") if kind == "image" else value for value, kind in zip(given, asked, strict=True)]


async def rank(body: RankingRequest, context: RequestContext) -> Reply:
    """Score passages against a query, best first. Scores are logits."""
    context.check_count(body.passages, "passages")  # before they are looked at
    if any(bytes(text.image) != b"null" for text in (body.query, *body.passages) if text.image is not UNSET):
        raise InvalidRequestError("image is not supported here: bei reads texts.", "passages")
    passages = [text.text for text in body.passages]
    service, options = context.able("rerank", body.model), encoding_options(body.truncate)
    scores = await ranked(context, service, body.query.text, passages, param="passages", raw=True, options=options)
    rankings = ranking(scores, body.top_k, score="logit")
    return Reply({"rankings": rankings, "usage": usage(scores.num_tokens)}, scores.truncated)


class HostedRanking(NamedTuple):
    """A request, and the model in its path."""

    body: RankingRequest
    named: str


_parse_ranking = parser(RankingRequest)


def _parse_hosted(content: bytes, named: str = "") -> HostedRanking:
    return HostedRanking(_parse_ranking(content), named)


async def rank_hosted(request: HostedRanking, context: RequestContext) -> Reply:
    """Score passages against a query, best first, by the model in the body, or else in the path. Scores are logits."""
    body, named = request
    if body.model is None:
        body.model = named
    elif named in context.models and context.models.named(named) is not context.models.named(body.model):
        # Other paths are nobody's name: NVIDIA writes its models otherwise there, or the publisher alone.
        raise contradiction("the path", named, "model", body.model)
    return await rank(body, context)


def _without_suffix(models: Models, name: str | None, input_type: str | None) -> tuple[str | None, str | None]:
    if name is None or name in models:
        return name, input_type
    for suffix in _SUFFIXES:
        if name.endswith(f"-{suffix}"):
            if input_type not in (None, suffix):
                raise contradiction("input_type", input_type, "model", name)
            return name.removesuffix(f"-{suffix}"), suffix
    return name, input_type


def error_form(error: BeiError, status: int, _: str) -> tuple[int, object]:
    """A full queue is a 503 there, a rate that is used up is not. The body is not documented."""
    if isinstance(error, OverloadedError) and not isinstance(error, RateLimitedError):
        status = 503
    return status, Problem(object="error", message=str(error), type=error.code, detail=str(error))


def _reads(models: Models, server: WholeServer) -> ApiRouter:
    router = ApiRouter()

    @router.get("/v1/health/live", summary="Liveness (NIM)")
    @answers(EngineDeadError, example={"object": "health.response", "message": "live", "live": True})
    async def live() -> Live:
        """200 while every thread of every model works."""
        await server.check_alive()
        return {"object": "health.response", "message": "live", "live": True}

    @router.get("/v1/health/ready", summary="Readiness (NIM)")
    @answers(NotReadyError, example={"object": "health.response", "message": "ready", "ready": True})
    async def ready() -> ReadyHealth:
        """200 when every model answers as it did when it was built."""
        await server.check_ready()
        return {"object": "health.response", "message": "ready", "ready": True}

    @router.get("/v1/version", summary="Version (NIM)")
    @answers(example={"release": __version__, "api": "1"})
    async def version() -> Version:
        """This server's, and that of the API, which its paths begin with."""
        return {"release": __version__, "api": "1"}

    add_metrics(router, "/v1/metrics", server)
    router.include(models_router(models))
    return router


_RANKING_EXAMPLE = Example(
    {"query": {"text": QUERY}, "passages": [{"text": text} for text in DOCUMENTS]},
    {
        "rankings": [{"index": 1, "logit": 4.3381}, {"index": 0, "logit": -4.3767}],
        "usage": token_usage(RERANK_TOKENS),
    },
)
RANKING: Route[Any] = Route(
    "/v1/ranking", "Rerank (NIM)", RankingRequest, RankingResponse, _parse_ranking, rank, _RANKING_EXAMPLE
)


def dialect(models: Models, server: WholeServer) -> Dialect:
    """The dialect of NVIDIA's NIM, with routes that read the served models and their state."""
    embeddings: Route[Any] = Route(
        "/v1/embeddings",
        "Embed (NIM)",
        EmbeddingsRequest,
        EmbeddingResponse,
        parser(EmbeddingsRequest),
        create_embeddings,
        Example({"input": TEXTS, "input_type": "passage"}, ANSWER_EXAMPLE),
        has_report=True,
        octet_headers=OCTET_HEADERS,
    )
    hosted: Route[Any] = Route(
        "/v1/retrieval/{model:path}/reranking",
        "Rerank (NIM, hosted)",
        RankingRequest,
        RankingResponse,
        _parse_hosted,
        rank_hosted,
        _RANKING_EXAMPLE,
        parse_for=lambda request: partial(_parse_hosted, named=request.path_params["model"]),
    )
    return Dialect(
        "nim",
        "NVIDIA NIM",
        (embeddings, RANKING, hosted),
        error_form,
        Problem,
        _reads(models, server),
        probes=("/v1/health/live", "/v1/health/ready"),
        metrics_path="/v1/metrics",
    )
