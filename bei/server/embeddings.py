"""``POST /v1/embeddings``: OpenAI's request and response. Reference: platform.openai.com, "Create embeddings"."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import Meta

from bei.errors import InvalidRequestError
from bei.server.controls import Dimensions
from bei.server.endpoint import Call, Reply, Route
from bei.server.parsing import PLACEHOLDER, TokenId, long_id_lists, parser, too_many_inputs
from bei.server.rendering import FLOAT_BYTES, Items
from bei.server.unsupported import EmbeddingControls
from bei.service import InferenceService, ModelInput
from bei.tasks import Embeddings, embed_chunks, embed_inputs

_AROUND_BYTES = 50  # of a vector: {"object":"embedding","index":0,"embedding":},

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_INPUT_FORMS = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
_INPUT = {
    "description": _INPUT_FORMS,
    "oneOf": [_TEXT, {"type": "array", "minItems": 1, "items": _TEXT}, _IDS, {**_IDS, "items": _IDS}],
}


class EmbeddingRequest(EmbeddingControls, kw_only=True):
    """OpenAI's, with the controls of the other routes."""

    # Decoded in a second step, by its first characters: so an error can name the form that was meant.
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=_INPUT)]
    encoding_format: Literal["float", "base64"] | None = None  # float
    dimensions: Dimensions | None = None
    normalize: Annotated[bool | None, Meta(description="Unit length; null: as the checkpoint says.")] = None
    late_chunking: Annotated[bool | None, Meta(description="Jina's: the texts are chunks of one document.")] = None
    user: str | None = None


class Usage(TypedDict):
    """Tokens of all inputs, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(TypedDict):
    """base64 is of little-endian float32, as OpenAI's clients decode it."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(TypedDict):
    """In the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: Usage


parse_request = parser(EmbeddingRequest)

_text_decoder = msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[TokenId])
_id_lists_decoder = msgspec.json.Decoder(list[list[TokenId]])


def parse_input(raw: bytes) -> tuple[list[str] | None, list[list[int]] | None]:
    """``input`` as texts or as token ids; the other is None. Raises InvalidRequestError."""
    compact = raw.lstrip()
    inner = compact[1:].lstrip()[:1] if compact[:1] == b"[" else b""
    try:
        if compact[:1] == b'"':
            return [_text_decoder.decode(raw)], None
        if inner == b'"':
            return _texts_decoder.decode(raw), None
        if inner == b"[":
            return None, _id_lists_decoder.decode(raw)
        if inner and inner in b"-0123456789":
            return None, [_ids_decoder.decode(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"input must be {_INPUT_FORMS}, all of one kind, in UTF-8: {error}.", "input"
        ) from error
    if inner == b"]":
        raise InvalidRequestError("input is an empty list: send at least one input.", "input")
    raise InvalidRequestError(f"input must be {_INPUT_FORMS}.", "input")


class ParsedRequest(NamedTuple):
    """A request, and its ``input`` as texts or as token ids; the other is None."""

    body: EmbeddingRequest
    texts: list[str] | None
    token_ids: list[list[int]] | None


def parse(content: bytes, max_inputs: int) -> ParsedRequest:
    """A body and its inputs. Raises InvalidRequestError, also for more than ``max_inputs`` lists of token ids."""
    found = long_id_lists(content, "input", max_inputs)
    if found is not None:
        body = parse_request(found.rest)
        if bytes(body.input) == PLACEHOLDER:
            if len(found.lists) > max_inputs:
                raise too_many_inputs(len(found.lists), max_inputs, "input")
            return ParsedRequest(body, None, found.lists)
    body = parse_request(content)
    texts, token_ids = parse_input(bytes(body.input))
    body.input = msgspec.Raw(b"null")  # or it would keep the whole content
    return ParsedRequest(body, texts, token_ids)


_IDS_REFUSED = (
    "input holds token ids, which are another tokenizer's unless the client has this model's: LangChain's "
    "OpenAIEmbeddings sends ids of OpenAI's by default. Send texts (there: check_embedding_ctx_length=False), or start "
    "the server with --openai-token-ids accept."
)


async def create_embeddings(request: ParsedRequest, call: Call, *, accepts_ids: bool = False) -> Reply:
    """Embed one or many texts, in the order of the inputs. Lists of token ids, which are used exactly as given, are
    refused unless the server is set to accept them (`openai_token_ids`)."""
    body, texts, token_ids = request
    service = call.models.able("embed", body.model)
    if texts is None and not accepts_ids:
        raise InvalidRequestError(_IDS_REFUSED, "input")
    manifest = service.manifest
    by_default = manifest.embedding is not None and manifest.embedding.normalize
    normalize = by_default if body.normalize is None else body.normalize
    body.check_unsupported(body.dimensions or manifest.dimension("embedding") or 0, normalize=normalize)
    inputs: Sequence[ModelInput] = texts or token_ids or []
    call.check_inputs(inputs, "input")
    _check_answer(call, service, len(inputs), body)
    prompt = body.prompt(manifest) if texts is not None else ""
    if texts is not None and body.late_chunking:
        ticket = call.admit(service, [" ".join(texts)])
        answer = await embed_chunks(
            service, texts, ticket=ticket, prompt=prompt, dimensions=body.dimensions, normalize=body.normalize
        )
    else:
        answer = await embed_inputs(
            service,
            inputs,
            ticket=call.admit(service, inputs),
            prompt=prompt,
            dimensions=body.dimensions,
            normalize=body.normalize,
            options=body.encoding_options(),
        )
    return Reply(render(answer, service.name, body.encoding_format), answer.truncated)


def _check_answer(call: Call, service: InferenceService, num_inputs: int, body: EmbeddingRequest) -> None:
    width = service.manifest.dimension("embedding") or 0
    width = min(width, body.dimensions or width)
    call.check_answer(num_inputs * _item_bytes(width, body.encoding_format))


def _item_bytes(width: int, encoding_format: str | None) -> int:
    """About what a vector of ``width`` takes, with what stands around it."""
    return _AROUND_BYTES + (width * 16 // 3 if encoding_format == "base64" else width * FLOAT_BYTES)


def render(answer: Embeddings, model: str, encoding_format: str | None) -> dict[str, object]:
    """An EmbeddingResponse; float vectors stay rows of numpy's."""
    vectors = answer.vectors

    def items(start: int, stop: int) -> list[dict[str, object]]:
        if encoding_format == "base64":
            little_endian = vectors[start:stop].astype("<f4", order="C", copy=False)
            encoded: list[Any] = [binascii.b2a_base64(row.data, newline=False).decode() for row in little_endian]
        else:
            encoded = list(vectors[start:stop])
        return [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(encoded, start)]

    return {
        "object": "list",
        "data": Items(len(vectors), len(vectors) * _item_bytes(vectors.shape[1], encoding_format), items),
        "model": model,
        "usage": usage(answer.num_tokens),
    }


def usage(num_tokens: int) -> Usage:
    """Of models that only read."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def route(max_inputs: int, *, accepts_ids: bool) -> Route[ParsedRequest]:
    """The route of a server that accepts token ids, or refuses them."""

    async def handle(request: ParsedRequest, call: Call) -> Reply:
        return await create_embeddings(request, call, accepts_ids=accepts_ids)

    handle.__doc__ = create_embeddings.__doc__
    read = partial(parse, max_inputs=max_inputs)
    return Route("/v1/embeddings", "Create embeddings (OpenAI)", EmbeddingRequest, EmbeddingResponse, read, handle)
