"""Scores of labels for texts and pairs: those of the model, or those of the request (zero-shot)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Literal, cast

import numpy as np

from bei.artifact.manifest import Classification, ClassifyTemplate
from bei.core import Float32Array, ScoreFunction
from bei.engine.postprocess import apply_function
from bei.errors import InvalidRequestError, TaskNotSupportedError
from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.support import PartialResult, computed, require
from bei.tokenizer.encoder import EncodingOptions, Input
from bei.tokenizer.prompts import apply_default_prompt
from bei.tokenizer.templates import TextTemplate

# How zero-shot classification asks for a label (transformers' default).
HYPOTHESIS = "This example is {}."


class ClassifyTask(ModelRequest, frozen=True, kw_only=True):
    """Texts or pairs. ``function``: of the logits; None: the checkpoint's. ``raw``: the logits themselves."""

    raw: bool = False
    function: Literal["sigmoid", "softmax", "none"] | None = None


class ZeroShotTask(ModelRequest, frozen=True, kw_only=True):
    """Texts, and the ``hypotheses`` that they may entail, which share one probability. ``multi_label``: each has its
    own, of entailment against contradiction, and so has a single one."""

    hypotheses: Seq[str]
    multi_label: bool = False

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each text with each hypothesis."""
        return [(str(text), hypothesis) for text in self.inputs for hypothesis in self.hypotheses]


class Scores(PartialResult, frozen=True, kw_only=True):
    """``values`` float32 [n, labels]: probabilities, or logits where the request asked for raw scores; zeros where an
    input has an error."""

    values: Float32Array
    labels: list[str]


async def classify(service: ModelService, task: ClassifyTask, *, ticket: Ticket) -> Scores:
    """Score every label for each input. A model with a template is asked with it."""
    require(service, "classify")
    answer, classification = await logits_of(service, task, ticket)
    chosen = "none" if task.raw else task.function or classification.function
    values = await scores_of(answer, lambda rows: label_scores(service, rows, chosen), len(classification.labels))
    return Scores(answer.lengths, answer.truncated, answer.errors, values=values, labels=classification.labels)


def label_scores(service: ModelService, logits: Float32Array, function: ScoreFunction) -> Float32Array:
    """Scores [n, labels] of the model's own labels; those of the softmax have the artifact's temperature."""
    temperature = service.manifest.temperature("classify") if function == "softmax" else 1.0
    return apply_function(logits if temperature == 1.0 else logits / np.float32(temperature), function)


def _in_template(service: ModelService, task: ModelRequest, template: ClassifyTemplate) -> EncodingOptions:
    """The task's options, with the template. Raises InvalidRequestError for pairs where texts are read, and for texts
    where pairs are."""
    for place, value in enumerate(task.inputs):
        if isinstance(value, list) or isinstance(value, tuple) is template.reads_pairs:
            continue  # token ids are run as they are
        expected = "pairs of a text and a response" if template.reads_pairs else "single texts"
        raise InvalidRequestError(f"{service.name}'s template reads {expected}: inputs {place} is none.", "inputs")
    return replace(task.options, framed=True, template=TextTemplate(template.body))


async def zero_shot(service: ModelService, task: ZeroShotTask, *, ticket: Ticket) -> Scores:
    """Score each hypothesis by how a text entails it, with a model of natural language inference: a row a text.

    ``truncated`` lists texts. Raises TaskNotSupportedError for a model without such labels.
    (transformers: ZeroShotClassificationPipeline; arXiv:1909.00161)
    """
    entails, contradicts = nli_labels(service)
    texts, hypotheses, multi_label = task.inputs, task.hypotheses, task.multi_label
    answer, _ = await logits_of(service, ModelRequest(task.pairs, task.options), ticket)

    def scores_of_labels(logits: Float32Array) -> Float32Array:
        if multi_label or len(hypotheses) == 1:
            return apply_function(logits[:, [contradicts, entails]], "softmax")[:, 1].reshape(len(texts), -1)
        return apply_function(logits[:, entails].reshape(len(texts), -1), "softmax")

    values = await computed(answer.rows, "logits", scores_of_labels)
    truncated = sorted({index // len(hypotheses) for index in answer.truncated})
    return Scores(answer.lengths, truncated, values=values, labels=list(hypotheses))


def nli_labels(service: ModelService) -> tuple[int, int]:
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
    service: ModelService, task: ModelRequest, ticket: Ticket
) -> tuple[InferenceResult, Classification]:
    """The model's scores of texts or pairs before any function, and the meaning of each."""
    classification = service.manifest.classification
    assert classification is not None  # whatever has logits has labels
    template, options = service.manifest.classify_template, task.options
    if template:
        options = _in_template(service, task, template)
    led = ModelRequest(apply_default_prompt(service.manifest, cast("Seq[Input]", task.inputs)), options, task.failed)
    return await service.infer(led, ticket=ticket, outputs={"logits"}), classification


async def scores_of(
    answer: InferenceResult, function: Callable[[Float32Array], Float32Array], width: int
) -> Float32Array:
    """``function`` of the logits, float32 [n, width], zeros where an input has an error."""
    if not answer.rows:
        return np.zeros((len(answer.encodings), width), np.float32)
    return answer.spread_rows(await computed(answer.rows, "logits", function))
