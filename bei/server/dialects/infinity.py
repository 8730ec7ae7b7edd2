"""Infinity's API, under ``/infinity``: no ``/v1`` in front, documents as plain strings, numbers as errors' codes.

Reference: github.com/michaelfeil/infinity, ``libs/infinity_emb/infinity_emb/fastapi_schemas``; the client
``infinity_client``, which always sends every field.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from bei.errors import BeiError, EngineDeadError, MalformedRequestError, ModelNotFoundError
from bei.server.dialects.base import Dialect, StatusErrorBody, StatusErrorDetail, add_metrics
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import (
    CREATED,
    DOCUMENTS,
    EMBEDDER,
    LABEL_SCORES,
    QUERY,
    RERANK_TOKENS,
    RERANKER,
    TEXTS,
    UUID,
    Example,
    sorted_documents,
    token_usage,
)
from bei.server.endpoint.field_schema import Text, Texts, TextsOfPairs
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.inference import RankedText, embedded, ranked, ranking
from bei.server.endpoint.models import Models
from bei.server.endpoint.parse import parser
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered, agreed
from bei.server.endpoint.vector_encoding import OCTET_HEADERS, VectorForm
from bei.server.http.routing import ApiRouter
from bei.server.routes import classify
from bei.server.routes.openai_embeddings import ANSWER_EXAMPLE, AROUND_BYTES, EmbeddingResponse, Usage, render, usage
from bei.server.status.whole_server import WholeServer
from bei.service.call import ModelInput
from bei.service.service import InferenceService
from bei.tasks.embed import EmbedTask

# What Infinity calls the tasks.
_CAPABILITIES = {"embed": "embed", "rerank": "rerank", "classify": "classify"}


class ValidationDetail(TypedDict):
    """What is wrong, and where."""

    loc: list[str]
    msg: str
    type: str


class ValidationErrors(TypedDict):
    """The error of a body of a wrong form."""

    detail: list[ValidationDetail]


class EmbeddingsRequest(Tiered, kw_only=True):
    """``dimensions`` 0: all. ``output_dimension`` is what LiteLLM's provider calls them."""

    input: Text | Texts
    model: Model | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=0)] = 0
    output_dimension: Dimensions | None = None
    modality: Literal["text"] = "text"
    user: str | None = None


class EmbeddingsResponse(EmbeddingResponse):
    """OpenAI's, with what Infinity says beside it."""

    id: str
    created: int


class RerankRequest(Tiered, kw_only=True):
    """``top_n`` null: all."""

    query: str
    documents: TextsOfPairs
    model: Model | None = None
    return_documents: bool = False
    raw_scores: bool = False
    top_n: Annotated[int, Meta(ge=1)] | None = None


class RerankResponse(TypedDict):
    """Infinity's."""

    object: Literal["rerank"]
    results: list[RankedText]
    model: str
    usage: Usage
    id: str
    created: int


class Stats(TypedDict):
    """What waits for a model."""

    queue_fraction: float
    queue_absolute: int
    results_pending: int
    batch_size: int


class ServedModel(TypedDict):
    """One model."""

    id: str
    stats: Stats
    object: Literal["model"]
    owned_by: Literal["infinity"]
    created: int
    backend: str
    capabilities: list[str]
    embedding_dtype: Literal["float32"]
    dtype: str
    revision: str | None
    lengths_via_tokenize: bool
    device: str


class ModelList(TypedDict):
    """Every served model."""

    object: Literal["list"]
    data: list[ServedModel]


class Health(TypedDict):
    """The time, in seconds since the epoch."""

    unix: float


class ClassifyRequest(Tiered, kw_only=True):
    """A batch of texts."""

    input: Texts
    model: Model | None = None
    raw_scores: bool = False


async def create_embeddings(body: EmbeddingsRequest, context: RequestContext) -> Reply:
    """Embed texts, in their order: vectors of unit length."""
    texts: list[ModelInput] = [body.input] if isinstance(body.input, str) else [*body.input]
    form = VectorForm(is_base64=body.encoding_format == "base64")
    service = context.able("embed", body.model)
    dimensions = agreed(body, "dimensions", "output_dimension") if body.dimensions else body.output_dimension
    asked = EmbedTask(texts, dimensions=dimensions, normalize=True, param="input")  # whatever the checkpoint says
    found = await embedded(context, service, asked, forms=[form], around_bytes=AROUND_BYTES)
    return found.reply({**render(found.answer, service.name, form), **_made("infinity")})


async def rank(body: RerankRequest, context: RequestContext) -> Reply:
    """Score documents against a query, best first."""
    service = context.able("rerank", body.model)
    scores = await ranked(context, service, body.query, body.documents, param="documents", raw=body.raw_scores)
    results = ranking(scores, body.top_n, body.documents if body.return_documents else None, is_score_first=True)
    content = {"object": "rerank", "results": results, "model": service.name, "usage": usage(scores.num_tokens)}
    return Reply({**content, **_made("infinity")}, scores.truncated)


