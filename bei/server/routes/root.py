"""``POST /``: what the served model is for, for clients that know nothing but a server's address.

TEI answers there as its route for the kind of the model does. huggingface_hub's InferenceClient, which writes
``parameters`` into every request but those for embeddings, reads the forms of transformers' pipelines: lists of labels
for each text, entities with ``entity_group``, and labels that are named in the request (zero-shot classification).
Reference: huggingface.co, "Inference Providers", tasks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec
import numpy as np
from msgspec import Meta
from typing_extensions import NotRequired

from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.field_schema import Text, Texts, limits
from bei.server.endpoint.parse import parser, read
from bei.server.endpoint.render import Items, Reply, items_of
from bei.server.endpoint.shared_fields import Model, Tiered
from bei.server.endpoint.vector_encoding import SparseVector
from bei.server.routes import classify, embed, extract, predict_tokens, rerank, systemone
from bei.service.service import InferenceService
from bei.tasks import zero_shot
from bei.tasks.classify import ClassifyTask, num_around
from bei.tasks.classify import classify as classify_inputs
from bei.tasks.entities import Aggregation, Entity
from bei.tasks.token_classification import TokenTask, classify_tokens
from bei.tasks.zero_shot import HYPOTHESIS, ZeroShotTask, check_zero_shot

_ENTITY_BYTES = 90


class ClassificationParameters(msgspec.Struct, kw_only=True):
    """``function_to_apply`` null: as the checkpoint says."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: Annotated[int, Meta(ge=1)] | None = None


class TokenParameters(msgspec.Struct, kw_only=True):
    """``aggregation_strategy`` null: as the hosted pipelines do."""

    aggregation_strategy: Aggregation = "simple"
    ignore_labels: tuple[str, ...] = ("O",)
    stride: Annotated[int | None, limits(type="null")] = None


class ZeroShotParameters(msgspec.Struct, kw_only=True):
    """``hypothesis_template`` has a label where its {} is."""

    candidate_labels: Texts
    multi_label: bool = False
    hypothesis_template: Annotated[str, Meta(max_length=1000), limits(pattern=r"\{\}")] = HYPOTHESIS


class ClassificationRequest(Tiered, kw_only=True):
    """One text or several."""

    inputs: Text | Texts
    parameters: ClassificationParameters
    model: Model | None = None


class TokenRequest(Tiered, kw_only=True):
    """One text or several."""

    inputs: Text | Texts
    parameters: TokenParameters
    model: Model | None = None


class ZeroShotRequest(Tiered, kw_only=True):
    """One text."""

    inputs: Text
    parameters: ZeroShotParameters
    model: Model | None = None


class PipelineEntity(TypedDict):
    """``entity_group`` of several tokens, ``entity`` of one."""

    word: str
    score: float
    start: int
    end: int
    entity: NotRequired[str]
    entity_group: NotRequired[str]


# The bodies of all kinds, for /openapi.json.
REQUESTS = (
    embed.EmbedRequest,
    embed.TokensRequest,
    embed.SparseRequest,
    embed.SimilarityRequest,
    rerank.TextsRequest,
    classify.PredictRequest,
    predict_tokens.PredictTokensRequest,
    ClassificationRequest,
    extract.ExtractRequest,
    systemone.SystemOneRequest,
    TokenRequest,
    ZeroShotRequest,
)
RESPONSES = (
    list[embed.Vector],
    list[str],
    list[SparseVector],
    list[list[embed.Vector]],
    list[list[embed.Weight]],
    embed.Vector,
    list[rerank.Rank],
    list[classify.LabelScore],
    list[list[classify.LabelScore]],
    list[list[predict_tokens.LabelledToken]],
    extract.ExtractResponse,
    systemone.SystemOneResponse,
    list[PipelineEntity],
    list[list[PipelineEntity]],
)


_NULL = b"null"


class _Fields(msgspec.Struct):
    """The fields that tell which request a body is."""

    model: Model | None = None
    inputs: msgspec.Raw = msgspec.Raw(_NULL)
    parameters: msgspec.Raw = msgspec.Raw(_NULL)


_parse_fields = parser(_Fields)


Handler: TypeAlias = Callable[[Any, RequestContext], Awaitable[Reply]]


@dataclass(frozen=True)
class _Kind:
    """The parser and the handler of a kind of request."""

    parse: Callable[[bytes], Any]
    handle: Handler


class Asked(NamedTuple):
    """A request that was read as one of the kind of ``service``, and what answers it."""

    service: InferenceService
    body: Any
    handle: Handler


async def read_by_kind(
    content: bytes, context: RequestContext, model: str | None = None, *, is_named: bool = False
) -> Asked:
    """``model``: of a request that names none or, ``is_named``, whatever it names. Raises InvalidRequestError,
    ModelNotFoundError."""
    fields, _ = await read(_parse_fields, content, in_part=context.has_report)
    name = model if is_named or fields.model is None else fields.model
    service = context.named(name)
    kind = _kind_of(service.manifest.tasks, bytes(fields.inputs).lstrip(), bytes(fields.parameters), context.max_inputs)
    body, context.unreadable = await read(kind.parse, content, in_part=context.has_report)
    given = getattr(body, "body", body)
    given.model = name
    context.ask_tier(given.service_tier)
    return Asked(service, body, kind.handle)


async def by_kind(content: bytes, context: RequestContext) -> Reply:
    """What the route of the model's kind answers: vectors, sparse vectors, scores of texts, or labels.

    With `parameters`, as huggingface_hub's client sends them, labels and entities have the form of its pipelines. With
    `source_sentence` and `sentences` as `inputs` the answer is their similarity.
    """
    asked = await read_by_kind(content, context)
    return await asked.handle(asked.body, context)


