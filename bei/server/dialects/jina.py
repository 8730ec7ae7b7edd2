"""Jina's API, under ``/jina``: texts as strings or objects, documents given back as they came, a code for each error.

Reference: api.jina.ai/openapi.json, version 2026.02.03 (``EmbeddingsV3Request``, ``RerankerV3Request``,
``EmbeddingsV3ZeroShotClassificationRequest``, ``ErrorResponse``, ``HTTPValidationError``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec
from msgspec import UNSET, Meta
from typing_extensions import NotRequired

from bei import errors
from bei.image.source import placed
from bei.server.dialects import jina_multi_vector
from bei.server.dialects.base import Dialect
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import DOCUMENTS, QUERY, RERANK_TOKENS, RERANKER, TEXTS, Example, sorted_documents
from bei.server.endpoint.field_schema import Text as NonEmptyText
from bei.server.endpoint.field_schema import limits, limits_of_inputs
from bei.server.endpoint.inference import order_of
from bei.server.endpoint.input_parts import ComparedInput
from bei.server.endpoint.parse import parser
from bei.server.endpoint.refused_fields import QueryLimit
from bei.server.endpoint.render import Items, Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered
from bei.server.endpoint.vector_encoding import OCTET_HEADERS
from bei.server.routes import openai_embeddings, rerank, zero_shot
from bei.server.routes.openai_embeddings import TokensUsage
from bei.server.routes.zero_shot import LabelsRequest, LabelsResponse
from bei.tasks.compare import Compared

_RESULT_BYTES = 50

_FORMS = ("float", "base64", "binary", "ubinary")
FormName: TypeAlias = Literal["float", "base64", "binary", "ubinary"]
# Several times the same is one form.
FormNames: TypeAlias = Annotated[list[FormName], limits(anyOf=[{"items": {"const": form}} for form in _FORMS])]
NotAsked: TypeAlias = Annotated[bool, limits(enum=[False])]


TextOrImage: TypeAlias = NonEmptyText | ComparedInput | Annotated[list[NonEmptyText | ComparedInput], limits_of_inputs]


class CodedError(TypedDict):
    """An error. ``code`` is Jina's where it has one for it, else that of docs/reference.md in capitals."""

    detail: str
    code: str


class FieldError(TypedDict):
    """What is wrong, and where: ``body -> top_n``."""

    field: str
    message: str
    type: str


class FieldErrors(TypedDict):
    """The error of a body of a wrong form."""

    detail: str
    errors: list[FieldError]


class EmbeddingsRequest(Tiered, kw_only=True):
    """``truncate`` null or false: a text that is too long is an error. ``encoding_type`` is LlamaIndex's word for
    ``embedding_type``."""

    input: TextOrImage
    model: Model | None = None
    task: Annotated[str | None, Meta(description="retrieval.query, retrieval.passage, or the name of a prompt.")] = None
    input_type: Literal["query", "document"] | None = None
    embedding_type: FormName | FormNames | None = None
    encoding_type: FormName | None = None
    dimensions: Dimensions | None = None
    normalized: bool | None = True
    truncate: bool | None = False
    late_chunking: bool | None = False
    return_multivector: NotAsked | None = False
    return_tokenized_input: NotAsked | None = False


class Document(ComparedInput, forbid_unknown_fields=False):
    """A document as an object. Other fields are the client's."""

    text: str | None = None


class RerankRequest(Tiered, kw_only=True):
    """``top_n`` null: all. ``truncation`` null: as the server is configured. ``max_doc_length`` null: the model's."""

    query: str | ComparedInput
    documents: Annotated[list[str | Document], limits_of_inputs]
    model: Model | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = True
    truncation: bool | None = None
    max_doc_length: Annotated[int, Meta(ge=1)] | None = None
    max_query_length: QueryLimit = UNSET
    return_embeddings: NotAsked | None = False


_parse_request = parser(RerankRequest)


class ParsedDocuments(NamedTuple):
    """A request, and what the model reads of its documents."""

    body: RerankRequest
    documents: list[Compared]


class Result(TypedDict):
    """By descending score. The document is a string or an object, as it came."""

    index: int
    relevance_score: float
    document: NotRequired[str | rerank.DocumentObject]


class RerankResponse(TypedDict):
    """Jina's."""

    model: str
    object: Literal["list"]
    usage: TokensUsage
    results: list[Result]


async def create_embeddings(body: EmbeddingsRequest, context: RequestContext) -> Reply:
    """Embed texts, in their order, of unit length unless `normalized` is false."""
    _refuse(body, "return_multivector", "ask /jina/v1/multi-vector")
    _refuse(body, "return_tokenized_input", "ask /tokenize")
    form = body.embedding_type
    asked = openai_embeddings.EmbeddingRequest(
        input=msgspec.Raw(b"null"),
        model=body.model,
        task=body.task,
        input_type=body.input_type,
        embedding_type=[*form] if isinstance(form, list) else form,
        encoding_type=body.encoding_type,
        dimensions=body.dimensions,
        normalized=body.normalized is not False,
        truncate=bool(body.truncate),
        late_chunking=body.late_chunking,
    )
    try:
        given = body.input if isinstance(body.input, list) else [body.input]
        context.check_count(given, "input")  # before they are looked at
        inputs = [one if isinstance(one, str) else one.compared("input") for one in given]
        return await openai_embeddings.create_embeddings(openai_embeddings.ParsedRequest(asked, inputs), context)
    except errors.InvalidRequestError as error:
        if error.param == "input_type" and body.input_type is None:
            error.param = "task"
        raise


