"""Cohere's API: ``/v1/embed`` and ``/v2/embed``, which have paths of their own, and all of it under ``/cohere``.

Reference: docs.cohere.com, "Embed", "Rerank", "Tokenize", "Detokenize"; the client ``cohere``, whose types read the
answers.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, cast

import msgspec
from msgspec import UNSET

from bei.config.settings import ServeConfig
from bei.errors import BeiError, InvalidRequestError, ModelNotFoundError
from bei.image.source import ImageInput
from bei.server.dialects.base import Dialect, adjusted
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import EMBEDDER, IDS, NUM_TOKENS, TEXTS, UUID, VECTORS, Example
from bei.server.endpoint.field_schema import Texts, exactly_one, limits, limits_of_inputs
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.inference import embedded
from bei.server.endpoint.input_parts import ImageText, JoinedInput, joined_parts
from bei.server.endpoint.models import Models
from bei.server.endpoint.parse import TokenId, parser
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import Items, Reply, items_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered
from bei.server.endpoint.vector_encoding import FLOATS, OCTET_HEADERS, VectorForm, dtype_of
from bei.server.http.routing import ApiRouter
from bei.server.routes import rerank, tokenize
from bei.service.call import ModelInput, ModelRequest
from bei.service.service import InferenceService
from bei.tasks.embed import EmbedTask
from bei.tasks.mixed import Given
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.truncation import encoding_options

_AROUND_BYTES = 3
_ID_BYTES = 6
_TOKEN_BYTES = 15  # of a token's id and text
_MOST_CHARS = 65_536  # of a text that is tokenized

Endpoint: TypeAlias = Literal["embed", "rerank", "classify"]
EmbeddingType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class Message(TypedDict):
    """An error."""

    message: str


class EmbedRequest(Tiered, kw_only=True):
    """``truncate`` says which end of a text that is too long is cut; NONE: an error; null (LangChain sends it): END."""

    texts: Texts | None = None
    model: Model | None = None
    input_type: str | None = None
    embedding_types: Annotated[list[EmbeddingType], limits(minItems=1)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    images: Annotated[list[ImageText], limits_of_inputs] | None = None


_OfV2: TypeAlias = Annotated[Refused, refused("send it to /v2/embed")]


class EmbedV1Request(EmbedRequest, kw_only=True):
    """Without what the second version has more."""

    inputs: _OfV2 = UNSET
    output_dimension: _OfV2 = UNSET
    max_tokens: _OfV2 = UNSET


class EmbedV2Request(EmbedRequest, kw_only=True):
    """Of ``texts``, ``images`` and ``inputs`` one."""

    inputs: Annotated[list[JoinedInput], limits_of_inputs] | None = None
    output_dimension: Dimensions | None = None
    max_tokens: Annotated[int, limits(minimum=1)] | None = None


class Meta(TypedDict):
    """What was used, as Cohere bills it."""

    api_version: rerank.ApiVersion
    billed_units: InputTokens


class InputTokens(TypedDict):
    """Special tokens included."""

    input_tokens: int


class ByType(TypedDict, total=False):
    """A list of vectors for each type that is asked for."""

    float: list[list[float]]
    int8: list[list[int]]
    uint8: list[list[int]]
    binary: list[list[int]]
    ubinary: list[list[int]]
    base64: list[str]


class EmbedResponse(TypedDict):
    """v1 has a bare list of vectors where no types are asked for."""

    id: str
    embeddings: ByType | list[list[float]]
    texts: list[str]
    meta: Meta
    response_type: Literal["embeddings_floats", "embeddings_by_type"]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """One text."""

    text: Annotated[str, limits(minLength=1, maxLength=_MOST_CHARS)]
    model: Model | None = None


class TokenizeMeta(TypedDict):
    """The path's version."""

    api_version: rerank.ApiVersion


