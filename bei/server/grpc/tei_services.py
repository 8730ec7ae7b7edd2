"""text-embeddings-inference's services, on the functions of its HTTP routes.

A request names no model: the only one that has the task answers, or the one in the metadata ``x-bei-model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from bei.config.settings import ServeConfig
from bei.errors import InvalidRequestError
from bei.metrics.request_timing import Timing
from bei.server.dialects import tei
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.inference import order_of
from bei.server.endpoint.render import INLINE_BYTES, Items, Reply
from bei.server.grpc.calls import Handle, RpcAnswer, RpcMethod, report_of, struct_of
from bei.server.grpc.messages import TEI, bytes_field, float_field, message
from bei.server.routes import classify, embed, rerank, tokenize
from bei.server.routes.info import describe
from bei.tasks.rerank import RerankTask, num_around
from bei.tasks.rerank import rerank as score_pairs
from bei.tokenizer.truncation import encoding_options

_DIRECTIONS = ("Right", "Left")
_FLOATS = 1  # the field of vectors, in EmbedResponse and TokenEmbedding
_TOKENS = 1  # of EmbedAllResponse
_KINDS = ("embedding", "classifier", "reranker")

_message = partial("{}.{}".format, TEI)


def _type(name: str) -> Any:
    return message(_message(name))


def _optional(request: Any, name: str) -> Any:
    """The value of an optional field; None: it is not there."""
    return getattr(request, name) if request.HasField(name) else None


def _direction(request: Any) -> str:
    number: int = request.truncation_direction
    if number not in range(len(_DIRECTIONS)):
        raise InvalidRequestError("truncation_direction must be 0 (right) or 1 (left).", "truncation_direction")
    return _DIRECTIONS[number]


def _cut(request: Any) -> dict[str, Any]:
    """What a request says of truncation: false, which is proto3's default, refuses what is too long."""
    return {"truncate": request.truncate, "truncation_direction": _direction(request)}


def _metadata(answer: Any, timing: Timing | None) -> None:
    """Fill the answer's Metadata."""
    assert timing is not None  # every call has one
    means, metadata = timing.means(), answer.metadata
    metadata.compute_chars = timing.num_characters
    metadata.compute_tokens = timing.num_tokens
    metadata.total_time_ns = _nanoseconds(timing.total_s)
    metadata.tokenization_time_ns = _nanoseconds(means.tokenization_s)
    metadata.queue_time_ns = _nanoseconds(means.queue_s)
    metadata.inference_time_ns = _nanoseconds(means.inference_s)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _items(reply: Reply) -> Any:
    """The list that a route answers."""
    content = reply.content
    return content.make(0, content.count) if isinstance(content, Items) else content


def _now_or_later(make: Callable[[], Any], items: Items) -> Any:
    """The message that ``make`` makes of ``items``, or, where they are many, ``make``, which is called off the loop."""
    return make if items.num_bytes > INLINE_BYTES else make()


async def _embed(request: Any, context: RequestContext, model: str | None) -> RpcAnswer:
    body = struct_of(
        embed.EmbedRequest,
        inputs=request.inputs,
        model=model,
        normalize=_optional(request, "normalize"),
        prompt_name=_optional(request, "prompt_name"),
        dimensions=_optional(request, "dimensions"),
        **_cut(request),
    )
    reply = await embed.embed(body, context)
    found = _type("EmbedResponse")()
    (vector,) = _items(reply)
    if vector is not None:  # else the report says why
        found.MergeFromString(float_field(_FLOATS, vector))
    _metadata(found, context.timing)
    return RpcAnswer(found, reply.truncated, report_of(reply))


async def _embed_sparse(request: Any, context: RequestContext, model: str | None) -> RpcAnswer:
    body = struct_of(
        embed.SparseRequest,
        inputs=request.inputs,
        model=model,
        prompt_name=_optional(request, "prompt_name"),
        **_cut(request),
    )
    reply = await embed.embed_vocabulary(body, context)
    found = _type("EmbedSparseResponse")()
    (weights,) = _items(reply)
    for weight in weights.make(0, weights.count) if weights is not None else ():
        found.sparse_embeddings.add(index=weight["index"], value=float(weight["value"]))
    _metadata(found, context.timing)
    return RpcAnswer(found, reply.truncated, report_of(reply))


async def _embed_all(request: Any, context: RequestContext, model: str | None) -> RpcAnswer:
    body = struct_of(
        embed.WideRequest,
        inputs=request.inputs,
        model=model,
        prompt_name=_optional(request, "prompt_name"),
        **_cut(request),
    )
    reply = await embed.embed_all(body, context)
    found = _type("EmbedAllResponse")()
    (rows,) = _items(reply)
    _metadata(found, context.timing)
    if rows is None:
        return RpcAnswer(found, reply.truncated, report_of(reply))

    def made() -> Any:
        tokens = (bytes_field(_TOKENS, float_field(_FLOATS, row)) for row in rows.make(0, rows.count))
        found.MergeFromString(b"".join(tokens))
        return found

    return RpcAnswer(_now_or_later(made, rows), reply.truncated, report_of(reply))


async def _predict(request: Any, context: RequestContext, model: str | None) -> RpcAnswer:
    return await _classified(request, request.inputs, context, model)


async def _predict_pair(request: Any, context: RequestContext, model: str | None) -> RpcAnswer:
    pair = [*request.inputs]
    if len(pair) not in (1, 2):
        raise InvalidRequestError(f"inputs has {len(pair)} texts: send one, or the two of a pair.", "inputs")
    return await _classified(request, pair, context, model)


