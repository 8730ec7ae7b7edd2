"""text-embeddings-inference's ``/embed``, ``/embed_all``, ``/embed_sparse`` and ``/similarity``: bare lists."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Annotated, Any, ClassVar, TypeAlias, TypedDict, cast

import msgspec
import numpy as np
from msgspec import UNSET, Meta

from bei.engine.sparse import SparseVector as Weights
from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import DOCUMENTS, QUERY, TEXTS, VECTORS, Example
from bei.server.endpoint.field_schema import MAX_INPUTS, Limits, Text, Texts, limits
from bei.server.endpoint.inference import checked_task, embedded, reported
from bei.server.endpoint.input_parts import ComparedInput
from bei.server.endpoint.parse import (
    TokenId,
    check_inputs,
    is_one_input,
    parser,
    read_long_ids,
)
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import FLOAT_BYTES, Items, Reply, rows_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, FormName, PromptControls
from bei.server.endpoint.vector_encoding import OCTET_HEADERS, SPARSE, SparseVector, vector_form
from bei.tasks.embed import SparseEmbeddings, check_task, embed_inputs, embed_tokens
from bei.tasks.mixed import Given

Vector: TypeAlias = list[float]
Ids: TypeAlias = Annotated[list[TokenId], limits(minItems=1)]

# A list of numbers is one input, and nothing else may stand in it.
_ONE_OR_MANY = [
    {"items": {"type": "integer"}},
    {"items": {"type": ["string", "array"]}, "maxItems": MAX_INPUTS},
]

_ONE_OR_MANY_PARTS = [
    {"items": {"type": "integer"}},
    {"items": {"type": ["string", "array", "object"]}, "maxItems": MAX_INPUTS},
]

_MIXED = "inputs mixes token ids with other inputs: put the token ids of one input into a list of their own."

_WEIGHT_BYTES = 37  # {"index":12345,"value":0.12345678},
_WRITTEN = np.zeros((0, 0), np.float32)  # in the place of vectors that are rendered, and need not be kept


class InputsRequest(PromptControls, kw_only=True):
    """A text, the token ids of one input, or a list in which texts and lists of token ids may mix."""

    inputs: Text | Annotated[list[Text | TokenId | Ids], limits(minItems=1, anyOf=_ONE_OR_MANY)]


class WideRequest(InputsRequest, kw_only=True):
    """Of vectors that keep their width."""

    dimensions: Annotated[Refused, refused("these vectors keep their width; leave it out")] = UNSET
    output_dtype: Annotated[
        Refused, refused("these vectors are written as numbers; leave it out", "float", "float32")
    ] = UNSET


class TokensRequest(WideRequest, kw_only=True):
    """Inputs whose tokens have vectors; of models that read images among tokens also `{"image": "data:..."}`."""

    inputs: (  # type: ignore[assignment]
        Text
        | ComparedInput
        | Annotated[list[Text | TokenId | Ids | ComparedInput], limits(minItems=1, anyOf=_ONE_OR_MANY_PARTS)]
    )


class SparseRequest(WideRequest, kw_only=True):
    """Inputs, and how much of their vectors is wanted."""

    top_k: Annotated[int, Meta(ge=1, description="Only so many of the largest weights; null: all.")] | None = None


class EmbedRequest(InputsRequest, kw_only=True):
    """Inputs, of models with an image tower also `{"image": "data:..."}`, and the form of their vectors."""

    inputs: (  # type: ignore[assignment]
        Text
        | ComparedInput
        | Annotated[list[Text | TokenId | Ids | ComparedInput], limits(minItems=1, anyOf=_ONE_OR_MANY_PARTS)]
    )
    normalize: Annotated[bool | None, Meta(description="Null: true.")] = None
    dimensions: Dimensions | None = None
    output_dtype: Annotated[FormName | None, Meta(description="As of /v1/embeddings.")] = None


class Weight(TypedDict):
    """The weight of one entry of the vocabulary."""

    index: int
    value: float


class Sentences(msgspec.Struct):
    """What is compared with what."""

    source_sentence: Text
    sentences: Texts


_NOTHING_ASKED = PromptControls()
_CONTROLS = [name for name in PromptControls.__struct_fields__ if name != "model"]


class SimilarityRequest(PromptControls, kw_only=True):
    """``parameters`` is where TEI has the controls; without it they may stand beside ``inputs``."""

    inputs: Sentences
    parameters: PromptControls | None = None

    _limits: ClassVar[Limits] = (
        {
            "description": "Controls stand in `parameters` or, without it, beside `inputs`.",
            "anyOf": [
                {"properties": {"parameters": {"type": "null"}}},
                {"properties": {name: {"enum": [getattr(_NOTHING_ASKED, name)]} for name in _CONTROLS}},
            ],
        },
    )

    def controls(self) -> PromptControls:
        """Raises InvalidRequestError where some stand in ``parameters`` and others beside it."""
        if self.parameters is None:
            return self
        for name in _CONTROLS:
            if getattr(self, name) != getattr(_NOTHING_ASKED, name):
                raise InvalidRequestError(f"{name} stands beside parameters: write all of them in one place.", name)
        return self.parameters


_decode_request = parser(EmbedRequest)


def inputs_parser(request: type[InputsRequest], max_inputs: int) -> Callable[[bytes], Any]:
    """A parser of bodies as ``request``, with at most ``max_inputs`` inputs. It raises InvalidRequestError."""
    return partial(parse_request, max_inputs=max_inputs, decode=parser(request))


def parse_request(content: bytes, max_inputs: int, decode: Callable[[bytes], Any] = _decode_request) -> Any:
    """Long lists of token ids in pieces. Raises InvalidRequestError, also for more than ``max_inputs`` inputs."""
    found = read_long_ids(content, "inputs", max_inputs, decode)
    if found is not None:
        request, lists = found
        request.inputs = lists
        return request
    body = decode(content)
    if not isinstance(body.inputs, str | ComparedInput):
        check_inputs(body.inputs, max_inputs, "inputs", _MIXED)
    return body


def inputs_of(given: str | ComparedInput | Seq[str | int | list[int] | ComparedInput]) -> list[Given]:
    """One entry an input: a text, its token ids, an image, or a text and an image. A list of numbers, which was
    checked, is one input. Raises InvalidRequestError."""
    is_one = isinstance(given, str | ComparedInput) or is_one_input(given)
    inputs = [given] if is_one else given
    found = [one.compared("inputs") if isinstance(one, ComparedInput) else one for one in inputs]  # type: ignore[union-attr]
    return cast(list[Given], found)


async def embed(body: EmbedRequest, context: RequestContext) -> Reply:
    """Vectors of texts or token ids, of unit length unless `normalize` is false. A list even for one input."""
    form = vector_form(None, output_dtype=body.output_dtype)
    service = context.able(form.task, body.model)
    normalize = body.normalize if form.is_sparse else body.normalize is not False
    asked = body.embed_task(inputs_of(body.inputs), dimensions=body.dimensions, normalize=normalize)
    found = await embedded(context, service, asked, forms=(form,))
    return found.reply(form.items(found.answer))


async def embed_all(body: TokensRequest, context: RequestContext) -> Reply:
    """A vector for each token of each input, special tokens included: of unit length in models for late interaction,
    whose queries are filled up, and whose documents lose punctuation, where `input_type` (or `prompt_name`) says so.
    Models that read images among tokens give images such vectors too."""
    service = context.able("embed_tokens", body.model)
    checked = checked_task(context, service, body.embed_task(inputs_of(body.inputs)), "embed_tokens")
    bytes_per_token = FLOAT_BYTES * (service.manifest.dimension("token_embedding") or 0)
    ticket = context.admit(service, checked.task.inputs, bytes_per_token=bytes_per_token, num_around=checked.num_around)
    answer = await embed_tokens(service, checked, ticket=ticket)
    vectors = answer.vectors

    def items(start: int, stop: int) -> list[Items | None]:
        made = [None if at in answer.errors else rows_of(vectors[at]) for at in range(start, stop)]
        vectors[start:stop] = [_WRITTEN] * len(made)
        return made

    report = await reported(service, checked, answer, ticket) if context.has_report else None
    content = Items(len(vectors), answer.num_tokens * bytes_per_token, items)
    return Reply(content, answer.truncated, report=report)


async def embed_vocabulary(body: SparseRequest, context: RequestContext) -> Reply:
    """Weights of entries of the vocabulary, those above zero or the `top_k` largest, by ascending index: SPLADE and
    its like.
    """
    service = context.able("embed_sparse", body.model)
    inputs = inputs_of(body.inputs)
    found = await embedded(context, service, body.embed_task(inputs, top_k=body.top_k), forms=(SPARSE,))
    answer = found.answer
    assert isinstance(answer, SparseEmbeddings)  # they were asked for

    def items(start: int, stop: int) -> list[Items | None]:
        return [None if at in answer.errors else weights_of(answer.vectors[at]) for at in range(start, stop)]

    num_bytes = sum(len(indices) for indices, _ in answer.vectors) * _WEIGHT_BYTES
    context.check_answer(num_bytes)
    return found.reply(Items(len(inputs), num_bytes, items))


def weights_of(vector: Weights) -> Items:
    """Weights as TEI writes them; values stay numpy's, which orjson writes as short as float32 allows."""
    indices, weights = vector

    def items(start: int, stop: int) -> list[Weight]:
        pairs = zip(indices[start:stop].tolist(), weights[start:stop], strict=True)
        return [{"index": index, "value": value} for index, value in pairs]

    return Items(len(indices), len(indices) * _WEIGHT_BYTES, items)


