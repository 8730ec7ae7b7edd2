"""``/predict`` (text-embeddings-inference, BEI) and ``/classify`` (vLLM, SGLang, Infinity): a score for each label."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import numpy as np
from msgspec import UNSET

from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import (
    CLASSIFIER,
    CREATED,
    HEX,
    LABEL_SCORES,
    REVIEW,
    REVIEW_TOKENS,
    Example,
    token_usage,
)
from bei.server.endpoint.field_schema import MAX_INPUTS, Limits, Text, Texts, limits
from bei.server.endpoint.parse import parser
from bei.server.endpoint.refused_fields import FormerActivation
from bei.server.endpoint.render import FLOAT_BYTES, Items, Reply, items_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import RAW_OR_ACTIVATED, InputControls, RawScores, ScoreControls, is_raw
from bei.server.routes.openai_embeddings import Usage, usage
from bei.service.service import InferenceService
from bei.tasks.classify import ClassifyTask, Scores, classify, num_around
from bei.tokenizer.encoder import Input

# What JSON takes, about: of a score beside its label, of what stands around the scores of an input.
_SCORE_BYTES = 33
_AROUND_BYTES = 60

_PREDICT_FORMS = 'a text; a pair as ["a", "b"]; or a batch of texts and pairs as [["a"], ["b", "c"]]'


_TEXT = {"type": "string", "minLength": 1}
_ONE = {"type": "array", "minItems": 1, "maxItems": 1, "items": _TEXT}
_PAIR = {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "string"}}
_ONE_OR_TWO = {"oneOf": [_ONE, _PAIR]}
_BATCH = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _ONE_OR_TWO}


class PredictRequest(ScoreControls, kw_only=True):
    """TEI's and BEI's. A list of two strings is one pair, not two texts."""

    inputs: Annotated[str | list[str | list[str]], limits(oneOf=[_TEXT, _ONE_OR_TWO, _BATCH])]


class ClassifyRequest(InputControls, kw_only=True):
    """vLLM's and Infinity's."""

    input: Text | Texts
    raw_scores: RawScores | None = None
    normalize: FormerActivation = UNSET

    _limits: ClassVar[Limits] = RAW_OR_ACTIVATED


class LabelScore(TypedDict):
    """A label with its probability or, where raw scores are asked for, its logit."""

    score: float
    label: str


class ClassProbabilities(TypedDict):
    """vLLM's: the best label, and what all labels have, in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(TypedDict):
    """``data`` has vLLM's object, or Infinity's list by descending score, for each text."""

    id: str
    object: Literal["list", "classify"]
    created: int
    model: str
    data: Sequence[ClassProbabilities | list[LabelScore]]
    usage: Usage


def inputs_of(given: str | list[str | list[str]]) -> tuple[list[Input], bool]:
    """The texts and pairs of a ``/predict`` request; True: it is a batch. Raises InvalidRequestError."""
    if isinstance(given, str):
        return [given], False
    lists = [value for value in given if not isinstance(value, str)]
    if given and not lists:
        return [_one_or_pair([value for value in given if isinstance(value, str)])], False
    if len(lists) < len(given):
        raise InvalidRequestError(f"inputs mixes texts and lists: send {_PREDICT_FORMS}.", "inputs")
    return [_one_or_pair(texts) for texts in lists], True


def _one_or_pair(texts: list[str]) -> Input:
    if not 1 <= len(texts) <= 2:
        raise InvalidRequestError(f"inputs has a list of {len(texts)} texts: send {_PREDICT_FORMS}.", "inputs")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


async def predict(body: PredictRequest, context: RequestContext, *, as_tei: bool = False) -> Reply:
    """Labels with their scores, best first: one list for a text or a pair, a list of lists for a batch.

    A list of two strings is one pair, which the model reads together; batches are lists of lists.
    """
    service = context.able("classify", body.model)
    inputs, is_batch = inputs_of(body.inputs)
    context.check_inputs(inputs, "inputs")
    context.check_answer(len(inputs) * ranked_bytes(labels_of(service)))
    function = tei_function(service) if as_tei else None
    asked = ClassifyTask(inputs, body.encoding_options(), raw=body.is_raw(), function=function)
    answer = await classify(service, asked, ticket=context.admit(service, inputs, num_around=num_around(service)))
    content = ranked(answer)
    return Reply(content if is_batch else content.make(0, 1)[0], answer.truncated)