async def _classified(request: Any, inputs: str | list[str], context: RequestContext, model: str | None) -> RpcAnswer:
    body = struct_of(
        classify.PredictRequest, inputs=inputs, model=model, raw_scores=request.raw_scores, **_cut(request)
    )
    reply = await classify.predict_as_tei(body, context)
    found = _type("PredictResponse")()
    for entry in _items(reply):
        found.predictions.add(score=float(entry["score"]), label=entry["label"])
    _metadata(found, context.timing)
    return RpcAnswer(found, reply.truncated)


async def _rerank(request: Any, context: RequestContext, model: str | None) -> RpcAnswer:
    body = struct_of(
        rerank.TextsRequest,
        query=request.query,
        model=model,
        texts=[*request.texts],
        raw_scores=request.raw_scores,
        return_text=request.return_text,
        **_cut(request),
    )
    reply = await rerank.rank_texts(body, context)
    found = _type("RerankResponse")()
    for rank in _items(reply):
        found.ranks.add(index=rank["index"], text=rank.get("text"), score=float(rank["score"]))
    _metadata(found, context.timing)
    return RpcAnswer(found, reply.truncated)


async def _rerank_stream(requests: Seq[Any], context: RequestContext, model: str | None) -> RpcAnswer:
    """All pairs together. What the first message says of truncation, scores and texts holds for all."""
    context.check_count(requests, "text")
    first = requests[0]
    service = context.able("rerank", model)
    for index, request in enumerate(requests):
        if (request.truncate, request.truncation_direction) != (first.truncate, first.truncation_direction):
            message = (
                f"truncate and truncation_direction of message {index} differ from those of the first: send the same."
            )
            raise InvalidRequestError(message, "truncate")
    pairs = [(request.query, request.text) for request in requests]
    options = encoding_options(first.truncate, _direction(first))
    ticket = context.admit(service, pairs, num_around=num_around(service))
    scores = await score_pairs(service, RerankTask(pairs, options, raw=first.raw_scores), ticket=ticket)
    found = _type("RerankResponse")()
    for index in order_of(scores):
        text = pairs[index][1] if first.return_text else None
        found.ranks.add(index=index, text=text, score=float(scores.values[index, 0]))
    _metadata(found, context.timing)
    return RpcAnswer(found, scores.truncated)


async def _tokenize(request: Any, context: RequestContext, model: str | None) -> RpcAnswer:
    body = struct_of(
        tokenize.InputsRequest,
        inputs=request.inputs,
        model=model,
        add_special_tokens=request.add_special_tokens,
        prompt_name=_optional(request, "prompt_name"),
    )
    reply = await tokenize.tokenize_as_tei(body, context)
    found = _type("EncodeResponse")()
    (tokens,) = _items(reply)

    def made() -> Any:
        for token in tokens.make(0, tokens.count):
            found.tokens.add(**token)
        return found

    return RpcAnswer(_now_or_later(made, tokens))


async def _decode(request: Any, context: RequestContext, model: str | None) -> RpcAnswer:
    if not request.ids:
        raise InvalidRequestError("ids is empty: send those of a text.", "ids")
    if len(request.ids) > tokenize.MOST_IDS:  # before a list is made of them
        raise tokenize.too_many_ids(len(request.ids), "ids", "ids")
    body = struct_of(
        tei.DecodeRequest, ids=[*request.ids], model=model, skip_special_tokens=request.skip_special_tokens
    )
    reply = await tei.decode_as_tei(body, context)
    return RpcAnswer(_type("DecodeResponse")(text=_items(reply)[0]))


def _info(config: ServeConfig) -> Handle:
    async def info(_: Any, context: RequestContext, model: str | None) -> RpcAnswer:
        told: Any = describe(context.named(model), config)
        (kind,) = told["model_type"]
        found = _type("InfoResponse")(model_type=_KINDS.index(kind))
        for field in found.DESCRIPTOR.fields:
            if field.name != "model_type" and told.get(field.name) is not None:
                setattr(found, field.name, told[field.name])
        return RpcAnswer(found)

    return info


def tei_methods(config: ServeConfig) -> Iterator[RpcMethod]:
    """The methods with one message each way, and those of their streams. ``RerankStream`` gets all messages at once."""

    def method(service: str, name: str, request: str, handle: Any, **facts: bool) -> RpcMethod:
        return RpcMethod(f"/{TEI}.{service}/{name}", _type(request), handle, any_model=True, **facts)

    yield method("Info", "Info", "InfoRequest", _info(config))
    for service, name, request, handle, has_report in (
        ("Embed", "Embed", "EmbedRequest", _embed, True),
        ("Embed", "EmbedSparse", "EmbedSparseRequest", _embed_sparse, True),
        ("Embed", "EmbedAll", "EmbedAllRequest", _embed_all, True),
        ("Predict", "Predict", "PredictRequest", _predict, False),
        ("Predict", "PredictPair", "PredictPairRequest", _predict_pair, False),
        ("Tokenize", "Tokenize", "EncodeRequest", _tokenize, False),
        ("Tokenize", "Decode", "DecodeRequest", _decode, False),
    ):
        yield method(service, name, request, handle, has_report=has_report)
        yield method(service, f"{name}Stream", request, handle)
    yield method("Rerank", "Rerank", "RerankRequest", _rerank)
    yield method("Rerank", "RerankStream", "RerankStreamRequest", _rerank_stream)