def parse_documents(content: bytes) -> ParsedDocuments:
    """A body and its documents, which were read where the body was: of a long one off the event loop. Raises
    InvalidRequestError."""
    body = _parse_request(content)
    documents = [
        one if isinstance(one, str) else placed(one.compared("documents"), index)
        for index, one in enumerate(body.documents)
    ]
    return ParsedDocuments(body, documents)


async def rank(request: ParsedDocuments, context: RequestContext) -> Reply:
    """Score documents against a query, best first."""
    body, documents = request
    _refuse(body, "return_embeddings", "ask /v1/embeddings")
    asked = rerank.DocumentsRequest(
        query=body.query,
        documents=[],
        model=body.model,
        truncation=body.truncation,
        max_tokens_per_doc=body.max_doc_length,
    )
    service, scores = await rerank.scored(asked, documents, context)
    order, has_documents = order_of(scores)[: body.top_n], body.return_documents is not False

    def result_of(index: int) -> Result:
        result: Result = {"index": index, "relevance_score": scores.values[index, 0]}
        if has_documents:
            read = documents[index]
            if not isinstance(read, str):
                result["document"] = rerank.shown_image(read)
            else:
                result["document"] = read if isinstance(body.documents[index], str) else {"text": read}
        return result

    sizes = (len(one) if isinstance(one, str) else one.held_bytes for one in (documents[index] for index in order))
    num_bytes = len(order) * _RESULT_BYTES + has_documents * sum(sizes)
    content = {
        "model": service.name,
        "object": "list",
        "usage": {"total_tokens": scores.num_tokens},
        "results": Items(len(order), num_bytes, lambda start, stop: [result_of(index) for index in order[start:stop]]),
    }
    return Reply(content, scores.truncated)


def _refuse(body: msgspec.Struct, field: str, remedy: str) -> None:
    if getattr(body, field):
        raise errors.InvalidRequestError(f"{field} is not supported here: {remedy}.", field)


_CODES: Mapping[type[errors.BeiError], str] = {
    errors.InputTooLongError: "INPUT_TOKEN_LIMIT_EXCEEDED",
    errors.ModelNotFoundError: "INPUT_MODEL_NOT_FOUND",
    errors.RouteNotFoundError: "RESOURCE_NOT_FOUND",
    errors.OverloadedError: "RATE_CONCURRENCY_LIMIT_EXCEEDED",
    errors.DeadlineExceededError: "SERVICE_TIMEOUT",
    errors.ShuttingDownError: "SERVICE_UNAVAILABLE",
    errors.EngineDeadError: "SERVICE_UNAVAILABLE",
    errors.EngineError: "INTERNAL_ERROR",
    errors.NonFiniteOutputError: "INTERNAL_ERROR",
    errors.BeiError: "INTERNAL_ERROR",
}


def error_form(error: errors.BeiError, status: int, _: str) -> tuple[int, object]:
    """What is wrong with a field is a 422 that names it, but a text that is too long, or a model that there is not, a
    400. Request ids are left out: they would lead nowhere."""
    if isinstance(error, errors.InvalidRequestError) and not isinstance(error, errors.InputTooLongError):
        field = "body" if error.param is None else f"body -> {error.param}"
        problem = FieldError(field=field, message=str(error), type="value_error")
        return 422, FieldErrors(detail=str(error), errors=[problem])
    status = 400 if isinstance(error, errors.ModelNotFoundError) else status
    return status, CodedError(detail=str(error), code=_CODES.get(type(error), error.code.upper()))


_RERANK_EXAMPLE = Example(
    {"query": QUERY, "documents": DOCUMENTS, "top_n": 2},
    {
        "model": RERANKER,
        "object": "list",
        "usage": {"total_tokens": RERANK_TOKENS},
        "results": sorted_documents("relevance_score", "document"),
    },
)

DIALECT = Dialect(
    "jina",
    "Jina",
    (
        Route(
            "/v1/embeddings",
            "Embed (Jina)",
            EmbeddingsRequest,
            openai_embeddings.EmbeddingResponse,
            parser(EmbeddingsRequest),
            create_embeddings,
            Example({"input": TEXTS, "task": "retrieval.passage"}, openai_embeddings.ANSWER_EXAMPLE),
            has_report=True,
            octet_headers=OCTET_HEADERS,
        ),
        Route("/v1/rerank", "Rerank (Jina)", RerankRequest, RerankResponse, parse_documents, rank, _RERANK_EXAMPLE),
        Route(
            "/v1/classify",
            "Classify by labels of the request (Jina)",
            LabelsRequest,
            LabelsResponse,
            zero_shot.parse_labels,
            zero_shot.classify,
            zero_shot.LABELS_EXAMPLE,
        ),
        jina_multi_vector.ROUTE,
    ),
    error_form,
    (CodedError, FieldErrors),
)