def _kind_of(tasks: Seq[str], inputs: bytes, parameters: bytes, max_inputs: int) -> _Kind:
    """Raises InvalidRequestError for parameters that the kind of the model does not read."""
    task = tasks[0]
    if "zero_shot" in tasks and b'"candidate_labels"' in parameters:
        task = "zero_shot"  # of GLiNER2, which finds spans too
    if inputs[:1] == b"{":
        return _SIMILARITY
    if task == "rerank" and inputs != _NULL:
        task = "classify"
    if parameters != _NULL:
        if task in ("classify", "zero_shot"):
            return _ZERO_SHOT if task == "zero_shot" or b'"candidate_labels"' in parameters else _CLASSIFICATION
        if task == "classify_tokens":
            return _TOKENS
        if b"".join(parameters.split()) != b"{}":
            raise InvalidRequestError(
                "This model's requests have no parameters: write them beside inputs.", "parameters"
            )
    if task in _OF_INPUTS:
        request, handle = _OF_INPUTS[task]
        return _Kind(embed.inputs_parser(request, max_inputs), handle)
    return _KINDS[task]


async def classify_texts(body: ClassificationRequest, context: RequestContext) -> Reply:
    """For each text the labels and their scores, best first; a list of one list for one text."""
    service, asked = context.able("classify", body.model), body.parameters
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    context.check_inputs(texts, "inputs")
    labels = classify.labels_of(service)
    num_bytes = classify.ranked_bytes(labels)
    context.check_answer(len(texts) * num_bytes)
    task = ClassifyTask(texts, function=asked.function_to_apply)
    answer = await classify_inputs(service, task, ticket=context.admit(service, texts, num_around=num_around(service)))
    content = items_of(list(answer.values), num_bytes, lambda row: classify.by_score(row, labels)[: asked.top_k])
    return Reply(content, answer.truncated)


async def label_tokens(body: TokenRequest, context: RequestContext) -> Reply:
    """The entities of a text, or a list for each of several."""
    service, asked = context.able("classify_tokens", body.model), body.parameters
    if asked.stride is not None:
        raise InvalidRequestError("stride is not supported here: send a long text in parts.", "parameters")
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    context.check_inputs(texts, "inputs")
    ticket = context.admit(service, texts, bytes_per_token=_ENTITY_BYTES)
    answer = await classify_tokens(service, TokenTask(texts, aggregation=asked.aggregation_strategy), ticket=ticket)

    def entities_of(index: int) -> Items:
        found = [entity for entity in answer.entities_of(index) if entity.label not in asked.ignore_labels]
        key = "entity" if asked.aggregation_strategy == "none" else "entity_group"
        return items_of(found, _ENTITY_BYTES, lambda entity: _entity(entity, key))

    num_bytes = answer.num_tokens * _ENTITY_BYTES // len(texts)
    content = items_of(range(len(texts)), num_bytes, entities_of) if body.inputs is texts else entities_of(0)
    return Reply(content, answer.truncated)


def _entity(entity: Entity, key: str) -> dict[str, object]:
    found = {key: entity.label, "score": entity.score, "word": entity.text}
    return {**found, "start": entity.start, "end": entity.end}


async def name_labels(body: ZeroShotRequest, context: RequestContext) -> Reply:
    """The labels of the request with their scores, best first."""
    service, asked = context.able("zero_shot", body.model), body.parameters
    labels, template = asked.candidate_labels, asked.hypothesis_template
    context.check_inputs([body.inputs], "inputs")
    context.check_inputs(labels, "candidate_labels")
    check_zero_shot(service, template)
    num_bytes = classify.ranked_bytes(labels)
    context.check_answer(num_bytes)
    task = ZeroShotTask(
        [body.inputs], labels=labels, param="candidate_labels", multi_label=asked.multi_label, template=template
    )
    ticket = context.admit(service, zero_shot.inputs_of(service, task), num_around=zero_shot.num_around(service, task))
    scores = await zero_shot.zero_shot(service, task, ticket=ticket)
    values = scores.values[0]
    order = np.argsort(-values, kind="stable")

    def items(start: int, stop: int) -> list[classify.LabelScore]:
        return [{"score": values[index], "label": labels[index]} for index in order[start:stop].tolist()]

    return Reply(Items(len(labels), num_bytes, items), scores.truncated)


_SIMILARITY = _Kind(parser(embed.SimilarityRequest), embed.similarity)
_CLASSIFICATION = _Kind(parser(ClassificationRequest), classify_texts)
_TOKENS = _Kind(parser(TokenRequest), label_tokens)
_ZERO_SHOT = _Kind(parser(ZeroShotRequest), name_labels)
_OF_INPUTS: Mapping[str, tuple[type[embed.InputsRequest], Handler]] = {
    "embed": (embed.EmbedRequest, embed.embed),
    "embed_tokens": (embed.TokensRequest, embed.embed_all),
    "embed_sparse": (embed.SparseRequest, embed.embed_vocabulary),
}
_KINDS = {
    "rerank": _Kind(parser(rerank.TextsRequest), rerank.rank_texts),
    "classify": _Kind(parser(classify.PredictRequest), classify.predict),
    "classify_tokens": _Kind(parser(predict_tokens.PredictTokensRequest), predict_tokens.predict_tokens),
    "extract": _Kind(extract.ROUTE.parse, extract.ROUTE.handle),
    "decide": _Kind(systemone.ROUTE.parse, systemone.ROUTE.handle),
    "zero_shot": _ZERO_SHOT,
}
