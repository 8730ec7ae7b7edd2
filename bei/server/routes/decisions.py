"""``/v1/decisions``: OpenAI's Decisions API, typed questions about an input.

Source: openai-python 3.57 (``resources/decisions.py``, ``types/decision*.py``). How OpenAI writes an input of several
items as one text is not published: here a message of a user alone is its text, several items are lines
``role: text`` with an empty line between two. ``prompt_cache_key``, ``prompt_cache_options`` and ``safety_identifier``
change no answer. A question's fields that are not known are refused, as those of ``bei.tasks.questions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

import msgspec
from msgspec import Meta

from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import Example
from bei.server.endpoint.field_schema import limits
from bei.server.endpoint.parse import parser, with_unique_keys
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Model, Tiered
from bei.server.routes.systemone import MOST_QUESTIONS, ParsedQuestions, decided
from bei.tasks.questions import (
    MOST_CHOICES,
    MOST_LEVELS,
    AskedOption,
    AskedQuestion,
    as_text,
    checked_options,
    concentration,
    expected_level,
)


class DecisionPart(msgspec.Struct, kw_only=True):
    """A part of an input: ``text``, ``data`` (JSON) or ``refusal``, as ``type`` says. Images are refused."""

    type: Literal["input_text", "output_text", "input_json", "refusal", "input_image"]
    text: str | None = None
    data: dict[str, Any] | list[Any] | None = None
    refusal: str | None = None


DecisionParts: TypeAlias = str | list[DecisionPart]


class DecisionItem(msgspec.Struct, kw_only=True):
    """A message, a call of a function or tool, or its output."""

    type: Literal["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"] = (
        "message"
    )
    role: Literal["user", "developer", "system", "assistant"] | None = None
    content: DecisionParts | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: DecisionParts | None = None
    call_id: str | None = None


class Predicate(msgspec.Struct, tag_field="type", tag="predicate", kw_only=True, forbid_unknown_fields=True):
    """How likely it is that a statement is true."""

    instructions: DecisionParts
    name: str | None = None


class ChoiceOption(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A value, and what it means."""

    value: str | bool
    description: str | None = None


class Choice(msgspec.Struct, tag_field="type", tag="choice", kw_only=True, forbid_unknown_fields=True):
    """One of several values."""

    instructions: DecisionParts
    choices: Annotated[list[ChoiceOption], limits(minItems=2, maxItems=MOST_CHOICES)]
    name: str | None = None


