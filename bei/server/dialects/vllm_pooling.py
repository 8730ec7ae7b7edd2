"""vLLM's ``/pooling``: a model's vectors or scores, of inputs or of their tokens, as JSON or as bytes.

Reference: docs.vllm.ai, "Pooling API"; github.com/vllm-project/vllm, ``vllm/entrypoints``.
"""

from __future__ import annotations

import binascii
import json
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict, cast

import numpy as np
from msgspec import UNSET, Meta

from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.image.source import ImageInput, MixedInput
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import CREATED, EMBEDDER, HEX, NUM_TOKENS, TEXTS, VECTORS, Example, token_usage
from bei.server.endpoint.field_schema import NULL, Limits, Text, any_of, exactly_one, one_of
from bei.server.endpoint.field_schema import Texts as ListOfTexts
from bei.server.endpoint.inference import embedded
from bei.server.endpoint.parse import parser
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import FLOAT_BYTES, Items, Octets, Reply, rows_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import InputControls
from bei.server.routes import classify
from bei.server.routes.chat_embeddings import Messages, input_of
from bei.server.routes.openai_embeddings import Usage, usage
from bei.service.call import ModelInput
from bei.service.image_side import no_images
from bei.service.service import InferenceService
from bei.tasks.classify import ClassifyTask, Scores, num_around
from bei.tasks.classify import classify as classify_inputs
from bei.tasks.embed import Embeddings, EmbedTask, TokenEmbeddings, check_task, embed_tokens
from bei.tasks.token_classification import TokenScores, TokenTask, classify_tokens

_NUMBER_BYTES = 4
_BASE64_BYTES = _NUMBER_BYTES * 4 / 3
_AROUND_BYTES = 45

# Inputs of an answer in bytes: they are described in a header, and Python's http.client reads 65,536 bytes of one.
_MOST_DESCRIBED = 400

Texts = Text | ListOfTexts

PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify"]
PoolingAnswer: TypeAlias = Embeddings | TokenEmbeddings | Scores | TokenScores
# A text, an image, or both.
PooledInput: TypeAlias = "str | ImageInput | MixedInput"
Values: TypeAlias = Callable[[int], Float32Array]  # of an input, by its place


class PoolingRequest(InputControls, kw_only=True):
    """``task`` null: what the model is for. base64 and bytes are of little-endian float32. With bytes the answer is
    nothing else, and the header ``metadata`` says where each value is, unless they are bytes_only. ``messages``: an
    image."""

    input: Texts | None = None
    messages: Messages | None = None  # type: ignore[assignment]  # InputControls refuses it
    task: PoolingTask | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: Annotated[Refused, refused("send use_activation")] = UNSET
    data: Annotated[Refused, refused("send input; there are no plugins")] = UNSET

    _limits: ClassVar[Limits] = (
        any_of(
            '`task` other than "embed" contradicts `dimensions`.', {"task": one_of(["embed"])}, {"dimensions": NULL}
        ),
        exactly_one(["input"], ["messages"]),
    )


class Pooled(TypedDict):
    """A vector, scores, or a vector or scores a token."""

    index: int
    object: Literal["pooling"]
    data: list[float | list[float]] | str