async def predict_as_tei(body: PredictRequest, context: RequestContext) -> Reply:
    """Labels with their scores, best first: the softmax of several labels, the sigmoid of an only one."""
    return await predict(body, context, as_tei=True)


def tei_function(service: InferenceService) -> Literal["sigmoid", "softmax"]:
    """TEI's, which reads none of a checkpoint (``core/src/infer.rs``)."""
    return "sigmoid" if len(labels_of(service)) == 1 else "softmax"


async def classify_texts(body: ClassifyRequest, context: RequestContext) -> Reply:
    """A score for each label of each text. Infinity's client, which always sends `raw_scores`, gets its own `data`."""
    service = context.able("classify", body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    context.check_inputs(texts, "input")
    context.check_answer(len(texts) * ranked_bytes(labels_of(service)))
    asked = ClassifyTask(texts, body.encoding_options(), raw=is_raw(body.raw_scores, body.use_activation))
    answer = await classify(service, asked, ticket=context.admit(service, texts, num_around=num_around(service)))
    is_infinity = body.raw_scores is not None
    return Reply(render(answer, service.name, is_infinity=is_infinity), answer.truncated)


def labels_of(service: InferenceService) -> list[str]:
    """The labels of a model that classifies; [] of others."""
    classification = service.manifest.classification
    return classification.labels if classification else []


def by_score(row: Float32Array, labels: Sequence[str]) -> list[LabelScore]:
    """All labels, by descending score."""
    return [{"score": row[index], "label": labels[index]} for index in np.argsort(-row, kind="stable").tolist()]


def ranked(scores: Scores) -> Items:
    """For each input all labels, by descending score."""
    return items_of(list(scores.values), ranked_bytes(scores.labels), lambda row: by_score(row, scores.labels))


def by_class(scores: Scores) -> Items:
    """ClassProbabilities: the best label of each input, and the scores of all."""
    values, labels = scores.values, scores.labels

    def items(start: int, stop: int) -> list[dict[str, object]]:
        best = values[start:stop].argmax(axis=1).tolist()
        return [
            {"index": index, "label": labels[best[index - start]], "probs": values[index], "num_classes": len(labels)}
            for index in range(start, stop)
        ]

    return Items(len(values), values.size * FLOAT_BYTES + len(values) * _AROUND_BYTES, items)


def ranked_bytes(labels: Sequence[str]) -> int:
    """About what JSON takes for a list of all labels with their scores."""
    return sum(len(label) + _SCORE_BYTES for label in labels)


def render(scores: Scores, model: str, *, is_infinity: bool) -> dict[str, object]:
    """The ClassifyResponse in one of its two dialects."""
    return {
        "id": f"classify-{uuid.uuid4().hex}",
        "object": "classify" if is_infinity else "list",
        "created": int(time.time()),
        "model": model,
        "data": ranked(scores) if is_infinity else by_class(scores),
        "usage": usage(scores.num_tokens),
    }


def example_of(kind: Literal["list", "classify"], data: object) -> Example:
    """What a client asks for one text, and the ClassifyResponse with ``data`` of it."""
    answer = {
        "id": f"classify-{HEX}",
        "object": kind,
        "created": CREATED,
        "model": CLASSIFIER,
        "data": [data],
        "usage": token_usage(REVIEW_TOKENS),
    }
    return Example({"input": [REVIEW]}, answer)


CLASSES_EXAMPLE = example_of("list", {"index": 0, "label": "POSITIVE", "probs": [0.0002, 0.9998], "num_classes": 2})

ROUTES: tuple[Route[Any], ...] = (
    Route(
        "/predict",
        "Classify (TEI, BEI)",
        PredictRequest,
        (list[LabelScore], list[list[LabelScore]]),
        parser(PredictRequest),
        predict,
        Example({"inputs": REVIEW}, LABEL_SCORES),
    ),
    Route(
        "/classify",
        "Classify (vLLM, Infinity)",
        ClassifyRequest,
        ClassifyResponse,
        parser(ClassifyRequest),
        classify_texts,
        CLASSES_EXAMPLE,
    ),
)
