"""``POST /v1/embeddings``: OpenAI's request and response, straight from and to bytes.

Unknown fields are ignored, as clients and gateways add their own. Reference: platform.openai.com, "Create embeddings".
"""

from __future__ import annotations

import binascii
from collections.abc import Coroutine, Sized
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from bei.errors import InvalidRequestError
from bei.server.errors import JSON
from bei.server.http import read_body, unless_disconnected
from bei.server.models import Models
from bei.server.truncation import Direction, TokenLimit, Truncate, encoding_options
from bei.tasks import Embeddings, embed_texts, embed_token_ids, prompt_of
from bei.tokenization import EncodingOptions

TRUNCATED_HEADER = "x-truncated-inputs"
_MOST_RANGES = 100  # about a kilobyte: clients and proxies refuse answers with large headers

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class EmbeddingRequest(msgspec.Struct):
    """The body. ``input`` has four forms and is decoded in a second step, by its first characters."""

    input: msgspec.Raw
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None  # float
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    user: str | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    normalize: bool | None = None
    truncate: Truncate | None = None
    truncation_direction: Direction | None = None
    truncate_prompt_tokens: TokenLimit | None = None
    add_special_tokens: bool = True


_request_decoder = msgspec.json.Decoder(EmbeddingRequest)
_text_decoder = msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[TokenId])
_id_lists_decoder = msgspec.json.Decoder(list[list[TokenId]])

_INPUT_FORMS = "a text, a list of texts, a list of token ids, or a list of lists of token ids"


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


def parse_request(body: bytes) -> EmbeddingRequest:
    """Decode and validate the body but for ``input``. Raises InvalidRequestError."""
    try:
        return _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        param = str(error).rpartition("$.")[2].rstrip("`") if "$." in str(error) else None
        raise InvalidRequestError(f"The request is not valid: {error}.", param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON in UTF-8: {error}.") from error
    except RecursionError as error:
        raise InvalidRequestError("The body is nested too deeply: send the fields of /openapi.json.") from error


def render(answer: Embeddings, model: str, encoding_format: str | None) -> bytes:
    """The response body. base64 is of little-endian float32, as OpenAI's clients decode it."""
    vectors = answer.vectors
    if encoding_format == "base64":
        little_endian = vectors.astype("<f4", copy=False)
        encoded: list[Any] = [binascii.b2a_base64(row.data, newline=False).decode() for row in little_endian]
    else:
        encoded = list(vectors)
    content = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": embedding} for i, embedding in enumerate(encoded)],
        "model": model,
        "usage": {"prompt_tokens": answer.num_tokens, "total_tokens": answer.num_tokens},
    }
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class EmbeddingsEndpoint:
    """The route, bound to the served models."""

    path = "/v1/embeddings"

    def __init__(self, models: Models, max_client_batch_size: int, payload_limit: int) -> None:
        self._models = models
        self._max_client_batch_size = max_client_batch_size
        self._payload_limit = payload_limit

    def add_to(self, app: FastAPI) -> None:
        """Register the route, with its description for /openapi.json."""
        app.add_api_route(
            self.path,
            self.answer,
            methods=["POST"],
            openapi_extra=_OPENAPI,
            response_class=Response,
            summary="Create embeddings",
            description="Embed one or many texts, or lists of token ids. Answers in the order of the inputs.",
        )

    async def answer(self, request: Request) -> Response:
        """From bytes to bytes. Raises BeiError, ClientDisconnect."""
        body = parse_request(await read_body(request, self._payload_limit))
        service = self._models.named(body.model)
        texts, token_ids = parse_input(bytes(body.input))
        _check_size(texts or token_ids or [], self._max_client_batch_size)
        work: Coroutine[Any, Any, Embeddings]
        if texts is not None:
            if "" in texts:
                raise InvalidRequestError(f"input {texts.index('')} is an empty text: leave it out.", "input")
            work = embed_texts(
                service,
                texts,
                prompt=prompt_of(service.manifest, body.prompt_name, body.input_type),
                dimensions=body.dimensions,
                normalize=body.normalize,
                options=_options(body),
            )
        else:
            work = embed_token_ids(service, token_ids or [], dimensions=body.dimensions, normalize=body.normalize)
        answer = await unless_disconnected(request, work)
        headers = {TRUNCATED_HEADER: index_ranges(answer.truncated)} if answer.truncated else None
        return Response(render(answer, service.name, body.encoding_format), 200, headers, JSON)


def _options(body: EmbeddingRequest) -> EncodingOptions:
    return encoding_options(
        body.truncate,
        body.truncation_direction,
        body.truncate_prompt_tokens,
        add_special_tokens=body.add_special_tokens,
    )


def index_ranges(indices: list[int]) -> str:
    """Ascending ``indices`` as ``0,4-7,9``; ``,...`` at the end where there are more than a header should hold."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MOST_RANGES]]
    return ",".join(texts + ["..."] * (len(ranges) > _MOST_RANGES))


def _check_size(inputs: Sized, limit: int) -> None:
    if len(inputs) > limit:
        raise InvalidRequestError(
            f"The request has {len(inputs)} inputs, the limit is {limit}: split it into smaller requests.", "input"
        )


_VECTOR = {"oneOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string", "format": "byte"}]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_CONTROLS = {
    "prompt_name": {"type": "string", "description": "A prompt of the model's; see /v1/models."},
    "input_type": {"type": "string", "description": "query, document, or the name of a prompt of the model's."},
    "normalize": {"type": "boolean", "description": "Vectors of unit length; by default as the checkpoint says."},
    "truncate": {"oneOf": [{"type": "boolean"}, {"enum": ["NONE", "START", "END"]}]},
    "truncation_direction": {"enum": ["Left", "Right"]},
    "truncate_prompt_tokens": {"type": "integer", "minimum": -1, "description": "-1: the model's limit."},
    "add_special_tokens": {"type": "boolean", "default": True},
}
_INPUT = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}
_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["input"],
                    "properties": {
                        "input": _INPUT,
                        "model": {"type": "string", "description": "May be left out where one model is served."},
                        "encoding_format": {"type": "string", "enum": ["float", "base64"], "default": "float"},
                        "dimensions": {"type": "integer", "minimum": 1},
                        "user": {"type": "string"},
                        **_CONTROLS,
                    },
                }
            }
        },
    },
    "responses": {
        "200": {
            "description": "The embeddings, in the order of the inputs.",
            "headers": {
                TRUNCATED_HEADER: {
                    "schema": {"type": "string"},
                    "description": "Inputs that were cut: 0,4-7",
                }
            },
            "content": {
                JSON: {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "object": {"const": "list"},
                            "data": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "properties": {
                                        "object": {"const": "embedding"},
                                        "index": {"type": "integer"},
                                        "embedding": _VECTOR,
                                    },
                                },
                            },
                            "model": {"type": "string"},
                            "usage": {
                                "type": "object",
                                "properties": {
                                    "prompt_tokens": {"type": "integer"},
                                    "total_tokens": {"type": "integer"},
                                },
                            },
                        },
                    }
                }
            },
        },
        **{
            status: {"description": text, "content": {JSON: {"schema": _ERROR}}}
            for status, text in {
                "400": "The request is wrong; the message says how.",
                "404": "No served model has this name.",
                "413": "The body is too large.",
                "429": "Too much is waiting; see Retry-After.",
                "500": "The engine failed on an input.",
                "503": "The server is shutting down.",
            }.items()
        },
    },
}