class PoolingResponse(TypedDict):
    """vLLM's."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: Usage


def inputs_of(body: PoolingRequest) -> Seq[PooledInput]:
    """The texts, or the image of the messages. Raises InvalidRequestError."""
    if (body.input is None) is (body.messages is None):
        raise InvalidRequestError("The request must have input or messages: send one of them.", "input")
    if body.messages is not None:
        return [input_of(body.messages)]
    return [body.input] if isinstance(body.input, str) else body.input or []


def answer_of(kind: str, service: InferenceService, data: object, num_tokens: int) -> dict[str, object]:
    """A list of ``data``; ``kind`` begins its id."""
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": service.name,
        "data": data,
        "usage": usage(num_tokens),
    }


async def pool(body: PoolingRequest, context: RequestContext) -> Reply:
    """What the model's pooling gives: a vector, scores, or for each token, special ones included, a vector
    (`token_embed`) or scores (`token_classify`)."""
    inputs = inputs_of(body)
    task = body.task or _task_of(context.named(body.model))
    if body.encoding_format == "bytes" and len(inputs) > _MOST_DESCRIBED:
        raise InvalidRequestError(
            f"encoding_format bytes describes every input in a header, at most {_MOST_DESCRIBED} of them: send fewer, "
            "or ask for bytes_only.",
            "encoding_format",
        )
    if task != "embed" and body.dimensions is not None:
        raise InvalidRequestError("dimensions works with the task embed only: leave it out.", "dimensions")
    return await _POOLS[task](body, inputs, context)


async def _pool_vectors(body: PoolingRequest, texts: Seq[PooledInput], context: RequestContext) -> Reply:
    service = context.able("embed", body.model)
    options, normalize = body.encoding_options(), body.use_activation
    inputs = cast("Seq[ModelInput]", texts)  # which ``check_task`` makes of them
    asked = EmbedTask(inputs, options, dimensions=body.dimensions, normalize=normalize, param="input")
    found = await embedded(context, service, asked, around_bytes=_AROUND_BYTES)
    answer = found.dense
    return _pooled(body, service, len(texts), answer.vectors.size, lambda index: answer.vectors[index], answer)


async def _pool_scores(body: PoolingRequest, inputs: Seq[PooledInput], context: RequestContext) -> Reply:
    service = context.able("classify", body.model)
    texts = _texts_alone(service, inputs)
    context.check_inputs(texts, "input")
    context.check_answer(len(texts) * (len(classify.labels_of(service)) * FLOAT_BYTES + _AROUND_BYTES))
    asked = ClassifyTask(texts, body.encoding_options(), raw=body.use_activation is False)
    scores = await classify_inputs(service, asked, ticket=context.admit(service, texts, num_around=num_around(service)))
    return _pooled(body, service, len(texts), scores.values.size, lambda index: scores.values[index], scores)


async def _pool_token_vectors(body: PoolingRequest, texts: Seq[PooledInput], context: RequestContext) -> Reply:
    service = context.able("embed_tokens", body.model)
    context.check_inputs(texts, "input")
    width = service.manifest.dimension("token_embedding") or 0
    inputs = cast("Seq[ModelInput]", texts)  # which ``check_task`` makes of them
    normalize = _are_unit_token_vectors(service, body.use_activation)
    task = EmbedTask(inputs, body.encoding_options(), is_bare=body.messages is None, normalize=normalize)
    checked = check_task(service, task, "embed_tokens")
    ticket = context.admit(service, checked.task.inputs, bytes_per_token=width * FLOAT_BYTES)
    answer = await embed_tokens(service, checked, ticket=ticket)
    size = answer.num_tokens * width
    return _pooled(body, service, len(texts), size, lambda index: answer.vectors[index], answer)


def _are_unit_token_vectors(service: InferenceService, asked: bool | None) -> bool | None:
    """``use_activation``, which is vLLM's word for unit length. Where a request does not say, vLLM takes what the
    checkpoint says of its dense vectors. None: as the model's late interaction has them."""
    embedding = service.manifest.embedding
    return embedding.normalize if asked is None and embedding is not None else asked


async def _pool_token_scores(body: PoolingRequest, inputs: Seq[PooledInput], context: RequestContext) -> Reply:
    service = context.able("classify_tokens", body.model)
    texts = _texts_alone(service, inputs)
    context.check_inputs(texts, "input")
    width = len(classify.labels_of(service))
    ticket = context.admit(service, texts, bytes_per_token=width * FLOAT_BYTES)
    asked = TokenTask(texts, body.encoding_options(), raw=body.use_activation is False)
    answer = await classify_tokens(service, asked, ticket=ticket)
    return _pooled(body, service, len(texts), answer.num_tokens * width, answer.scores_of, answer)


