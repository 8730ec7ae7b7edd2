"""Probabilities of options for a text, by the models of ``bei.tasks.decision_readings``."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
import numpy as np

from bei.core import Float32Array
from bei.engine.postprocess import apply_function
from bei.errors import InputTooLongError, TaskNotSupportedError
from bei.service.admission import Ticket
from bei.service.call import ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.decision_readings import (
    Reading,
    of_inference,
    of_labels,
    of_likelihoods,
    of_markers_of_options,
    of_reranker,
    of_tasks,
    of_tokens,
    work_of_options,
)
from bei.tasks.questions import AskedQuestion
from bei.tasks.support import PartialResult, off_loop_if_large
from bei.tasks.zero_shot import nli_labels
from bei.tokenizer.encoder import Input
from bei.utils.threads import off_loop


class DecideTask(ModelRequest, frozen=True, kw_only=True):
    """Texts, and the questions that each is asked. ``raw``: answers are the scores before temperature and softmax."""

    questions: tuple[AskedQuestion, ...]
    raw: bool = False


class Decisions(PartialResult, frozen=True, kw_only=True):
    """``probabilities[i][q]`` float32 [options] for text i and question q. ``lengths``: of each sequence that was
    read."""

    probabilities: list[list[Float32Array]]


async def decide(service: ModelService, task: DecideTask, *, ticket: Ticket) -> Decisions:
    """The probability of each option of each question for each text.

    Raises TaskNotSupportedError; InputTooLongError; InvalidRequestError for options that the model cannot tell apart.
    """
    reading = reading_of(service)
    texts = [str(text) for text in task.inputs]
    work = len(texts) * work_of_options(task.questions)

    def inputs() -> list[Seq[Input]]:
        return [reading.inputs(text, question) for text in texts for question in task.questions]

    asked = await off_loop_if_large(inputs, sum(map(len, texts)) * len(task.questions) + work)
    try:
        await off_loop(reading.check, service.encoder, task.questions)
        answer = await reading.ask(service, [one for some in asked for one in some], task.questions, ticket)
    except InputTooLongError as error:
        raise InputTooLongError(
            f"A text with a question and its options has more than the model's {service.manifest.max_seq_len} tokens, "
            "and nothing of it is cut: shorten one of them.",
            "input",
        ) from error
    rows = [row[reading.output] for row in answer.rows]
    ends = np.cumsum([len(some) for some in asked]).tolist()
    questions = [*task.questions] * len(task.inputs)
    temperature = np.float32(service.manifest.temperature("decide"))

    def shares_of() -> list[Float32Array]:
        found = [
            reading.scores(question, rows[start:end])
            for question, start, end in zip(questions, [0, *ends], ends, strict=False)
        ]
        return found if task.raw else [_softmax(scores / temperature) for scores in found]

    shares = await off_loop_if_large(shares_of, work)
    count = len(task.questions)
    by_text = [shares[start : start + count] for start in range(0, len(shares), count)]
    return Decisions(answer.lengths, [], probabilities=by_text)


def inputs_of(service: ModelService, texts: Seq[str], questions: Seq[AskedQuestion]) -> list[Input]:
    """What the model reads for ``texts``, to admit it. Raises as ``decide``."""
    reading = reading_of(service)
    return [one for text in texts for question in questions for one in reading.inputs(text, question)]


def reading_of(service: ModelService) -> Reading:
    """How a model is asked. Raises TaskNotSupportedError for one that cannot be."""
    manifest = service.manifest
    if (template := manifest.decide_template) is not msgspec.UNSET:
        if manifest.classification is None:
            return of_likelihoods(template)
        return of_tokens(service.name, template, manifest.classification.labels)
    if (markers := manifest.option_markers) is not msgspec.UNSET:
        return of_markers_of_options(markers)
    if (layout := manifest.labelling) is not msgspec.UNSET:
        return of_tasks(layout, layout.schema) if layout.schema else of_labels(layout)
    if "rerank" in manifest.tasks and manifest.classification is not None:  # models of lists have cosines
        return of_reranker()
    if "classify" not in manifest.tasks:
        raise TaskNotSupportedError(
            f"{service.name} cannot decide; it can do: {', '.join(manifest.tasks)}. Decisions need a model of natural "
            "language inference, GLiClass, GLiNER2, Laya, OpenDecider, a reranker that reads pairs, or a language "
            "model built with --task decide.",
            "model",
        )
    return of_inference(*nli_labels(service))


def _softmax(scores: Float32Array) -> Float32Array:
    """Of one row."""
    shares: Float32Array = apply_function(scores[None], "softmax")[0]
    return shares