async def similarity(body: SimilarityRequest, context: RequestContext) -> Reply:
    """Cosine of the source sentence's vector with each sentence's, in the order of the sentences."""
    service = context.able("embed", body.model)
    sentences, source = body.inputs.sentences, body.inputs.source_sentence
    context.check_inputs(sentences, "sentences")
    context.check_inputs([source], "source_sentence")
    texts = [*sentences, source]  # the source last: numbers in the header about cut inputs are the sentences' own
    controls = body.controls()
    context.ask_tier(controls.service_tier)
    checked = check_task(service, controls.embed_task(texts, normalize=True), "embed")
    for warning in checked.warnings:
        context.warn(warning)
    ticket = context.admit(service, texts, num_around=checked.num_around)
    answer = await embed_inputs(service, checked, ticket=ticket)
    return Reply(answer.vectors[:-1] @ answer.vectors[-1], answer.truncated)


VECTORS_EXAMPLE = Example({"inputs": TEXTS}, VECTORS)
_WEIGHTS_EXAMPLE = [{"index": 2088, "value": 1.6094}, {"index": 7592, "value": 1.4816}]


def routes(max_inputs: int) -> tuple[Route[Any], ...]:
    """The routes of a server whose requests have at most ``max_inputs`` inputs."""
    return (
        Route(
            "/embed",
            "Embed (TEI)",
            EmbedRequest,
            (list[Vector], list[str], list[SparseVector]),
            inputs_parser(EmbedRequest, max_inputs),
            embed,
            VECTORS_EXAMPLE,
            has_report=True,
            octet_headers=OCTET_HEADERS,
        ),
        Route(
            "/embed_all",
            "Embed tokens (TEI)",
            TokensRequest,
            list[list[Vector]],
            inputs_parser(TokensRequest, max_inputs),
            embed_all,
            Example({"inputs": TEXTS}, [VECTORS, VECTORS]),
            has_report=True,
        ),
        Route(
            "/embed_sparse",
            "Embed sparsely (TEI)",
            SparseRequest,
            list[list[Weight]],
            inputs_parser(SparseRequest, max_inputs),
            embed_vocabulary,
            Example({"inputs": "hello world", "top_k": 2}, [_WEIGHTS_EXAMPLE]),
            has_report=True,
        ),
        Route(
            "/similarity",
            "Compare texts (TEI)",
            SimilarityRequest,
            Vector,
            parser(SimilarityRequest),
            similarity,
            Example({"inputs": {"source_sentence": QUERY, "sentences": DOCUMENTS}}, [0.26, 0.5795]),
        ),
    )
