"""Scores of labels for texts and pairs: those of the model, or those of the request (zero-shot)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

import msgspec

from bei.artifact.manifest import Classification
from bei.core import Float32Array
from bei.engine.postprocess import apply_function
from bei.errors import TaskNotSupportedError
from bei.service.admission import Ticket
from bei.service.service import Answer, InferenceService
from bei.tasks.support import computed, require
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions, Input
from bei.tokenizer.prompts import led_by_default

# How zero-shot classification asks for a label (transformers' default).
HYPOTHESIS = "This example is {}."


class Scores(msgspec.Struct, frozen=True):
    """``values`` float32 [n, labels]: probabilities, or logits where the request asked for raw scores."""

    values: Float32Array
    labels: list[str]
    num_tokens: int
    truncated: list[int]


async def classify(
    service: InferenceService,
    inputs: Seq[Input],
    *,
    ticket: Ticket,
    raw: bool = False,
    function: Literal["sigmoid", "softmax", "none"] | None = None,
    options: EncodingOptions = AS_CONFIGURED,
) -> Scores:
    """Score every label for texts or pairs, by ``function`` of the logits (None: the checkpoint's).

    ``raw``: the logits themselves.
    """
    require(service, "classify")
    answer, classification = await logits_of(service, inputs, ticket, options)
    chosen = "none" if raw else function or classification.function
    values = await computed(answer.rows, "logits", lambda rows: apply_function(rows, chosen))
    return Scores(values, classification.labels, answer.num_tokens, answer.truncated)


async def zero_shot(
    service: InferenceService,
    texts: Seq[str],
    hypotheses: Seq[str],
    *,
    ticket: Ticket,
    multi_label: bool = False,
    options: EncodingOptions = AS_CONFIGURED,
) -> Scores:
    """Score each of ``hypotheses`` by how a text entails it, with a model of natural language inference: a row a text.

    The hypotheses share one probability; ``multi_label``: each has its own, of entailment against contradiction, and so
    has a single one. ``truncated`` lists texts. Raises TaskNotSupportedError for a model without such labels.
    (transformers: ZeroShotClassificationPipeline; arXiv:1909.00161)
    """
    entails, contradicts = nli_labels(service)
    pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
    answer, _ = await logits_of(service, pairs, ticket, options)

    def scores_of(logits: Float32Array) -> Float32Array:
        if multi_label or len(hypotheses) == 1:
            return apply_function(logits[:, [contradicts, entails]], "softmax")[:, 1].reshape(len(texts), -1)
        return apply_function(logits[:, entails].reshape(len(texts), -1), "softmax")

    values = await computed(answer.rows, "logits", scores_of)
    truncated = sorted({index // len(hypotheses) for index in answer.truncated})
    return Scores(values, list(hypotheses), answer.num_tokens, truncated)


def nli_labels(service: InferenceService) -> tuple[int, int]:
    """The places of entailment and of contradiction among a model's labels; of two labels the other one is the latter.

    Raises TaskNotSupportedError for a model that has no such labels.
    """
    require(service, "classify")
    classification = service.manifest.classification
    assert classification is not None  # require("classify") has passed
    labels = [label.lower() for label in classification.labels]
    entails = next((index for index, label in enumerate(labels) if label.startswith("entail")), None)
    others = [index for index, label in enumerate(labels) if label.startswith("contra") or len(labels) == 2]
    contradicts = next((index for index in others if index != entails), None)
    if entails is None or contradicts is None:
        raise TaskNotSupportedError(
            f"{service.name} has the labels {', '.join(classification.labels)}: labels of a request need a model of "
            "natural language inference, with entailment and contradiction.",
            "model",
        )
    return entails, contradicts


async def logits_of(
    service: InferenceService, inputs: Seq[Input], ticket: Ticket, options: EncodingOptions
) -> tuple[Answer, Classification]:
    """The model's scores before any function, and what they mean."""
    classification = service.manifest.classification
    assert classification is not None  # whatever has logits has labels
    led = led_by_default(service.manifest, inputs)
    return await service.infer(led, ticket=ticket, outputs={"logits"}, options=options), classification