class TokenizeResponse(TypedDict):
    """Without special tokens. ``token_strings``: what of the text each token is."""

    tokens: list[int]
    token_strings: list[str]
    meta: TokenizeMeta


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The ids of one text."""

    tokens: Annotated[list[TokenId], limits(minItems=1, maxItems=tokenize.MOST_IDS)]
    model: Model | None = None


class DetokenizeResponse(TypedDict):
    """Special tokens included."""

    text: str
    meta: TokenizeMeta


class ListedModel(TypedDict):
    """A model, and what it is for. ``default_endpoints``: none, as a request need not name a model where one has the
    task."""

    name: str
    endpoints: list[Endpoint]
    finetuned: Literal[False]
    context_length: int
    tokenizer_url: None
    default_endpoints: list[Endpoint]


class ModelList(TypedDict):
    """All on one page."""

    models: list[ListedModel]
    next_page_token: None


class KeyCheck(TypedDict):
    """The request has got through; bei knows neither organizations nor owners."""

    valid: Literal[True]
    organization_id: None
    owner_id: None


async def embed_v1(body: EmbedV1Request, context: RequestContext) -> Reply:
    """Embed texts: a list of vectors, or a list for each of `embedding_types`."""
    return await _embed(body, context, "1", body.embedding_types)


async def embed_v2(body: EmbedV2Request, context: RequestContext) -> Reply:
    """Embed texts or images: a list of vectors for each of `embedding_types`, floats where none is named."""
    given: list[Given] | None = None
    if body.inputs is not None:
        if body.texts is not None or body.images is not None:
            raise InvalidRequestError("The request has inputs beside texts or images: send one of them.", "inputs")
        context.check_count(body.inputs, "inputs")  # before they are looked at
        given = [joined_parts(one.content, "inputs") for one in body.inputs]
    types: Seq[EmbeddingType] = ["float"] if body.embedding_types is None else body.embedding_types
    return await _embed(body, context, "2", types, body.output_dimension, body.max_tokens, given)


async def _embed(
    body: EmbedRequest,
    context: RequestContext,
    version: str,
    types: Seq[EmbeddingType] | None,
    dimensions: int | None = None,
    max_tokens: int | None = None,
    inputs: Seq[Given] | None = None,
) -> Reply:
    inputs, param = (
        (_inputs(body), "images" if body.texts is None else "texts") if inputs is None else (inputs, "inputs")
    )
    texts = [value for value in inputs if isinstance(value, str)]
    if body.input_type == "image" and texts:
        raise InvalidRequestError("input_type is image, and the request has texts: send images.", "input_type")
    if types is not None and not types:
        raise InvalidRequestError("embedding_types is empty: name at least one, or leave it out.", "embedding_types")
    forms = {name: form_of(name) for name in types or ()}
    service = context.able("embed", body.model)
    asked = EmbedTask(
        cast("Seq[ModelInput]", inputs),  # which ``check_task`` makes of them
        _options(body.truncate or "END", max_tokens),
        input_type=None if body.input_type == "image" else body.input_type,
        dimensions=dimensions,
        param=param,
        dimensions_param="output_dimension",
    )
    around_bytes = sum(map(len, texts)) // max(1, len(texts)) + _AROUND_BYTES
    found = await embedded(context, service, asked, forms=[*forms.values()] or [FLOATS], around_bytes=around_bytes)
    answer = found.answer
    by_type = {name: form.items(answer) for name, form in forms.items()}
    content = {
        "id": str(uuid.uuid4()),
        "embeddings": by_type if forms else FLOATS.items(answer),
        "texts": Items(len(texts), sum(map(len, texts)), lambda start, stop: texts[start:stop]),
        "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": answer.num_tokens}},
        "response_type": "embeddings_by_type" if forms else "embeddings_floats",
    }
    return found.reply(content)


def _inputs(body: EmbedRequest) -> Seq[ModelInput]:
    """Texts or images. Raises InvalidRequestError."""
    if body.texts is not None and body.images is not None:
        raise InvalidRequestError("The request has texts and images: send one of them.", "images")
    if body.images is not None:
        return [ImageInput(one, "images") for one in body.images]
    if body.texts is None:
        raise InvalidRequestError("The request has no texts: send at least one.", "texts")
    return body.texts


def form_of(name: EmbeddingType) -> VectorForm:
    """``base64`` is of float32."""
    if name == "base64":
        return VectorForm(is_base64=True)
    return VectorForm(dtype_of(name, "embedding_types"), param="embedding_types")


def _options(truncate: str, max_tokens: int | None) -> EncodingOptions:
    if max_tokens is None:
        return encoding_options(truncate)
    if max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1.", "max_tokens")
    return EncodingOptions(truncate != "NONE", "left" if truncate == "START" else "right", max_tokens)


async def tokenize_text(body: TokenizeRequest, context: RequestContext) -> Reply:
    """The tokens of a text, special tokens left out; it is never cut."""
    text, service = body.text, context.named(body.model)
    context.check_inputs([text], "text")
    if len(text) > _MOST_CHARS:
        raise InvalidRequestError(
            f"text has {len(text)} characters, the limit is {_MOST_CHARS}: send it in parts.", "text"
        )
    options = EncodingOptions(add_special_tokens=False, whole=True, with_spans=True)
    ticket = context.admit(service, [text], bytes_per_token=_TOKEN_BYTES)
    (encoding,) = await service.encode(ModelRequest([text], options), ticket=ticket)
    assert encoding.spans is not None  # they were asked for
    ids, parts = encoding.input_ids, encoding.spans.offsets.tolist()
    content = {
        "tokens": Items(len(ids), len(ids) * _ID_BYTES, lambda start, stop: ids[start:stop]),
        "token_strings": items_of(parts, _TOKEN_BYTES - _ID_BYTES, lambda part: text[part[0] : part[1]]),
        "meta": {"api_version": {"version": "1"}},
    }
    return Reply(content)


async def detokenize(body: DetokenizeRequest, context: RequestContext) -> Reply:
    """The text of token ids, special tokens included."""
    texts = await tokenize.decoded(
        context, context.named(body.model), [body.tokens], "tokens", skip_special_tokens=False
    )
    return Reply({"text": texts.make(0, 1)[0], "meta": {"api_version": {"version": "1"}}})


def error_form(error: BeiError, status: int, _: str) -> tuple[int, object]:
    """A message, on every version."""
    return status, Message(message=str(error))


def _route(path: str, summary: str, request: Any, parse: Any, handle: Any) -> Route[Any]:
    answer = {
        "id": UUID,
        "embeddings": {"float": VECTORS},
        "texts": TEXTS,
        "meta": {"api_version": {"version": path[2]}, "billed_units": {"input_tokens": NUM_TOKENS}},
        "response_type": "embeddings_by_type",
    }
    example = Example({"texts": TEXTS, "input_type": "search_document", "embedding_types": ["float"]}, answer)
    return Route(
        path, summary, request, EmbedResponse, parse, handle, example, has_report=True, octet_headers=OCTET_HEADERS
    )


_V1 = Annotated[EmbedV1Request, limits(**exactly_one(["texts"], ["images"]))]
_V2 = Annotated[EmbedV2Request, limits(**exactly_one(["texts"], ["images"], ["inputs"]))]
EMBED_ROUTES: tuple[Route[Any], ...] = (
    _route("/v1/embed", "Embed (Cohere v1)", _V1, parser(EmbedV1Request), embed_v1),
    _route("/v2/embed", "Embed (Cohere v2)", _V2, parser(EmbedV2Request), embed_v2),
)


def _as_cohere(body: rerank.RerankControls) -> None:
    """v1 returns documents where they are asked for; at the root it does, as Jina and vLLM do. ``top_n`` and
    ``max_tokens_per_doc`` 0 are errors; at the root 0 is vLLM's word for all. Raises InvalidRequestError."""
    if isinstance(body, rerank.DocumentsRequest):
        for field, meaning in (("top_n", "all documents"), ("max_tokens_per_doc", "whole documents")):
            if getattr(body, field) == 0:
                raise InvalidRequestError(f"{field} must be at least 1; leave it out for {meaning}.", field)
        body.return_documents = bool(body.return_documents)


