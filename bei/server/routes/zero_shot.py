"""``/v1/classify``: with ``labels`` in the request Jina's zero-shot classification, without them vLLM's ``/classify``.

Jina compares embeddings of texts and labels. Here a model of natural language inference says how a text entails "This
example is LABEL.", as transformers' pipeline does, or GLiClass or GLiNER2 scores the labels; other models are refused.
Reference: jina.ai, "Classifier API".
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict

import msgspec
from msgspec import UNSET, Meta

from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import REVIEW, Example
from bei.server.endpoint.field_schema import MAX_INPUTS, Limits, Texts, exactly_one, limits, limits_of_inputs, without
from bei.server.endpoint.field_schema import Text as NonEmptyText
from bei.server.endpoint.parse import parser, too_many_inputs, with_unique_keys
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import Items, Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Controls
from bei.server.routes.classify import (
    CLASSES_EXAMPLE,
    ClassifyRequest,
    ClassifyResponse,
    LabelScore,
    classify_texts,
    ranked_bytes,
)
from bei.server.routes.openai_embeddings import TokensUsage
from bei.tasks.zero_shot import (
    HYPOTHESIS,
    ZeroShotTask,
    check_zero_shot,
    inputs_of,
    label_guidance,
    num_around,
    zero_shot,
)

_AROUND_BYTES = 90  # of a text's scores: its index, its best label with its score


class Text(msgspec.Struct):
    """A text as an object. Pictures are not read here."""

    text: NonEmptyText
    image: Annotated[Refused, limits(type="null")] = UNSET


TextInput: TypeAlias = NonEmptyText | Text | Annotated[list[NonEmptyText | Text], limits_of_inputs]


_NO_LOGITS = "labels of the request have probabilities; leave it out"


class LabelsRequest(Controls, kw_only=True):
    """Jina's. A ``classifier_id`` names a classifier that Jina has trained: there are none here."""

    input: TextInput
    labels: Annotated[
        Texts | Annotated[dict[NonEmptyText, str], limits(minProperties=1, maxProperties=MAX_INPUTS)] | None,
        Meta(description="GLiNER2 reads descriptions too: `{name: description}`."),
    ] = None
    examples: Annotated[
        list[Annotated[list[NonEmptyText], Meta(min_length=2, max_length=2)]],
        Meta(description="Texts with the label of each, for GLiNER2."),
    ] = msgspec.field(default_factory=list)
    classifier_id: Annotated[Refused, refused("send labels")] = UNSET
    raw_scores: Annotated[Refused, refused(_NO_LOGITS, False)] = UNSET
    use_activation: Annotated[Refused, refused(_NO_LOGITS, True)] = UNSET

    _limits: ClassVar[Limits] = (exactly_one(["labels"]),)


class ZeroShotPrediction(TypedDict):
    """The best label of a text, and all of them in the request's order."""

    object: Literal["classification"]
    index: int
    prediction: str
    score: float
    predictions: list[LabelScore]


class LabelsResponse(TypedDict):
    """Jina's."""

    usage: TokensUsage
    data: list[ZeroShotPrediction]


_NULL = msgspec.Raw(b"null")


class _Marks(msgspec.Struct):
    labels: msgspec.Raw = _NULL
    classifier_id: msgspec.Raw = _NULL


_parse_marks = parser(_Marks)
parse_labels = with_unique_keys(parser(LabelsRequest), "labels")
_parse_plain = parser(ClassifyRequest)


def parse(content: bytes) -> LabelsRequest | ClassifyRequest:
    """A body in either dialect. Raises InvalidRequestError."""
    marks = _parse_marks(content)
    if bytes(marks.labels) == bytes(marks.classifier_id) == b"null":
        return _parse_plain(content)
    return parse_labels(content)


async def classify(body: LabelsRequest | ClassifyRequest, context: RequestContext) -> Reply:
    """A score for each label of each text: with `labels` those of the request (Jina; models of natural language
    inference, GLiClass, GLiNER2), without them the model's own (vLLM)."""
    if isinstance(body, ClassifyRequest):
        return await classify_texts(body, context)
    service = context.able("zero_shot", body.model)
    check_zero_shot(service)
    texts = texts_of(body.input, context, "input")
    labels, meanings = [*(body.labels or [])], body.labels if isinstance(body.labels, dict) else {}
    context.check_inputs(texts, "input")
    context.check_inputs(labels, "labels")
    if len(texts) * len(labels) > context.max_inputs:
        raise too_many_inputs(len(texts) * len(labels), context.max_inputs, "input")
    text_bytes = ranked_bytes(labels) + max(map(len, labels)) + _AROUND_BYTES
    context.check_answer(len(texts) * text_bytes)
    guidance = label_guidance(service, labels, meanings, [(text, label) for text, label in body.examples])
    task = ZeroShotTask(texts, body.encoding_options(), labels=labels, template=HYPOTHESIS, guidance=guidance)
    ticket = context.admit(service, inputs_of(service, task), num_around=num_around(service, task))
    scores = await zero_shot(service, task, ticket=ticket)

    def items(start: int, stop: int) -> list[ZeroShotPrediction]:
        return [_classified(index, scores.values[index], labels) for index in range(start, stop)]

    data = Items(len(texts), len(texts) * text_bytes, items)
    return Reply({"usage": {"total_tokens": scores.num_tokens}, "data": data}, scores.truncated)


def texts_of(given: str | Text | Seq[str | Text], context: RequestContext, param: str) -> list[str]:
    """One or many, as texts or objects, counted before they are looked at. Raises InvalidRequestError."""
    inputs = [given] if isinstance(given, (str, Text)) else given
    context.check_count(inputs, param)
    if any(isinstance(one, Text) and one.image is not UNSET and bytes(one.image) != b"null" for one in inputs):
        raise InvalidRequestError(f"An object in {param} has an image, and texts alone are read here.", param)
    return [one if isinstance(one, str) else one.text for one in inputs]


def _classified(index: int, row: Float32Array, labels: list[str]) -> ZeroShotPrediction:
    best = int(row.argmax())
    return {
        "object": "classification",
        "index": index,
        "prediction": labels[best],
        "score": row[best],
        "predictions": [{"label": label, "score": score} for label, score in zip(labels, row, strict=True)],
    }


# What Jina's clients ask for.
LABELS_EXAMPLE = Example(
    {"input": [REVIEW], "labels": ["joy", "anger"]},
    {
        "usage": {"total_tokens": 24},
        "data": [
            {
                "object": "classification",
                "index": 0,
                "prediction": "joy",
                "score": 0.8916,
                "predictions": [{"label": "joy", "score": 0.8916}, {"label": "anger", "score": 0.1084}],
            }
        ],
    },
)

ROUTE: Route[Any] = Route(
    "/v1/classify",
    "Classify (vLLM, SGLang; Jina with labels)",
    (Annotated[ClassifyRequest, without("labels", "classifier_id")], LabelsRequest),
    (ClassifyResponse, LabelsResponse),
    parse,
    classify,
    CLASSES_EXAMPLE,
)
