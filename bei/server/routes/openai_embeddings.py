"""``POST /v1/embeddings``: OpenAI's request and response. Reference: platform.openai.com, "Create embeddings"."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec
from msgspec import UNSET, Meta

from bei.errors import EmptyInputError, InvalidRequestError, MalformedRequestError
from bei.image.source import ImageInput
from bei.server.auth.priority import ServedTier
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import EMBEDDER, NUM_TOKENS, TEXTS, Example, embedding_items, token_usage
from bei.server.endpoint.field_schema import MAX_INPUTS, limits
from bei.server.endpoint.inference import embedded
from bei.server.endpoint.input_parts import ComparedInput
from bei.server.endpoint.parse import TokenId, parser, read_long_ids, too_many_inputs
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import Items, Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import EmbeddingControls, contradiction
from bei.server.endpoint.vector_encoding import OCTET_HEADERS, SparseVector, VectorForm, vector_form
from bei.service.adapted import adapted
from bei.service.service import InferenceService
from bei.tasks.embed import Embeddings, SparseEmbeddings
from bei.tasks.mixed import Given
from bei.utils.ranges import shown

AROUND_BYTES = 50  # of a vector: {"object":"embedding","index":0,"embedding":},

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_INPUT_FORMS = (
    "a text, a list of token ids, an object with a text, an image or both, or a list in which each is one of these"
)
_PART = {"$ref": "#/components/schemas/ComparedInput"}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
_INPUT = {
    "description": _INPUT_FORMS,
    "oneOf": [_TEXT, _IDS, _PART, {**_MANY, "items": {"oneOf": [_TEXT, _IDS, _PART]}}],
}
_INPUT_WITHOUT_IDS = {"oneOf": [_TEXT, _PART, {**_MANY, "items": {"oneOf": [_TEXT, _PART]}}]}


# For all inputs, or one for each, null for none.
AdapterNames: TypeAlias = str | list[str | None]


class EmbeddingRequest(EmbeddingControls, kw_only=True):
    """OpenAI's, with the controls of the other routes."""

    # Decoded in a second step, by its first characters: so an error can name the form that was meant.
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=_INPUT)]
    encoding_format: Literal["float", "base64"] | None = None  # float
    late_chunking: Annotated[bool | None, Meta(description="Jina's: the texts are chunks of one document.")] = None
    user: str | None = None
    lora_path: Annotated[AdapterNames | None, Meta(description="SGLang's: one of the model's adapters.")] = None
    embed_overrides: Annotated[Refused, refused("leave it out", [])] = UNSET
    embed_override_token_id: Annotated[Refused, refused("leave it out")] = UNSET

    def form(self) -> VectorForm:
        """In which form vectors are answered. Raises InvalidRequestError where two fields contradict each other."""
        return vector_form(
            self.encoding_format,
            output_dtype=self.output_dtype,
            embedding_type=self.embedding_type,
            embedding_types=self.embedding_types,
            embed_dtype=self.embed_dtype,
            encoding_type=self.encoding_type,
        )


# Infinity's client always sends a number, 0 where its user asks for none.
_DIMENSIONS = Meta(ge=0, description="Vectors are cut to their first components; 0: they are not.")


class InfinityRequest(EmbeddingRequest, kw_only=True):
    """Of a path that Infinity has too."""

    dimensions: Annotated[int, _DIMENSIONS] | None = None


