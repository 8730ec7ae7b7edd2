"""``/v1/systemone``: typed questions about a state, with a probability for every option and no text (TypeSafe's form,
which Ollama, LiteLLM, Infinity and Laya serve too).

Sources: ollama-python 0.6 (``Client.systemone``), litellm 1.110 (``litellm.systemone``), docs.ollama.com, "System One".
Fields that no answer depends on are ignored (``keep_alive``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias, TypedDict

import msgspec
from msgspec import UNSET, Meta

from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import Example
from bei.server.endpoint.field_schema import limits
from bei.server.endpoint.parse import parser, too_many_inputs, with_unique_keys
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Model, Tiered
from bei.service.service import InferenceService
from bei.tasks.decide import DecideTask, Decisions, decide, inputs_of
from bei.tasks.decision_readings import work_of_options
from bei.tasks.questions import (
    AnyQuestion,
    AskedQuestion,
    Concentration,
    Content,
    ScoreQuestion,
    as_text,
    concentration,
    expected_level,
    question_of,
)
from bei.tasks.support import off_loop_if_large

MOST_QUESTIONS = 400  # OpenAI's limit
_MOST_READ_CHARS = 1 << 24  # of the state and its copies, one a question, and of instructions, one an option
_OPTION_BYTES = 40  # of JSON, about: "billing":0.12345678, with what is around it
_NoText: TypeAlias = Annotated[Refused, refused("texts alone are read", [], {}, "", 0, False)]


class SystemOneRequest(Tiered, kw_only=True):
    """A state, read for each question. Nothing of it is cut."""

    model: Model | None = None
    state: Annotated[Content, Meta(description="Text; anything else is read as its JSON.")]
    questions: Annotated[dict[str, AnyQuestion], limits(minProperties=1, maxProperties=MOST_QUESTIONS)]
    keep_alive: float | str | None = None
    images: _NoText = UNSET
    assets: _NoText = UNSET
    audio: _NoText = UNSET
    videos: _NoText = UNSET
    min_confidence: Annotated[Refused, refused("compare probabilities yourself")] = UNSET


_parse_request = with_unique_keys(parser(SystemOneRequest), "state", "questions")


class ParsedQuestions(NamedTuple):
    """A request, the text that it asks about, and its questions, which were made where its body was read: of a long one
    off the event loop."""

    body: Any
    text: str
    questions: Seq[AskedQuestion]


class NoulResult(msgspec.Struct, tag_field="type", tag="noul", kw_only=True):
    """The probability of yes."""

    noul: float


class ChoiceResult(msgspec.Struct, tag_field="type", tag="choice", kw_only=True):
    """The likeliest option, and how sure the distribution is."""

    choice: str
    probabilities: dict[str, float]
    confidence: float


class ScoreResult(msgspec.Struct, tag_field="type", tag="score", kw_only=True):
    """The expected level, counted from 0; `legend` and `probabilities` are by the number of the level."""

    score: float
    legend: dict[str, Content]
    probabilities: dict[str, float]
    confidence: float


class SystemOneUsage(TypedDict):
    """Tokens of all that was read: the state counts for each question, or for each option that is read with it."""

    input_tokens: int
    output_tokens: int


class SystemOneResponse(TypedDict):
    """One answer a question, by its name."""

    model: str
    answers: dict[str, NoulResult | ChoiceResult | ScoreResult]
    usage: SystemOneUsage


async def decided(context: RequestContext, asked: ParsedQuestions) -> tuple[InferenceService, Decisions]:
    """The model's probabilities for the questions about one state. Raises InvalidRequestError, also for more options
    than one request may have inputs."""
    service = context.named(asked.body.model)
    state, questions = asked.text, asked.questions
    if not questions:
        raise InvalidRequestError("questions is empty: ask at least one.", "questions")
    if len(questions) > MOST_QUESTIONS:
        raise InvalidRequestError(
            f"The request has {len(questions)} questions, the limit is {MOST_QUESTIONS}: split it.", "questions"
        )
    copied = sum(len(question.instructions) * len(question.options) for question in questions)
    num_chars = len(state) * len(questions) + copied
    if num_chars > _MOST_READ_CHARS:
        raise InvalidRequestError(
            f"{len(questions)} questions about a state of {len(state)} characters, and their instructions with each "
            f"option, read more than {_MOST_READ_CHARS} in all: send fewer at once.",
            "questions",
        )
    work = num_chars + work_of_options(questions)
    inputs = await off_loop_if_large(partial(inputs_of, service, [state], questions), work)
    if len(inputs) > context.max_inputs:
        raise too_many_inputs(len(inputs), context.max_inputs, "questions")
    names = sum(len(option.shown) for question in questions for option in question.options)
    context.check_answer(names + sum(len(question.options) for question in questions) * _OPTION_BYTES)
    task = DecideTask([state], questions=tuple(questions))
    return service, await decide(service, task, ticket=context.admit(service, inputs))


def parse(content: bytes) -> ParsedQuestions:
    """A body and what it asks. Raises InvalidRequestError."""
    body = _parse_request(content)
    questions = [question_of(name, question) for name, question in body.questions.items()]
    return ParsedQuestions(body, as_text(body.state), questions)


def _handler(formula: Concentration) -> Callable[[ParsedQuestions, RequestContext], Any]:
    async def systemone(request: ParsedQuestions, context: RequestContext) -> Reply:
        """Answer typed questions about a state: choices, scores on levels, yes and no. No text is generated."""
        service, found = await decided(context, request)
        asked: Mapping[str, AnyQuestion] = request.body.questions
        answers = {
            question.name: _answer(question, asked[question.name], row, formula)
            for question, row in zip(request.questions, found.probabilities[0], strict=True)
        }
        usage = {"input_tokens": found.num_tokens, "output_tokens": 0}
        return Reply({"model": service.name, "answers": answers, "usage": usage}, found.truncated)

    return systemone


def _answer(
    question: AskedQuestion, asked: AnyQuestion, row: Float32Array, formula: Concentration
) -> Mapping[str, object]:
    """As clients read it. Probabilities stay numpy's, which are written as short as float32 allows."""
    if question.kind == "noul":
        return {"type": "noul", "noul": row[1]}
    sure = concentration(row, question.kind, formula)
    if isinstance(asked, ScoreQuestion):
        return {
            "type": "score",
            "score": expected_level(row),
            "legend": {str(level): text for level, text in enumerate(asked.criteria)},
            "probabilities": {str(level): share for level, share in enumerate(row)},
            "confidence": sure,
        }
    names = [option.name for option in question.options]
    shares = dict(zip(names, row, strict=True))
    return {"type": "choice", "choice": names[int(row.argmax())], "probabilities": shares, "confidence": sure}


_EXAMPLE = Example(
    {
        "state": "My card was charged twice, and I want my money back.",
        "questions": {
            "team": {
                "type": "choice",
                "instructions": "This is a matter for",
                "criteria": {"billing": "payments and refunds", "support": None},
            },
            "refund": {"type": "noul", "instructions": "The customer asks for money."},
        },
    },
    {
        "model": "deberta-v3-base-zeroshot-v2.0",
        "answers": {
            "team": {
                "type": "choice",
                "choice": "billing",
                "probabilities": {"billing": 0.9312, "support": 0.0688},
                "confidence": 0.8624,
            },
            "refund": {"type": "noul", "noul": 0.9871},
        },
        "usage": {"input_tokens": 71, "output_tokens": 0},
    },
)

ROUTE: Route[Any] = Route(
    "/v1/systemone",
    "Decide (TypeSafe, LiteLLM)",
    SystemOneRequest,
    SystemOneResponse,
    parse,
    _handler("margin"),
    _EXAMPLE,
)

OLLAMA_ROUTE: Route[Any] = replace(ROUTE, summary="Decide (Ollama)", handle=_handler("entropy"))
