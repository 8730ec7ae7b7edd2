"""Voyage AI's API, under ``/voyage``: results of a rerank stand under ``data``, and errors are a ``detail``.

Reference: docs.voyageai.com, "Text embeddings", "Rerankers"; the client ``voyageai``, which asks for base64 and unpacks
it as ``output_dtype`` says.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from bei.errors import BeiError, MalformedRequestError, RouteNotFoundError
from bei.server.dialects import voyage_context, voyage_multimodal
from bei.server.dialects.base import Dialect
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import (
    DOCUMENTS,
    NUM_TOKENS,
    QUERY,
    RERANK_TOKENS,
    RERANKER,
    TEXTS,
    Example,
    sorted_documents,
)
from bei.server.endpoint.field_schema import Text, Texts, TextsOfPairs
from bei.server.endpoint.inference import RankedText, embedded, ranked, ranking
from bei.server.endpoint.parse import parser
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered
from bei.server.endpoint.vector_encoding import OCTET_HEADERS, VectorForm, dtype_of
from bei.server.routes.openai_embeddings import ANSWER_EXAMPLE, AROUND_BYTES, EmbeddingItem, TokensUsage, render
from bei.service.call import ModelInput
from bei.tasks.embed import EmbedTask
from bei.tokenizer.encoder import EncodingOptions


class Detail(TypedDict):
    """An error."""

    detail: str


class EmbeddingsRequest(Tiered, kw_only=True):
    """``input_type`` null: the model's default prompt. ``truncation`` null (LlamaIndex sends it): true."""

    input: Text | Texts
    model: Model | None = None
    input_type: Literal["query", "document"] | None = None
    truncation: bool | None = None
    output_dimension: Dimensions | None = None
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = None
    encoding_format: Literal["base64"] | None = None


class EmbeddingsResponse(TypedDict):
    """In the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: TokensUsage


class RerankRequest(Tiered, kw_only=True):
    """``top_k`` null: all."""

    query: str
    documents: TextsOfPairs
    model: Model | None = None
    top_k: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    truncation: bool | None = None


class RerankResponse(TypedDict):
    """Voyage's."""

    object: Literal["list"]
    data: list[RankedText]
    model: str
    usage: TokensUsage


async def create_embeddings(body: EmbeddingsRequest, context: RequestContext) -> Reply:
    """Embed texts, in their order."""
    texts: list[ModelInput] = [body.input] if isinstance(body.input, str) else [*body.input]
    form = VectorForm(dtype_of(body.output_dtype or "float", "output_dtype"), body.encoding_format == "base64")
    service = context.able("embed", body.model)
    asked = EmbedTask(
        texts,
        EncodingOptions(truncate=body.truncation is not False),
        input_type=body.input_type,
        dimensions=body.output_dimension,
        param="input",
        dimensions_param="output_dimension",
    )
    found = await embedded(context, service, asked, forms=[form], around_bytes=AROUND_BYTES)
    content = {**render(found.answer, service.name, form), "usage": {"total_tokens": found.answer.num_tokens}}
    return found.reply(content)


async def rank(body: RerankRequest, context: RequestContext) -> Reply:
    """Score documents against a query, best first."""
    service, options = context.able("rerank", body.model), EncodingOptions(truncate=body.truncation is not False)
    scores = await ranked(context, service, body.query, body.documents, param="documents", options=options)
    content = {
        "object": "list",
        "data": ranking(scores, body.top_k, body.documents if body.return_documents else None),
        "model": service.name,
        "usage": {"total_tokens": scores.num_tokens},
    }
    return Reply(content, scores.truncated)


def error_form(error: BeiError, status: int, _: str) -> tuple[int, object]:
    """Voyage has 400 for whatever is wrong with a request, but 422 for bodies of a wrong form."""
    if isinstance(error, MalformedRequestError):
        status = 422
    elif status in (404, 413) and not isinstance(error, RouteNotFoundError):
        status = 400
    return status, Detail(detail=str(error))


_RERANK_EXAMPLE = Example(
    {"query": QUERY, "documents": DOCUMENTS, "top_k": 2},
    {
        "object": "list",
        "data": sorted_documents("relevance_score"),
        "model": RERANKER,
        "usage": {"total_tokens": RERANK_TOKENS},
    },
)

DIALECT = Dialect(
    "voyage",
    "Voyage",
    (
        Route(
            "/embeddings",
            "Embed (Voyage)",
            EmbeddingsRequest,
            EmbeddingsResponse,
            parser(EmbeddingsRequest),
            create_embeddings,
            Example(
                {"input": TEXTS, "input_type": "document"}, {**ANSWER_EXAMPLE, "usage": {"total_tokens": NUM_TOKENS}}
            ),
            has_report=True,
            octet_headers=OCTET_HEADERS,
        ),
        Route(
            "/rerank", "Rerank (Voyage)", RerankRequest, RerankResponse, parser(RerankRequest), rank, _RERANK_EXAMPLE
        ),
        voyage_context.ROUTE,
        voyage_multimodal.ROUTE,
    ),
    error_form,
    Detail,
    roots=("", "/v1"),
)
