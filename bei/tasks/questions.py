"""Typed questions about a text, as the System One API has them: a choice, a score on levels, or yes and no ("noul").

A question's fields that are not known are refused: laya's ``labels`` and ``option_order`` would change what is read,
and without misspelled ``instructions`` nothing would say what is asked.

Sources of the form: ollama-python 0.6 (``SystemOneQuestion``) and litellm 1.110 (``litellm.types.decisions``), which
send it; of ``concentration``: laya 0.4 (``jev_confidence``), which gives TypeSafe's formulas, and
``confidence_from_probs``, which Ollama's published answers agree with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from bei.core import Float32Array
from bei.errors import InvalidRequestError

# Its ``iterencode`` is Python: between its pieces other threads run, which ``json.dumps`` keeps waiting to the end.
_encoder = json.JSONEncoder(ensure_ascii=False)

# The API's own limits.
MOST_CHOICES = 255
MOST_LEVELS = 10

Content: TypeAlias = str | dict[str, Any] | list[Any]
Kind: TypeAlias = Literal["choice", "score", "noul"]


class ChoiceQuestion(msgspec.Struct, tag_field="type", tag="choice", kw_only=True, forbid_unknown_fields=True):
    """Which of the names in ``criteria``, each with a description, or null."""

    criteria: dict[str, Content | None]
    instructions: Content | None = None


class ScoreQuestion(msgspec.Struct, tag_field="type", tag="score", kw_only=True, forbid_unknown_fields=True):
    """Which of the levels in ``criteria``, from lowest to highest."""

    criteria: list[Content]
    instructions: Content | None = None


class NoulCriteria(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When the answer is yes, and when it is no."""

    true: Content | None = None
    false: Content | None = None


class NoulQuestion(msgspec.Struct, tag_field="type", tag="noul", kw_only=True, forbid_unknown_fields=True):
    """Whether it is so: instructions, criteria, or both."""

    instructions: Content | None = None
    criteria: NoulCriteria | None = None


AnyQuestion: TypeAlias = ChoiceQuestion | ScoreQuestion | NoulQuestion


class AskedOption(NamedTuple):
    """``name`` is what an answer calls it, ``text`` says what it means; empty: the name does."""

    name: str
    text: str

    @property
    def shown(self) -> str:
        """As models read it."""
        return f"{self.name}: {self.text}" if self.text and self.name else self.text or self.name


class AskedQuestion(NamedTuple):
    """What models are asked. ``options`` of yes and no: no first, without texts where the question alone says it."""

    name: str
    kind: Kind
    instructions: str
    options: tuple[AskedOption, ...]


def as_text(content: Content | None) -> str:
    """A text as it is, anything else as JSON on one line. Raises InvalidRequestError for what is nested too deeply, and
    for images, whose base64 would be read as a text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    try:
        text = "".join(_encoder.iterencode(content))
    except RecursionError as error:  # decoders may go deeper, from Python 3.12 on
        raise InvalidRequestError("JSON of the request is nested too deeply: send it as one text.") from error
    if '"data:image/' in text:
        raise InvalidRequestError("JSON of the request has an image: decisions are about texts here.")
    return text


def question_of(name: str, given: AnyQuestion) -> AskedQuestion:
    """A question as models are asked it. Raises InvalidRequestError for a set of options that does not fit."""
    instructions = as_text(given.instructions)
    if isinstance(given, NoulQuestion):
        texts = (given.criteria.false, given.criteria.true) if given.criteria is not None else (None, None)
        options = tuple(AskedOption(word, as_text(text)) for word, text in zip(("no", "yes"), texts, strict=True))
        if not instructions and not options[1].text:
            raise _wrong(name, "has neither instructions nor criteria for true: say what is asked")
        if options[0].text and not options[1].text:
            raise _wrong(name, "has criteria for false alone: send those for true too, or neither")
        return AskedQuestion(name, "noul", instructions, options)
    if isinstance(given, ChoiceQuestion):
        options = tuple(AskedOption(one, as_text(text)) for one, text in given.criteria.items())
        return checked_options(AskedQuestion(name, "choice", instructions, options))
    options = tuple(AskedOption("", as_text(level)) for level in given.criteria)
    return checked_options(AskedQuestion(name, "score", instructions, options))


def checked_options(question: AskedQuestion) -> AskedQuestion:
    """``question``. Raises InvalidRequestError for options that are none, too many, empty, or read alike."""
    most, what = (MOST_LEVELS, "levels") if question.kind == "score" else (MOST_CHOICES, "choices")
    count = len(question.options)
    if not 1 <= count <= most:
        raise _wrong(question.name, f"has {count} {what}: send 1 to {most}")
    shown = [option.shown.strip() for option in question.options]
    for place, option in enumerate(question.options):
        if not (option.name or option.text).strip():
            raise _wrong(question.name, f"has an empty one among its {what}, number {place}: name it")
    if len({*shown}) < count:
        twice = next(text for text in shown if shown.count(text) > 1)
        raise _wrong(question.name, f"has {twice[:40]!r} twice among its {what}: send each once")
    return question


def _wrong(name: str, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"The question {name[:40]!r} {fault}.", "questions")


Concentration: TypeAlias = Literal["margin", "entropy"]


def concentration(probabilities: Float32Array, kind: Kind, formula: Concentration = "margin") -> float:
    """How sure the distribution [n] is, 0 to 1; 1 of a single option.

    margin (TypeSafe's): of choices (max p - 1/n) / (1 - 1/n); of levels 1 less the mean distance to the likeliest
    level, as a share of that of equal probabilities. entropy (Laya's, Ollama's): 1 - H(p) / ln n.
    """
    count = len(probabilities)
    if count < 2:
        return 1.0
    p = probabilities.astype(np.float64)
    if formula == "entropy":
        return float(1 + (p * np.log(np.maximum(p, 1e-12))).sum() / math.log(count))
    if kind != "score":
        return float((p.max() - 1 / count) / (1 - 1 / count))
    levels = np.arange(count)
    even = np.abs(levels - (count - 1) / 2).mean()
    return float(max(0.0, 1 - (p * np.abs(levels - p.argmax())).sum() / even))


def expected_level(probabilities: Float32Array) -> float:
    """Of levels that are counted from 0."""
    return float(probabilities.astype(np.float64) @ np.arange(len(probabilities)))


class ChoiceAnswer(NamedTuple):
    """The likeliest option, and the probability of each by name."""

    choice: str
    probabilities: Mapping[str, float]
    confidence: float


class ScoreAnswer(NamedTuple):
    """The expected level, counted from 0, and the probability of each level in order."""

    score: float
    probabilities: Seq[float]
    confidence: float


class NoulAnswer(NamedTuple):
    """The probability of yes."""

    noul: float


Answer: TypeAlias = ChoiceAnswer | ScoreAnswer | NoulAnswer


def answer_of(question: AskedQuestion, probabilities: Float32Array) -> Answer:
    """``probabilities`` [options] as an answer to ``question``."""
    if question.kind == "noul":
        return NoulAnswer(float(probabilities[1]))
    confidence = concentration(probabilities, question.kind)
    if question.kind == "score":
        return ScoreAnswer(expected_level(probabilities), probabilities.tolist(), confidence)
    names = [option.name for option in question.options]
    chosen = names[int(probabilities.argmax())]
    return ChoiceAnswer(chosen, dict(zip(names, probabilities.tolist(), strict=True)), confidence)