_TOP_N = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
_COHERE = limits(properties={"top_n": _TOP_N, "max_tokens_per_doc": _TOP_N})
_RERANK_REQUEST = Annotated[rerank.DocumentsRequest, _COHERE]

_META_V1 = {"api_version": {"version": "1"}}
_TOKEN_ROUTES: tuple[Route[Any], ...] = (
    Route(
        "/v1/tokenize",
        "Tokenize (Cohere)",
        TokenizeRequest,
        TokenizeResponse,
        parser(TokenizeRequest),
        tokenize_text,
        Example({"text": "hello world"}, {"tokens": IDS[1:-1], "token_strings": ["hello", "world"], "meta": _META_V1}),
        runs_engine=False,
    ),
    Route(
        "/v1/detokenize",
        "Decode token ids (Cohere)",
        DetokenizeRequest,
        DetokenizeResponse,
        parser(DetokenizeRequest),
        detokenize,
        Example({"tokens": IDS[1:-1]}, {"text": "hello world", "meta": _META_V1}),
        runs_engine=False,
    ),
)


_LISTED_EXAMPLE: ListedModel = {
    "name": EMBEDDER,
    "endpoints": ["embed"],
    "finetuned": False,
    "context_length": 256,
    "tokenizer_url": None,
    "default_endpoints": [],
}
_ENDPOINTS: Mapping[str, Endpoint] = {"embed": "embed", "rerank": "rerank", "classify": "classify"}


