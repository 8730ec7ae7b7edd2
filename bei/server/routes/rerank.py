"""``/rerank``, ``/v1/rerank``, ``/v2/rerank``: the field of the texts says which dialect a body is, on every path.

    texts        text-embeddings-inference and BEI: a bare list with ``score``
    documents    Cohere, Jina, vLLM, LiteLLM, Infinity: an object whose ``results`` have ``relevance_score``

Queries and documents may be images where a model compares vectors of them. The dialects differ in what ``document`` is
in a result: see ``document_of``. (SGLang's bare list for ``documents`` cannot be served beside them.)
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec
from msgspec import UNSET, Meta
from typing_extensions import NotRequired

from bei.errors import InvalidRequestError
from bei.image.source import ImageInput, MixedInput, placed
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import (
    CREATED,
    DOCUMENTS,
    HEX,
    QUERY,
    RERANK_TOKENS,
    RERANKER,
    Example,
    sorted_documents,
    token_usage,
)
from bei.server.endpoint.field_schema import Limits, TextsOfPairs, limits, limits_of_inputs, without
from bei.server.endpoint.inference import order_of, ranking
from bei.server.endpoint.input_parts import ComparedInput, image_beside
from bei.server.endpoint.parse import parser, parser_by_field, too_many_inputs, with_unique_keys
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import Items, Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.scoring_fields import Label, Mode, Weights, pair_scores, scoring_model
from bei.server.endpoint.shared_fields import PairControls, agreed
from bei.server.routes.openai_embeddings import Usage, usage
from bei.service.admission import Ticket
from bei.service.call import ModelRequest
from bei.service.service import InferenceService
from bei.tasks.classify import Scores
from bei.tasks.compare import Compared, read_apart
from bei.tasks.rerank import num_around, pairs_to_read
from bei.tokenizer.encoder import EncodingOptions
from bei.utils.json_keys import key_twice

_DOCUMENTS_OF_A_SEARCH_UNIT = 100  # Cohere's unit of billing

_MOST_LOOKED_FOR = 2_000_000  # fields times documents: a tenth of a second

_RESULT_BYTES = 50  # of JSON, about: {"index":123,"relevance_score":0.12345678},

Document: TypeAlias = str | dict[str, Any]
TopN: TypeAlias = Annotated[int, Meta(ge=0, description="Null or 0: all.")]

_DOCUMENT = {"type": ["string", "object"]}
_HAS_TEXT = {**_DOCUMENT, "properties": {"text": {"type": "string"}}, "required": ["text"]}
# Objects have a text, unless fields are named: which those must have, a schema cannot say.
_TEXT_UNLESS_NAMED = {
    "description": "Objects among documents have a text, unless rank_fields names other fields.",
    "anyOf": [
        {"required": ["rank_fields"], "properties": {"rank_fields": {"type": "array", "minItems": 1}}},
        {"properties": {"documents": {"items": _HAS_TEXT}}},
    ],
}


# What a request with texts lacks on the same paths.
_OF_DOCUMENTS = "send documents in the place of texts"


class RerankControls(PairControls, kw_only=True):
    """The fields of both dialects."""

    instruction: Annotated[str | None, Meta(description="vLLM's; for models with a template that has a slot.")] = None
    instruct: Annotated[str | None, Meta(description="SGLang's word for instruction.")] = None
    label: Label | None = None
    score_mode: Mode | None = None
    score_weights: Weights | None = None


class TextsRequest(RerankControls, kw_only=True):
    """TEI's and BEI's."""

    query: str
    texts: TextsOfPairs
    return_text: bool = False
    # TEI knows none; LiteLLM's provider for it sends it.
    top_n: TopN | None = None
    return_documents: Annotated[Refused, refused("send return_text", False)] = UNSET
    rank_fields: Annotated[Refused, refused(_OF_DOCUMENTS, False, {}, [])] = UNSET
    max_tokens_per_doc: Annotated[Refused, refused(_OF_DOCUMENTS)] = UNSET


class DocumentsRequest(RerankControls, kw_only=True):
    """Cohere's, Jina's, vLLM's, Infinity's. Objects have a `text`, or the fields that `rank_fields` names, or an image:
    `{"image": ...}` or `{"content": [part]}`, or both."""

    query: str | ComparedInput
    # Decoded in a second step, one by one: objects may have fields by the hundred thousand.
    documents: Annotated[list[Annotated[msgspec.Raw, Meta(extra_json_schema=_DOCUMENT)]], limits_of_inputs]
    top_n: TopN | None = None
    return_documents: bool | None = None
    rank_fields: Annotated[list[str], limits(uniqueItems=True)] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0, description="Without special tokens. Null or 0: all.")] | None = None
    return_text: Annotated[Refused, refused("send return_documents", False)] = UNSET

    _limits: ClassVar[Limits] = (_TEXT_UNLESS_NAMED,)


class Rank(TypedDict):
    """One text in TEI's form; ranks are sorted by descending score."""

    index: int
    score: float
    text: NotRequired[str]


