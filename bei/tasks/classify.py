"""Scores of a model's own labels for texts and pairs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Literal, cast

import numpy as np

from bei.artifact.manifest import Classification, ClassifyTemplate
from bei.core import Float32Array, ScoreFunction
from bei.engine.postprocess import apply_function
from bei.errors import InvalidRequestError
from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.support import PartialResult, computed, require
from bei.tokenizer.encoder import EncodingOptions, Input
from bei.tokenizer.prompts import apply_default_prompt, num_chars, prompt_of
from bei.tokenizer.templates import TextTemplate


class ClassifyTask(ModelRequest, frozen=True, kw_only=True):
    """Texts or pairs. ``function``: of the logits; None: the checkpoint's. ``raw``: the logits themselves."""

    raw: bool = False
    function: Literal["sigmoid", "softmax", "none"] | None = None


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


def num_around(service: ModelService) -> int:
    """Characters that are read with each input: of the default prompt, and of the model's template."""
    template = service.manifest.classify_template
    return num_chars(prompt_of(service.manifest)) + (TextTemplate(template.body).num_chars if template else 0)


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
