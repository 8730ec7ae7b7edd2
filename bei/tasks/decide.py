"""Probabilities of options for a text, by models that read each option with it.

    natural language inference   the text entails "INSTRUCTIONS OPTION", or the instructions with the option in {}
    rerankers, reward models     the text as document of the query "INSTRUCTIONS OPTION"

Every option is read by itself (arXiv:1909.00161), so the order of options changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from bei.core import Float32Array
from bei.engine.postprocess import apply_function
from bei.errors import InputTooLongError, TaskNotSupportedError
from bei.service.admission import Ticket
from bei.service.call import ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.classify import logits_of, nli_labels
from bei.tasks.questions import AskedQuestion
from bei.tasks.rerank import asked_pairs
from bei.tasks.support import PartialResult, computed
from bei.tokenizer.encoder import EncodingOptions

# Nothing of a text or an option is cut: an answer to half of them would look like one to all.
_WHOLE = EncodingOptions(truncate=False)


class DecideTask(ModelRequest, frozen=True, kw_only=True):
    """Texts, and the questions that each is asked. ``raw``: answers are the scores before temperature and softmax."""

    questions: tuple[AskedQuestion, ...]
    raw: bool = False


class Decisions(PartialResult, frozen=True, kw_only=True):
    """``probabilities[i][q]`` float32 [options] for text i and question q. ``lengths``: of each sequence that was
    read."""

    probabilities: list[list[Float32Array]]


class _Reading(NamedTuple):
    """How a model is asked: ``pairs`` of a text and a question, and ``scores`` [options] of their rows of logits,
    of which the softmax is taken."""

    pairs: Callable[[str, AskedQuestion], list[tuple[str, str]]]
    scores: Callable[[AskedQuestion, Float32Array], Float32Array]


async def decide(service: ModelService, task: DecideTask, *, ticket: Ticket) -> Decisions:
    """The probability of each option of each question for each text.

    Raises TaskNotSupportedError; InputTooLongError.
    """
    reading = reading_of(service)
    asked = [reading.pairs(str(text), question) for text in task.inputs for question in task.questions]
    pairs = [pair for some in asked for pair in some]
    request = ModelRequest(pairs, _WHOLE)
    if "rerank" in service.manifest.tasks:
        request = asked_pairs(service, request)
    try:
        answer, _ = await logits_of(service, request, ticket)
    except InputTooLongError as error:
        raise InputTooLongError(
            f"A text with a question and its options has more than the model's {service.manifest.max_seq_len} tokens, "
            "and nothing of it is cut: shorten one of them.",
            "input",
        ) from error
    logits = await computed(answer.rows, "logits", None)
    ends = np.cumsum([len(some) for some in asked])
    temperature = service.manifest.temperature("decide")
    found = [
        reading.scores(question, rows)
        for rows, question in zip(np.split(logits, ends[:-1]), [*task.questions] * len(task.inputs), strict=True)
    ]
    shares = found if task.raw else [_softmax(scores / np.float32(temperature)) for scores in found]
    count = len(task.questions)
    by_text = [shares[start : start + count] for start in range(0, len(shares), count)]
    return Decisions(answer.lengths, [], probabilities=by_text)


def pairs_of(service: ModelService, texts: Seq[str], questions: Seq[AskedQuestion]) -> list[tuple[str, str]]:
    """What the model reads for ``texts``, to admit it. Raises as ``decide``."""
    reading = reading_of(service)
    return [pair for text in texts for question in questions for pair in reading.pairs(text, question)]


def reading_of(service: ModelService) -> _Reading:
    """How a model is asked. Raises TaskNotSupportedError for one that cannot be."""
    tasks = service.manifest.tasks
    if "rerank" in tasks and service.manifest.classification is not None:  # models of lists have cosines
        return _of_reranker()
    if "classify" not in tasks:
        raise TaskNotSupportedError(
            f"{service.name} cannot decide; it can do: {', '.join(tasks)}. Decisions need a model of natural language "
            "inference, or a reranker that reads pairs.",
            "model",
        )
    return _of_inference(*nli_labels(service))


def _softmax(scores: Float32Array) -> Float32Array:
    """Of one row."""
    shares: Float32Array = apply_function(scores[None], "softmax")[0]
    return shares


def _filled(instructions: str, option: str) -> str:
    if "{}" in instructions:
        return instructions.replace("{}", option, 1)
    return f"{instructions} {option}".strip()


def _statements(question: AskedQuestion) -> list[str]:
    """A text for each option; of yes and no without criteria the question alone."""
    if question.kind == "noul" and not all(option.text for option in question.options):
        return [_filled(question.instructions, question.options[1].text)]
    shown = [option.text if question.kind == "noul" else option.shown for option in question.options]
    return [_filled(question.instructions, text) for text in shown]


def _of_inference(entails: int, contradicts: int) -> _Reading:
    def pairs(text: str, question: AskedQuestion) -> list[tuple[str, str]]:
        return [(text, statement) for statement in _statements(question)]

    def scores(question: AskedQuestion, logits: Float32Array) -> Float32Array:
        if len(logits) < len(question.options):  # entailment of the only statement against its contradiction
            return logits[0, [contradicts, entails]]
        return logits[:, entails]

    return _Reading(pairs, scores)


def _of_reranker() -> _Reading:
    def pairs(text: str, question: AskedQuestion) -> list[tuple[str, str]]:
        return [(statement, text) for statement in _statements(question)]

    def scores(question: AskedQuestion, logits: Float32Array) -> Float32Array:
        if len(logits) < len(question.options):  # the sigmoid, against 0
            return np.array([0.0, logits[0, 0]], np.float32)
        return logits[:, 0]

    return _Reading(pairs, scores)
