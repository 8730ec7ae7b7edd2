"""Questions that decisions are asked: from a body to the texts of a model's pairs, with nothing behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from bei.artifact.manifest import DecideTemplate
from bei.offline.methods import _question
from bei.server.endpoint.parse import read_now
from bei.server.routes import decisions, systemone
from bei.tasks.decision_readings import of_inference, of_likelihoods, of_reranker, of_tokens
from bei.tasks.questions import AskedQuestion, question_of
from tests.bei.server.test_fuzz import SEEDS
from tests.fuzz.mutation import changed, changed_body
from tests.fuzz.trial import Trial

_CHOICE = {"type": "choice", "instructions": "{} it", "criteria": {"a": None, "b": "c", "d": {"e": [1]}}}
_SCORE = {"type": "score", "instructions": ["a"], "criteria": ["a", {"b": 1}]}
_NOUL = {"type": "noul", "instructions": "a", "criteria": {"true": "b", "false": None}}
_NAMED = {"a": _CHOICE, "b": _SCORE, "c": _NOUL}
_LISTED = [
    {"type": "choice", "name": "a", "instructions": "b", "choices": [{"value": True}, {"value": "b"}]},
    {"type": "score", "instructions": "b {}", "levels": [{"label": "a"}, {"label": "b", "description": "c"}]},
    {"type": "predicate", "instructions": [{"type": "input_json", "data": {"a": [1]}}]},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
    {"type": "function_call", "name": "a", "arguments": "{}", "call_id": "b"},
    {"type": "function_call_output", "output": "a", "call_id": "b"},
]


_BODY = "{text} {question} {options}"
_OF_TOKENS = of_tokens("model", DecideTemplate(body=_BODY), [str(place) for place in range(300)])
_OF_TEXTS = of_likelihoods(DecideTemplate(body=_BODY, option=" {option}"))


def _read(questions: Sequence[AskedQuestion], text: str) -> None:
    """Each option has a text of its own, but where the question alone says what is asked."""
    for question in questions:
        for reading in (of_inference(2, 0), of_reranker()):
            pairs = reading.inputs(text, question)
            assert len({*pairs}) == len(pairs) == len(question.options) or (question.kind, len(pairs)) == ("noul", 1)
        assert len(_OF_TOKENS.inputs(text, question)) == 1
        assert len({pair[0] for pair in _OF_TEXTS.inputs(text, question)}) == 1  # one beginning of all options


def systemone_questions(_: Path) -> Trial:
    """Of TypeSafe's form."""
    seeds = [*SEEDS["/v1/systemone"], {"state": {"a": [1, "b"]}, "questions": _NAMED}]

    def trial(random: Random) -> None:
        body = changed_body(random, seeds, 0.3)
        request: Any = read_now(systemone.ROUTE.parse, body, False).request
        _read(request.questions, request.text)

    return trial


def decisions_questions(_: Path) -> Trial:
    """Of OpenAI's form."""
    seeds = [*SEEDS["/v1/decisions"], {"input": _ITEMS, "questions": _LISTED}]

    def trial(random: Random) -> None:
        body = changed_body(random, seeds, 0.3)
        request: Any = read_now(decisions.ROUTE.parse, body, False).request
        _read(request.questions, request.text)

    return trial


def python_questions(_: Path) -> Trial:
    """Of ``Model.decide``."""

    def trial(random: Random) -> None:
        name = random.choice([*_NAMED])
        given = changed(random, _NAMED[name])
        _read([question_of(name, _question(name, msgspec.to_builtins(given)))], "a")

    return trial