class Usage(TypedDict):
    """Tokens of all inputs, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class TokensUsage(TypedDict):
    """Jina's and Voyage's. Special tokens included."""

    total_tokens: int


class EmbeddingItem(TypedDict):
    """base64 is of little-endian numbers, float32 unless the request says otherwise, as OpenAI's clients decode it."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(TypedDict):
    """In the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: Usage


class TieredResponse(EmbeddingResponse, total=False):
    """`service_tier` where the request has it: the tier that it was served in."""

    service_tier: ServedTier


class SparseEmbeddingItem(TypedDict):
    """Where `output_dtype` is sparse."""

    object: Literal["embedding"]
    index: int
    embedding: SparseVector


class SparseEmbeddingResponse(TypedDict):
    """In the order of the inputs."""

    object: Literal["list"]
    data: list[SparseEmbeddingItem]
    model: str
    usage: Usage


class TieredSparseResponse(SparseEmbeddingResponse, total=False):
    """`service_tier` where the request has it: the tier that it was served in."""

    service_tier: ServedTier


parse_request = parser(EmbeddingRequest)
_parse_infinity_request = parser(InfinityRequest)

_text_decoder = msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[TokenId])
_id_lists_decoder = msgspec.json.Decoder(list[list[TokenId]])
_part_decoder = msgspec.json.Decoder(ComparedInput)
_mixed_decoder = msgspec.json.Decoder(list[str | list[TokenId] | ComparedInput])


# The bracket of a list, and the first character of its first element; of no list, no bracket and the first character.
_BEGIN = re.compile(rb"\s*(\[?)\s*(.?)", re.DOTALL)


def parse_input(raw: bytes) -> list[Given]:
    """``input`` as texts, lists of token ids, and images. ``raw`` may have megabytes: nothing copies it.

    Raises InvalidRequestError.
    """
    begin = _BEGIN.match(raw)
    assert begin is not None, "the pattern fits everything"
    is_list, first = bool(begin[1]), begin[2]
    try:
        if first == b'"':
            return _texts_or_mixed(_texts_decoder, raw) if is_list else [_text_decoder.decode(raw)]
        if first == b"{":
            return _mixed(raw) if is_list else [_part_decoder.decode(raw).compared("input")]
        if is_list and first == b"[":
            return _texts_or_mixed(_id_lists_decoder, raw)
        if is_list and first and first in b"-0123456789":
            return [_ids_decoder.decode(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRequestError(f"input must be {_INPUT_FORMS}, in UTF-8: {error}.", "input") from error
    if is_list and first == b"]":
        raise EmptyInputError("input is an empty list: send at least one input.", "input")
    raise MalformedRequestError(f"input must be {_INPUT_FORMS}.", "input")


def _texts_or_mixed(decoder: msgspec.json.Decoder[Any], raw: bytes) -> list[Given]:
    """A list of what its first element is or, where that is not all there is, of both kinds."""
    try:
        return decoder.decode(raw)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        return _mixed(raw)


def _mixed(raw: bytes) -> list[Given]:
    found = _mixed_decoder.decode(raw)
    return [value.compared("input") if isinstance(value, ComparedInput) else value for value in found]


class ParsedRequest(NamedTuple):
    """A request, and its ``input``."""

    body: EmbeddingRequest
    inputs: Seq[Given]


def parse(
    content: bytes, max_inputs: int, parse_request: Callable[[bytes], EmbeddingRequest] = parse_request
) -> ParsedRequest:
    """A body and its inputs. Raises InvalidRequestError, also for more than ``max_inputs`` inputs."""
    found = read_long_ids(content, "input", max_inputs, parse_request)
    if found is not None:
        return ParsedRequest(*found)
    body = parse_request(content)
    inputs = parse_input(body.input)
    if len(inputs) > max_inputs:
        raise too_many_inputs(len(inputs), max_inputs, "input")
    body.input = msgspec.Raw(b"null")  # or it would keep the whole content
    return ParsedRequest(body, inputs)


_IDS_REFUSED = (
    "input holds token ids, which are another tokenizer's unless the client has this model's. Send the texts "
    "themselves (where a client makes ids of them, turn that off; in LangChain for Python: "
    "check_embedding_ctx_length=False), or start the server with --openai-token-ids accept."
)


async def create_embeddings(
    request: ParsedRequest, context: RequestContext, *, accepts_ids: bool = False, echoes_tier: bool = False
) -> Reply:
    """Embed one or many texts or images, in the order of the inputs. Lists of token ids, which are used exactly as
    given, are refused unless the server is set to accept them (`openai_token_ids`)."""
    body, inputs = request.body.settled(), request.inputs
    if body.modality == "image":  # Infinity's and NIM's word
        inputs = [ImageInput(value, "input") if isinstance(value, str) else value for value in inputs]
    kinds = {*map(type, inputs)}
    form = body.form()
    service = context.able(form.task, body.model)
    if body.lora_path is not None:
        service = _adapted(service, body.lora_path, len(inputs))
    if list in kinds and not accepts_ids:
        raise InvalidRequestError(_IDS_REFUSED, "input")
    if body.late_chunking:
        if form.is_sparse or kinds != {str}:
            what = "dense vectors only" if form.is_sparse else "texts only, not with token ids or images"
            raise InvalidRequestError(f"late_chunking works with {what}: leave it out.", "late_chunking")
        _check_uncut(body)
    asked = body.embed_task(
        inputs,
        dimensions=body.dimensions,
        normalize=body.normalize,
        late_chunking=bool(body.late_chunking),
        param="input",
    )
    found = await embedded(context, service, asked, forms=(form,), around_bytes=AROUND_BYTES)
    content = render(found.answer, service.name, form)
    if echoes_tier and context.served_tier is not None:
        content["service_tier"] = context.served_tier
    return found.reply(content)


def _adapted(service: InferenceService, given: AdapterNames, num_inputs: int) -> InferenceService:
    """``service`` as the adapter makes it that ``lora_path`` names. Raises InvalidRequestError."""
    names = [given] * num_inputs if isinstance(given, str) else given
    if len(names) != num_inputs:
        raise InvalidRequestError(
            f"lora_path has {len(names)} names for {num_inputs} inputs: send one name, or one for each input.",
            "lora_path",
        )
    if len({*names}) > 1:
        raise InvalidRequestError(
            "lora_path names several adapters: send the inputs of each in a request of their own.", "lora_path"
        )
    if (name := names[0]) is None:
        return service
    known = service.manifest.adapter_names
    if name not in known:
        raise InvalidRequestError(
            f"{service.manifest.name} has no adapter {shown(name)}. Its adapters: {', '.join(known) or 'none'}.",
            "lora_path",
        )
    number = known.index(name) + 1
    if service.adapter not in (0, number):
        raise contradiction("model", service.name, "lora_path", name)
    return adapted(service, number)


def _check_uncut(body: EmbeddingRequest) -> None:
    """Raise InvalidRequestError for a field that asks to cut a document which is read in chunks, or to read it bare."""
    asked = {
        "truncate": body.truncate not in (None, False, "NONE"),
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        "add_special_tokens": not body.add_special_tokens,
    }
    name = next((name for name, is_asked in asked.items() if is_asked), None)
    if name is not None:
        raise InvalidRequestError(
            f"{name} {getattr(body, name)} is not supported with late_chunking: the document is read whole, with its "
            "special tokens. Leave it out.",
            name,
        )


def render(answer: Embeddings | SparseEmbeddings, model: str, form: VectorForm) -> dict[str, object]:
    """An EmbeddingResponse or SparseEmbeddingResponse; vectors of numbers stay rows of numpy's."""
    count = len(answer.vectors)

    def items(start: int, stop: int) -> list[dict[str, object]]:
        made = form.of(answer, start, stop)
        return [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(made, start)]

    num_bytes = count * AROUND_BYTES + form.list_bytes(answer)
    return {
        "object": "list",
        "data": Items(count, num_bytes, items),
        "model": model,
        "usage": usage(answer.num_tokens),
    }