class DocumentObject(TypedDict, total=False):
    """A document, as most clients take it: a text, an image as it came or, of several, the parts."""

    text: str
    image: str
    content: list[dict[str, str]]


class Result(TypedDict):
    """One document; results are sorted by descending score. `document` is a plain string only in Infinity's form."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentObject | str]


class ApiVersion(TypedDict):
    """The version in the path of the request."""

    version: str


class BilledUnits(TypedDict):
    """Cohere's: one for each hundred documents begun."""

    search_units: int


class RerankMeta(TypedDict):
    """Cohere's."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(TypedDict):
    """The fields of all dialects with ``documents``."""

    id: str
    object: Literal["rerank", "list"]
    created: int
    model: str
    results: list[Result]
    usage: Usage
    meta: RerankMeta


class ParsedDocuments(NamedTuple):
    """A request, and what the model reads of its documents."""

    body: DocumentsRequest
    documents: list[Compared]


ParsedRequest: TypeAlias = TextsRequest | ParsedDocuments

_parse_fields, _parse_newer_fields, _parse_documents = (
    with_unique_keys(read, "score_weights")
    for read in (
        parser_by_field(texts=TextsRequest, documents=DocumentsRequest),
        parser_by_field(documents=DocumentsRequest, texts=TextsRequest),
        parser(DocumentsRequest),
    )
)
_document_decoder: msgspec.json.Decoder[Document] = msgspec.json.Decoder(Document)
_part_decoder = msgspec.json.Decoder(ComparedInput)
_PART_FIELDS = frozenset(ComparedInput.__struct_fields__)


def parse(
    content: bytes, max_inputs: int, read: Callable[[bytes], TextsRequest | DocumentsRequest] = _parse_fields
) -> ParsedRequest:
    """A body in either dialect, or in those that ``read`` reads. Raises InvalidRequestError, also for more than
    ``max_inputs`` documents."""
    body = read(content)
    if isinstance(body, TextsRequest):
        return body
    if len(body.documents) > max_inputs:
        raise too_many_inputs(len(body.documents), max_inputs, "documents")
    _check_fields(body.rank_fields or (), len(body.documents))
    documents = [_decoded(index, raw, body.rank_fields) for index, raw in enumerate(body.documents)]
    body.documents = []  # or they would keep the whole content
    return ParsedDocuments(body, documents)


def _check_fields(rank_fields: Seq[str], num_documents: int) -> None:
    """Raise InvalidRequestError for fields that stand twice, and for too many, each of which is looked for in each
    document."""
    if len({*rank_fields}) < len(rank_fields):
        twice = next(name for name, count in Counter(rank_fields).items() if count > 1)
        raise InvalidRequestError(f"rank_fields has {twice[:40]!r} twice: leave one out.", "rank_fields")
    if len(rank_fields) * num_documents > _MOST_LOOKED_FOR:
        raise InvalidRequestError(
            f"{len(rank_fields)} rank_fields of {num_documents} documents are too many at once: send fewer.",
            "rank_fields",
        )


def _decoded(index: int, raw: msgspec.Raw, rank_fields: Seq[str] | None) -> Compared:
    try:
        document = _document_decoder.decode(raw)
        if isinstance(document, dict) and (twice := key_twice(bytes(raw))) is not None:
            raise InvalidRequestError(f"documents {index} has the key {twice[:40]!r} twice: send it once.", "documents")
        if isinstance(document, dict) and not rank_fields and _is_part(document):
            return placed(_part_decoder.decode(raw).compared("documents"), index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The request is not valid: {error} - in `$.documents[{index}]`."
        raise InvalidRequestError(message, "documents") from error
    return text_of(index, document, rank_fields)


def _is_part(document: dict[str, Any]) -> bool:
    """True of an object in a form of images, or with an image beside its text: others are texts with names of their
    own."""
    if "text" in document:
        return image_beside(document) is not None
    return bool(document) and document.keys() <= _PART_FIELDS


async def rank(request: ParsedRequest, context: RequestContext, path: str) -> Reply:
    """Score texts or documents against a query, best first: by a reranker, a classifier's `label`, or a comparison of
    an embedder's vectors (`score_mode`; a model for late interaction needs none), of images too.

    `texts` (TEI, BEI) gives a bare list with `score`; `documents` (Cohere, Jina, vLLM, Infinity) an object whose
    `results` have `relevance_score`.
    """
    if isinstance(request, TextsRequest):
        return await rank_texts(request, context)
    body, documents = request
    service, answer = await scored(body, documents, context)
    return Reply(render_results(answer, documents, body, service.name, path), answer.truncated)


async def scored(
    body: DocumentsRequest, documents: Seq[Compared], context: RequestContext
) -> tuple[InferenceService, Scores]:
    """The model that scores ``documents`` as ``body`` says, and their scores in their order."""
    service = _checked(body, context)
    context.check_count(documents, "documents")
    query = body.query if isinstance(body.query, str) else body.query.compared("query")
    ticket = await _admitted(context, service, body, query, documents)
    shorter, cut = await shortened(service, documents, body.max_tokens_per_doc, ticket)
    answer = await _scored(service, body, query, shorter, ticket)
    return service, msgspec.structs.replace(answer, truncated=sorted(cut.union(answer.truncated)))


async def rank_texts(body: TextsRequest, context: RequestContext) -> Reply:
    """Score texts against a query, best first: a bare list."""
    service = _checked(body, context)
    context.check_count(body.texts, "texts")
    ticket = await _admitted(context, service, body, body.query, body.texts)
    answer = await _scored(service, body, body.query, body.texts, ticket)
    texts = body.texts if body.return_text else None
    return Reply(ranking(answer, body.top_n, texts, score="score", document="text"), answer.truncated)


def _checked(body: RerankControls, context: RequestContext) -> InferenceService:
    service = scoring_model(body, context)
    body.settled()
    return service


async def _admitted(
    context: RequestContext,
    service: InferenceService,
    body: TextsRequest | DocumentsRequest,
    query: Compared,
    documents: Seq[Compared],
) -> Ticket:
    if body.score_mode is None:
        instruction = agreed(body, "instruction", "instruct")
        pairs = await pairs_to_read(service, [(query, one) for one in documents], instruction)
        return context.admit(service, pairs, num_around=num_around(service, instruction))
    read = read_apart(service, [query, *documents])
    context.check_inputs([query], "query")  # read by themselves
    context.check_inputs(documents, "texts" if isinstance(body, TextsRequest) else "documents")
    return context.admit(service, read)


async def _scored(
    service: InferenceService,
    body: TextsRequest | DocumentsRequest,
    query: Compared,
    documents: Seq[Compared],
    ticket: Ticket,
) -> Scores:
    instruction = agreed(body, "instruction", "instruct")
    pairs = [(query, one) for one in documents]
    return await pair_scores(body, service, pairs, ticket, raw=body.is_raw(), instruction=instruction)


def text_of(index: int, document: Document, rank_fields: Seq[str] | None) -> str:
    """The text of ``document``, number ``index``: of an object the fields in ``rank_fields``, or ``text``, a line each.

    Raises InvalidRequestError.
    """
    if isinstance(document, str):
        return document
    fields = rank_fields or ["text"]
    values = [document[field] for field in fields if field in document]
    if not values or not all(isinstance(value, str) for value in values):
        raise InvalidRequestError(
            f"documents {index} must be a text, or an object with a text in {' or '.join(fields)} "
            "(rank_fields names others).",
            "documents",
        )
    return "\n".join(values)


async def shortened(
    service: InferenceService, documents: Seq[Compared], max_tokens: int | None, ticket: Ticket
) -> tuple[list[Compared], set[int]]:
    """``documents``, each text cut to its first ``max_tokens`` tokens, special ones not counted, as in vLLM; and the
    indices of those that were cut."""
    texts = {index: one for index, one in enumerate(documents) if isinstance(one, str)}
    if max_tokens and any(isinstance(one, MixedInput) for one in documents):
        message = "max_tokens_per_doc is of texts, and a document has an image beside its text: leave it out."
        raise InvalidRequestError(message, "max_tokens_per_doc")
    if not texts or not max_tokens or max_tokens >= service.manifest.max_seq_len:
        return list(documents), set()
    options = EncodingOptions(
        truncate=True, direction="right", max_tokens=max_tokens, add_special_tokens=False, with_spans=True
    )
    # A text without tokens is an error by itself, and none in a pair.
    encodings = await service.encode(ModelRequest([*texts.values()], options, failed={}), ticket=ticket)
    shorter = list(documents)
    cut = set()
    for (index, text), encoding in zip(texts.items(), encodings, strict=True):
        if encoding.truncated:
            assert encoding.spans is not None  # they were asked for
            shorter[index] = text[: int(encoding.spans.offsets[:, 1].max())]
            cut.add(index)
    return shorter, cut


def render_results(
    scores: Scores, documents: Seq[Compared], body: DocumentsRequest, model: str, path: str
) -> dict[str, object]:
    """The RerankResponse of all dialects with ``documents``."""
    order = order_of(scores)[: body.top_n or None]

    def result_of(index: int) -> Result:
        result: Result = {"index": index, "relevance_score": scores.values[index, 0]}
        document = document_of(documents[index], body, path)
        return result if document is None else {**result, "document": document}

    shown = (documents[index] for index in order if document_of(documents[index], body, path) is not None)
    num_bytes = len(order) * _RESULT_BYTES + sum(len(one) if isinstance(one, str) else one.held_bytes for one in shown)
    results = Items(len(order), num_bytes, lambda start, stop: [result_of(index) for index in order[start:stop]])
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "object": _object_on(path),
        "created": int(time.time()),
        "model": model,
        "results": results,
        "usage": usage(scores.num_tokens),
        "meta": {
            "api_version": {"version": _version_on(path)},
            "billed_units": {"search_units": math.ceil(len(documents) / _DOCUMENTS_OF_A_SEARCH_UNIT)},
        },
    }


def _object_on(path: str) -> str:
    return "rerank" if path == "/rerank" else "list"


def _version_on(path: str) -> str:
    return "2" if path.startswith("/v2") else "1"


def document_of(one: Compared, body: DocumentsRequest, path: str) -> DocumentObject | str | None:
    """The ``document`` of a result; None: the result has none.

    Infinity's client, which alone sends ``raw_scores``, gets a plain string, and only where it asks for documents.
    vLLM's, Jina's and Cohere's v1 get an object, unless they say no; Cohere's v2 only where a client says yes, as all
    do of images.
    """
    if not isinstance(one, str):
        return shown_image(one) if body.return_documents else None
    if body.raw_scores is not None:
        return one if body.return_documents else None
    by_default = not path.startswith("/v2")
    return {"text": one} if (by_default if body.return_documents is None else body.return_documents) else None


def shown_image(one: ImageInput | MixedInput) -> DocumentObject:
    """A document with images, as they came."""
    if isinstance(one, ImageInput):
        return {"image": str(one.content)}
    if len(one.images) == 1:
        return {"text": one.text, "image": str(one.images[0].content)}
    parts = one.parts
    return {"content": [{"text": part} if isinstance(part, str) else {"image": str(part.content)} for part in parts]}


def _route(path: str, summary: str, max_inputs: int) -> Route[ParsedRequest]:
    async def handle(request: ParsedRequest, context: RequestContext) -> Reply:
        return await rank(request, context, path)

    handle.__doc__ = rank.__doc__
    fields = _parse_fields if path == "/rerank" else _parse_newer_fields
    read, example = partial(parse, max_inputs=max_inputs, read=fields), documents_example(path)
    return Route(path, summary, _REQUESTS, (list[Rank], RerankResponse), read, handle, example)


def documents_example(path: str) -> Example:
    """What Cohere, Jina and vLLM ask and get on ``path``."""
    answer = {
        "id": f"rerank-{HEX}",
        "object": _object_on(path),
        "created": CREATED,
        "model": RERANKER,
        "results": sorted_documents("relevance_score", "document", is_object=True),
        "usage": token_usage(RERANK_TOKENS),
        "meta": {"api_version": {"version": _version_on(path)}, "billed_units": {"search_units": 1}},
    }
    return Example({"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}, answer)


# What TEI and BEI ask and get.
TEXTS_EXAMPLE = Example({"query": QUERY, "texts": DOCUMENTS, "return_text": True}, sorted_documents("score", "text"))


_REQUESTS = (Annotated[TextsRequest, without("documents")], Annotated[DocumentsRequest, without("texts")])


def documents_routes(max_inputs: int, request: Any = DocumentsRequest) -> Iterator[Route[ParsedRequest]]:
    """``routes`` of servers that know ``documents`` alone. ``request``: as /openapi.json describes it."""
    read = partial(parse, max_inputs=max_inputs, read=_parse_documents)
    for route in routes(max_inputs):
        example = documents_example(route.path)
        yield replace(route, request=request, response=RerankResponse, parse=read, example=example)


def routes(max_inputs: int) -> tuple[Route[ParsedRequest], ...]:
    """The routes of a server whose requests have at most ``max_inputs`` inputs."""
    return (
        replace(_route("/rerank", "Rerank (TEI, BEI, Infinity, vLLM)", max_inputs), example=TEXTS_EXAMPLE),
        _route("/v1/rerank", "Rerank (Jina, Cohere v1, vLLM)", max_inputs),
        _route("/v2/rerank", "Rerank (Cohere v2)", max_inputs),
    )