class Level(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A level of a score, and what it means."""

    label: str
    description: str | None = None


class Score(msgspec.Struct, tag_field="type", tag="score", kw_only=True, forbid_unknown_fields=True):
    """One of several levels, from lowest to highest."""

    instructions: DecisionParts
    levels: Annotated[list[Level], limits(minItems=2, maxItems=MOST_LEVELS)]
    name: str | None = None


AnyQuestion: TypeAlias = Predicate | Choice | Score


class DecisionsRequest(Tiered, kw_only=True):
    """An input, read for each question. Nothing of it is cut."""

    model: Model | None = None
    input: Annotated[str | list[DecisionItem], Meta(description="A text, or messages and calls of tools in order.")]
    questions: Annotated[list[AnyQuestion], limits(minItems=1, maxItems=MOST_QUESTIONS)]


class PredicateDecision(msgspec.Struct, tag_field="type", tag="predicate", kw_only=True):
    """The probability that it is true."""

    name: str | None
    probability: float


class ValueProbability(TypedDict):
    """Of one value."""

    value: str | bool
    probability: float


class ChoiceDecision(msgspec.Struct, tag_field="type", tag="choice", kw_only=True):
    """The likeliest value."""

    name: str | None
    choice: str | bool
    probabilities: list[ValueProbability]
    confidence: float


class LevelProbability(TypedDict):
    """Of one level, counted from 0."""

    value: int
    label: str
    probability: float


class ScoreDecision(msgspec.Struct, tag_field="type", tag="score", kw_only=True):
    """The expected level."""

    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class InputDetails(TypedDict):
    """Nothing is cached for later requests."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Nothing is generated."""

    reasoning_tokens: int


class DecisionUsage(TypedDict):
    """Tokens of all that was read: the input counts for each question, or for each option that is read with it."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class DecisionsResponse(TypedDict):
    """One answer a question, in their order."""

    model: str
    answers: list[PredicateDecision | ChoiceDecision | ScoreDecision]
    usage: DecisionUsage


_parse_request = with_unique_keys(parser(DecisionsRequest), "input", "questions")


def parse(content: bytes) -> ParsedQuestions:
    """A body and what it asks. Raises InvalidRequestError."""
    body = _parse_request(content)
    questions = [_question(f"questions {place}", question) for place, question in enumerate(body.questions)]
    text = _text_of(body.input)
    if not text.strip():
        raise InvalidRequestError("input is empty: send the text or messages that the questions are about.", "input")
    return ParsedQuestions(body, text, questions)


async def decisions(request: ParsedQuestions, context: RequestContext) -> Reply:
    """Answer typed questions about an input: predicates, choices, scores. No text is generated."""
    service, found = await decided(context, request)
    answers = [
        _answer(question, asked, row)
        for question, asked, row in zip(request.questions, request.body.questions, found.probabilities[0], strict=True)
    ]
    count = found.num_tokens
    usage = {
        "input_tokens": count,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": count,
    }
    return Reply({"model": service.name, "answers": answers, "usage": usage}, found.truncated)


def _parts(given: DecisionParts | None, param: str) -> str:
    """A text, or parts with a line each. Raises InvalidRequestError for images, and parts that lack what they say."""
    if given is None or isinstance(given, str):
        return given or ""
    lines = []
    for part in given:
        if part.type == "input_image":
            raise InvalidRequestError(f"{param} has an image: decisions are about texts here.", param)
        content = part.data if part.type == "input_json" else part.refusal if part.type == "refusal" else part.text
        if content is None:
            raise InvalidRequestError(f"{param} has a part of type {part.type} without its content: send it.", param)
        lines.append(as_text(content))
    return "\n".join(lines)


def _text_of(given: str | list[DecisionItem]) -> str:
    if isinstance(given, str):
        return given
    lines = [_line(item) for item in given]  # refuses items that lack what they say
    if len(given) == 1 and given[0].type == "message" and given[0].role == "user":
        return _parts(given[0].content, "input")
    return "\n\n".join(lines)


def _line(item: DecisionItem) -> str:
    if item.type == "message":
        if item.role is None or item.content is None:
            raise InvalidRequestError("input has a message without a role or content: send both.", "input")
        return f"{item.role}: {_parts(item.content, 'input')}"
    is_output, is_function = item.type.endswith("_output"), item.type == "function_call"
    field = "output" if is_output else "arguments" if is_function else "input"
    if (content := getattr(item, field)) is None or (item.name is None and not is_output):
        lacks = field if content is None else "name"
        raise InvalidRequestError(f"input has an item of type {item.type} without its {lacks}: send it.", "input")
    return f"{item.type}: {_parts(content, 'input')}" if is_output else f"{item.type} {item.name}: {content}"


def _question(name: str, given: AnyQuestion) -> AskedQuestion:
    instructions = _parts(given.instructions, "questions")
    if not instructions.strip():
        raise InvalidRequestError(f"{name} has no instructions: say what is asked.", "questions")
    if isinstance(given, Predicate):
        return AskedQuestion(name, "noul", instructions, (AskedOption("no", ""), AskedOption("yes", "")))
    if isinstance(given, Choice):
        values = [
            ("true" if one.value else "false") if isinstance(one.value, bool) else one.value for one in given.choices
        ]
        options = tuple(
            AskedOption(value, one.description or "") for value, one in zip(values, given.choices, strict=True)
        )
        if len({*values}) < len(values):
            raise InvalidRequestError(f"{name} has a value twice, as a model reads them: send each once.", "questions")
    else:
        options = tuple(AskedOption(level.label, level.description or "") for level in given.levels)
    if len(options) < 2:
        raise InvalidRequestError(f"{name} has {len(options)} options: send at least 2.", "questions")
    return checked_options(AskedQuestion(name, given.__struct_config__.tag, instructions, options))  # type: ignore[arg-type]


def _answer(question: AskedQuestion, asked: AnyQuestion, row: Float32Array) -> Mapping[str, object]:
    if isinstance(asked, Predicate):
        return {"type": "predicate", "name": asked.name, "probability": row[1]}
    sure = concentration(row, question.kind)
    if isinstance(asked, Choice):
        values = [one.value for one in asked.choices]
        pairs = [{"value": value, "probability": share} for value, share in zip(values, row, strict=True)]
        best = values[int(row.argmax())]
        return {"type": "choice", "name": asked.name, "choice": best, "probabilities": pairs, "confidence": sure}
    levels = [
        {"value": place, "label": level.label, "probability": share}
        for place, (level, share) in enumerate(zip(asked.levels, row, strict=True))
    ]
    score = expected_level(row)
    return {"type": "score", "name": asked.name, "score": score, "probabilities": levels, "confidence": sure}


_EXAMPLE = Example(
    {
        "input": "I was charged twice for the same subscription.",
        "questions": [
            {
                "type": "choice",
                "name": "category",
                "instructions": "This ticket is about",
                "choices": [{"value": "billing"}, {"value": "outages", "description": "the service is down"}],
            },
            {"type": "predicate", "name": "twice", "instructions": "The customer reports a double charge."},
        ],
    },
    {
        "model": "deberta-v3-base-zeroshot-v2.0",
        "answers": [
            {
                "type": "choice",
                "name": "category",
                "choice": "billing",
                "probabilities": [
                    {"value": "billing", "probability": 0.9712},
                    {"value": "outages", "probability": 0.0288},
                ],
                "confidence": 0.9424,
            },
            {"type": "predicate", "name": "twice", "probability": 0.9931},
        ],
        "usage": {
            "input_tokens": 64,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 64,
        },
    },
)

ROUTE: Route[Any] = Route(
    "/v1/decisions",
    "Decide (OpenAI)",
    DecisionsRequest,
    DecisionsResponse,
    parse,
    decisions,
    _EXAMPLE,
)