async def classify_texts(body: ClassifyRequest, context: RequestContext) -> Reply:
    """All labels of each text, best first."""
    asked = classify.ClassifyRequest(input=body.input, model=body.model, raw_scores=body.raw_scores)
    return await classify.classify_texts(asked, context)


def _made(name: str) -> dict[str, object]:
    return {"id": f"{name}-{uuid.uuid4()}", "created": int(time.time())}


def error_form(error: BeiError, status: int, _: str) -> tuple[int, object]:
    """Bodies of a wrong form are refused as pydantic does it."""
    if isinstance(error, MalformedRequestError):
        place = ["body"] if error.param is None else ["body", error.param]
        return 422, ValidationErrors(detail=[ValidationDetail(loc=place, msg=str(error), type="value_error")])
    if isinstance(error, ModelNotFoundError):
        status = 400
    param = getattr(error, "param", None)
    return status, StatusErrorBody(
        error=StatusErrorDetail(message=str(error), type=type(error).__name__, param=param, code=status)
    )


_MODELS_EXAMPLE = {
    "object": "list",
    "data": [
        {
            "id": EMBEDDER,
            "stats": {"queue_fraction": 0.0, "queue_absolute": 0, "results_pending": 0, "batch_size": 128},
            "object": "model",
            "owned_by": "infinity",
            "created": CREATED,
            "backend": "cpu",
            "capabilities": ["embed"],
            "embedding_dtype": "float32",
            "dtype": "bf16",
            "revision": None,
            "lengths_via_tokenize": True,
            "device": "cpu",
        }
    ],
}


def _reads(models: Models, server: WholeServer) -> ApiRouter:
    router = ApiRouter()
    add_metrics(router, "/metrics", server)

    @router.get("/models", summary="List the served models (Infinity)")
    @answers(example=_MODELS_EXAMPLE)
    async def list_models() -> ModelList:
        """Every served model, with what waits for it."""
        return {
            "object": "list",
            "data": [_described(name, service, models.started_s) for name, service in models.listed],
        }

    @router.get("/health", summary="Liveness (Infinity)")
    @answers(EngineDeadError, example={"unix": CREATED + 60.25})
    async def health() -> Health:
        """The time; 503 where a thread of a model has died."""
        await server.check_alive()
        return {"unix": time.time()}

    return router


def _described(name: str, service: InferenceService, created: int) -> ServedModel:
    manifest, waiting = service.manifest, service.num_waiting
    return {
        "id": name,
        "stats": {
            "queue_fraction": waiting / max(1, manifest.max_batch_size),
            "queue_absolute": waiting,
            "results_pending": waiting,
            "batch_size": manifest.max_batch_size,
        },
        "object": "model",
        "owned_by": "infinity",
        "created": created,
        "backend": manifest.target,
        "capabilities": [_CAPABILITIES[task] for task in manifest.tasks if task in _CAPABILITIES],
        "embedding_dtype": "float32",
        "dtype": manifest.precision,
        "revision": manifest.source.revision,
        "lengths_via_tokenize": True,
        "device": manifest.target,
    }


_MADE_EXAMPLE = {"id": f"infinity-{UUID}", "created": CREATED}
_RERANK_EXAMPLE = Example(
    {"query": QUERY, "documents": DOCUMENTS, "return_documents": True},
    {
        "object": "rerank",
        "results": sorted_documents("relevance_score", "document"),
        "model": RERANKER,
        "usage": token_usage(RERANK_TOKENS),
        **_MADE_EXAMPLE,
    },
)


def dialect(models: Models, server: WholeServer) -> Dialect:
    """The dialect of Infinity, with routes that read the served models and their state."""
    routes: tuple[Route[Any], ...] = (
        Route(
            "/embeddings",
            "Embed (Infinity)",
            EmbeddingsRequest,
            EmbeddingsResponse,
            parser(EmbeddingsRequest),
            create_embeddings,
            Example({"input": TEXTS}, {**ANSWER_EXAMPLE, **_MADE_EXAMPLE}),
            has_report=True,
            octet_headers=OCTET_HEADERS,
        ),
        Route(
            "/rerank",
            "Rerank (Infinity)",
            RerankRequest,
            RerankResponse,
            parser(RerankRequest),
            rank,
            _RERANK_EXAMPLE,
        ),
        Route(
            "/classify",
            "Classify (Infinity)",
            ClassifyRequest,
            classify.ClassifyResponse,
            parser(ClassifyRequest),
            classify_texts,
            classify.example_of("classify", LABEL_SCORES),
        ),
    )
    return Dialect(
        "infinity",
        "Infinity",
        routes,
        error_form,
        (StatusErrorBody, ValidationErrors),
        _reads(models, server),
        probes=("/health",),
        metrics_path="/metrics",
    )