def key_router() -> ApiRouter:
    """``POST /v1/check-api-key``: whoever gets an answer has a valid key, or the server asks for none."""
    router = ApiRouter()
    example: KeyCheck = {"valid": True, "organization_id": None, "owner_id": None}

    @router.post("/v1/check-api-key", summary="Check the API key (Cohere)")
    @answers(example=example)
    async def check_api_key() -> KeyCheck:
        """200 with a key of this server, or where it asks for none; otherwise 401."""
        return {"valid": True, "organization_id": None, "owner_id": None}

    return router


def _reads(models: Models) -> ApiRouter:
    router = ApiRouter()
    router.include(key_router())

    @router.get("/v1/models", summary="List the served models (Cohere)")
    @answers(example={"models": [_LISTED_EXAMPLE], "next_page_token": None})
    async def list_models(endpoint: str | None = None) -> ModelList:
        """Every served model, or those for an `endpoint`, on one page."""
        found = [_listed(name, service) for name, service in models.listed]
        return {
            "models": [one for one in found if endpoint is None or endpoint in one["endpoints"]],
            "next_page_token": None,
        }

    @router.get("/v1/models/{name:path}", summary="Describe a model (Cohere)")
    @answers(InvalidRequestError, ModelNotFoundError, example=_LISTED_EXAMPLE)
    async def get_model(name: str) -> ListedModel:
        """One served model."""
        service = models.named(name)
        return _listed(name if models.is_alias(name) else service.name, service)

    return router


def _listed(name: str, service: InferenceService) -> ListedModel:
    return {
        "name": name,
        "endpoints": [_ENDPOINTS[task] for task in service.manifest.tasks if task in _ENDPOINTS],
        "finetuned": False,
        "context_length": service.manifest.max_seq_len,
        "tokenizer_url": None,
        "default_endpoints": [],
    }


def dialect(models: Models, config: ServeConfig) -> Dialect:
    """The dialect of a server with these settings, with routes that read the served models."""
    rerank_routes = (
        adjusted(route, _as_cohere)
        for route in rerank.documents_routes(config.max_client_batch_size, _RERANK_REQUEST)
        if route.path != "/rerank"
    )
    routes = (*EMBED_ROUTES, *rerank_routes, *_TOKEN_ROUTES)
    return Dialect("cohere", "Cohere", routes, error_form, Message, _reads(models))