def _texts_alone(service: InferenceService, inputs: Seq[PooledInput]) -> list[str]:
    """``inputs`` of a model that has no scores of images. Raises InvalidImageError."""
    texts = [one for one in inputs if isinstance(one, str)]
    if len(texts) < len(inputs):
        raise no_images(service.name, "messages")
    return texts


# What vLLM calls our tasks, the first that a model has where a request names none.
_TASKS: Mapping[str, PoolingTask] = {
    "embed": "embed",
    "classify": "classify",
    "embed_tokens": "token_embed",
    "classify_tokens": "token_classify",
}
_POOLS: Mapping[PoolingTask, Callable[[PoolingRequest, Seq[PooledInput], RequestContext], Awaitable[Reply]]] = {
    "embed": _pool_vectors,
    "classify": _pool_scores,
    "token_embed": _pool_token_vectors,
    "token_classify": _pool_token_scores,
}


def _task_of(service: InferenceService) -> PoolingTask:
    """The first of vLLM's tasks that the model has."""
    return next((task for ours, task in _TASKS.items() if ours in service.manifest.tasks), "embed")


def _pooled(
    body: PoolingRequest, service: InferenceService, count: int, size: int, values: Values, answer: PoolingAnswer
) -> Reply:
    """A PoolingResponse of ``count`` values, ``size`` numbers in all; or these as bytes."""
    if body.encoding_format in ("bytes", "bytes_only"):
        return Reply(_octets(body, service, values, count, size, answer.num_tokens), answer.truncated)
    data_of = _base64 if body.encoding_format == "base64" else _numbers

    def items(start: int, stop: int) -> list[dict[str, object]]:
        written = [data_of(values(index)) for index in range(start, stop)]
        return [{"index": index, "object": "pooling", "data": data} for index, data in enumerate(written, start)]

    number_bytes = _BASE64_BYTES if body.encoding_format == "base64" else FLOAT_BYTES
    data = Items(count, round(size * number_bytes) + count * _AROUND_BYTES, items)
    return Reply(answer_of("pool", service, data, answer.num_tokens), answer.truncated)


def _numbers(value: Float32Array) -> object:
    return np.ascontiguousarray(value) if value.ndim == 1 else rows_of(value)


def _base64(value: Float32Array) -> str:
    """Base64 of little-endian float32, tokens in order."""
    return binascii.b2a_base64(value.astype("<f4", order="C", copy=False).data, newline=False).decode()


def _octets(
    body: PoolingRequest, service: InferenceService, values: Values, count: int, size: int, num_tokens: int
) -> Octets:
    """``values`` one after the other, described in a header unless they are ``bytes_only``."""

    def make(start: int, stop: int) -> bytes:
        return b"".join(values(index).astype("<f4", copy=False).tobytes() for index in range(start, stop))

    headers = {}
    if body.encoding_format == "bytes":
        data, start = [], 0
        for index in range(count):
            shape = values(index).shape
            end = start + math.prod(shape) * _NUMBER_BYTES
            form = {"embed_dtype": body.embed_dtype, "endianness": body.endianness}
            data.append({"index": index, **form, "start": start, "end": end, "shape": shape})
            start = end
        described = answer_of("pool", service, data, num_tokens)
        headers["metadata"] = json.dumps({name: described[name] for name in described if name != "object"})
    return Octets(count, size * _NUMBER_BYTES, make, headers)


ROUTE: Route[Any] = Route(
    "/pooling",
    "Pool (vLLM)",
    PoolingRequest,
    PoolingResponse,
    parser(PoolingRequest),
    pool,
    Example(
        {"input": TEXTS, "task": "embed"},
        {
            "id": f"pool-{HEX}",
            "object": "list",
            "created": CREATED,
            "model": EMBEDDER,
            "data": [{"index": index, "object": "pooling", "data": vector} for index, vector in enumerate(VECTORS)],
            "usage": token_usage(NUM_TOKENS),
        },
    ),
    octet_headers=("metadata",),
)