def usage(num_tokens: int) -> Usage:
    """The usage of a model that generates no tokens."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


ANSWER_EXAMPLE = {
    "object": "list",
    "data": embedding_items(),
    "model": EMBEDDER,
    "usage": token_usage(NUM_TOKENS),
}
_EXAMPLE = Example({"input": TEXTS, "encoding_format": "float"}, ANSWER_EXAMPLE)


def route(max_inputs: int, *, accepts_ids: bool, echoes_tier: bool = False) -> Route[ParsedRequest]:
    """The route of a server that accepts token ids, or refuses them. ``echoes_tier``: answers name the tier that was
    asked for, as OpenAI's do; other servers' answers have no such field."""
    own, others = (TieredResponse, TieredSparseResponse), (EmbeddingResponse, SparseEmbeddingResponse)
    return Route(
        "/v1/embeddings",
        "Create embeddings (OpenAI)",
        _described(EmbeddingRequest, accepts_ids=accepts_ids),
        own if echoes_tier else others,
        partial(parse, max_inputs=max_inputs),
        update_wrapper(partial(create_embeddings, accepts_ids=accepts_ids, echoes_tier=echoes_tier), create_embeddings),
        _EXAMPLE,
        has_report=True,
        octet_headers=OCTET_HEADERS,
    )


def infinity_route(max_inputs: int, *, accepts_ids: bool) -> Route[ParsedRequest]:
    """``route`` on the path that Infinity has too, whose clients say ``dimensions: 0`` for all."""
    return replace(
        route(max_inputs, accepts_ids=accepts_ids, echoes_tier=True),
        path="/embeddings",
        request=_described(InfinityRequest, accepts_ids=accepts_ids),
        parse=partial(parse, max_inputs=max_inputs, parse_request=_parse_infinity_request),
    )


def _described(request: type[EmbeddingRequest], *, accepts_ids: bool) -> Any:
    """``request`` as /openapi.json has it."""
    return request if accepts_ids else Annotated[request, limits(properties={"input": _INPUT_WITHOUT_IDS})]
