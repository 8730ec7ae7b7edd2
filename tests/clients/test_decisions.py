"""Typed questions: openai-python, litellm and Ollama's client, by the reranker (their answers to a model of natural
language inference have the same form)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tests.clients.offline  # noqa: F401

# isort: split

import litellm
import ollama
import openai
import pytest

from tests.clients.conftest import TOO_LONG, post, run
from tests.e2e.kinds import TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server

row = pytest.mark.client_call

Call = Callable[..., Any]

STATE = TEXTS[0]
OF_OPENAI: list[dict[str, Any]] = [
    {
        "type": "choice",
        "name": "where",
        "instructions": "The cat sat on",
        "choices": [{"value": "the mat", "description": "a rug"}, {"value": "a chair"}, {"value": True}],
    },
    {"type": "score", "instructions": "It is", "levels": [{"label": "calm"}, {"label": "loud"}]},
    {"type": "predicate", "name": "cat", "instructions": "It is about a cat."},
]
QUESTIONS: dict[str, dict[str, Any]] = {
    "where": {"type": "choice", "instructions": "The cat sat on", "criteria": {"the mat": "a rug", "a chair": None}},
    "calm": {"type": "score", "instructions": "It is", "criteria": ["calm", "loud", "very loud"]},
    "cat": {"type": "noul", "instructions": "It is about a cat."},
}


def numbers_of(value: Any) -> Any:
    """``value`` with its numbers as pytest compares them; float32 is written with few digits."""
    if isinstance(value, dict):
        return {key: numbers_of(one) for key, one in value.items()}
    if isinstance(value, list):
        return [numbers_of(one) for one in value]
    return pytest.approx(value, abs=TOLERANCE) if isinstance(value, float) else value


def check_answers(found: Any, server: Server, path: str = "/v1/systemone") -> None:
    """Fails unless a client's object says what plain HTTP is answered."""
    expected = post(server, path, model="reranker", state=STATE, questions=QUESTIONS)
    assert found.model_dump(exclude_none=True) == numbers_of(expected)


@pytest.fixture(params=["sync", "async"])
def decide(server: Server, request: pytest.FixtureRequest) -> Call:
    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    if request.param == "sync":
        return openai.OpenAI(**options, timeout=DEADLINE_S).decisions.create

    async def create(**fields: Any) -> Any:
        async with openai.AsyncOpenAI(**options, timeout=DEADLINE_S) as client:
            return await client.decisions.create(**fields)

    return lambda **fields: run(create(**fields))


@row("openai", "OpenAI", "/v1", "decisions.create, sync and async: choice, score, predicate; a text, messages")
def test_openai_decides(server: Server, decide: Call) -> None:
    messages = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": STATE}]},
        {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"},
    ]
    for given in (STATE, messages):
        expected = post(server, "/v1/decisions", model="reranker", input=given, questions=OF_OPENAI)
        found = decide(model="reranker", input=given, questions=OF_OPENAI, safety_identifier="someone")
        assert found.to_dict() == numbers_of(expected)
        choice, score, predicate = found.answers
        assert [type(one).__name__.rpartition("Resource")[2] for one in found.answers] == [
            "Choice",
            "Score",
            "Predicate",
        ]
        assert choice.probabilities[2].value is True
        assert 0 < score.score < 1
        assert 0 < predicate.probability < 1


@row("openai", "OpenAI", "/v1", "decisions.create: errors: unknown model, a model that cannot, one option, too long")
def test_openai_s_errors(decide: Call) -> None:
    asked: dict[str, Any] = {"model": "reranker", "input": STATE, "questions": OF_OPENAI}
    with pytest.raises(openai.NotFoundError) as unknown:
        decide(**{**asked, "model": "gpt-6-luna"})
    assert unknown.value.code == "model_not_found"
    alone = [{**OF_OPENAI[0], "choices": [{"value": "a"}]}]
    for changed, param in (({"model": "embedder"}, "model"), ({"questions": alone}, "questions")):
        with pytest.raises(openai.BadRequestError) as caught:
            decide(**{**asked, **changed})
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError, match="48 tokens"):
        decide(**{**asked, "input": TOO_LONG})


BASES = pytest.mark.parametrize("base", ["", "/ollama"])


@row("ollama", "Ollama", "/", "Client.systemone, AsyncClient.systemone; errors: unknown model, no questions")
@row("ollama", "Ollama", "/ollama", "Client.systemone, AsyncClient.systemone; errors: unknown model, no questions")
@BASES
def test_ollama_decides(server: Server, base: str) -> None:
    url, path = server.url + base, f"{base}/v1/systemone"
    client = ollama.Client(url, timeout=DEADLINE_S)
    found = client.systemone("reranker", STATE, QUESTIONS, keep_alive="5m")
    check_answers(found, server, path)
    assert isinstance(found.answers["where"], ollama.SystemOneChoiceAnswer)
    check_answers(
        run(ollama.AsyncClient(url, timeout=DEADLINE_S).systemone("reranker", STATE, QUESTIONS)), server, path
    )
    with pytest.raises(ollama.ResponseError) as unknown:
        client.systemone("llama3", STATE, QUESTIONS)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="ask at least one") as none:
        client.systemone("reranker", STATE, {})
    assert none.value.status_code == 400


PROVIDERS = [
    pytest.param("ollama", "", marks=row("litellm", "Ollama", "/", "systemone, asystemone: ollama/")),
    pytest.param("ollama", "/ollama", marks=row("litellm", "Ollama", "/ollama", "systemone, asystemone: ollama/")),
    pytest.param("typesafe", "", marks=row("litellm", "TypeSafe", "/", "systemone, asystemone: typesafe/")),
    pytest.param("hosted_vllm", "", marks=row("litellm", "vLLM", "/", "systemone, asystemone: hosted_vllm/")),
]


@pytest.mark.parametrize(("provider", "base"), PROVIDERS)
def test_litellm_decides(server: Server, provider: str, base: str) -> None:
    asked: dict[str, Any] = {
        "model": f"{provider}/reranker",
        "api_base": server.url + base,
        "api_key": "none",
        "timeout": DEADLINE_S,
        "state": STATE,
        "questions": QUESTIONS,
    }
    path = f"{base}/v1/systemone"
    check_answers(litellm.systemone(**asked), server, path)
    check_answers(run(litellm.asystemone(**asked)), server, path)
    with pytest.raises(litellm.exceptions.BadRequestError, match="tokens"):
        litellm.systemone(**{**asked, "state": TOO_LONG})
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.systemone(**{**asked, "model": f"{provider}/llama3"})


@row("litellm", "OpenAI", "/v1", "decisions, adecisions: openai/")
def test_litellm_decides_as_openai(server: Server) -> None:
    asked: dict[str, Any] = {
        "model": "openai/reranker",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "timeout": DEADLINE_S,
        "input": STATE,
        "questions": OF_OPENAI,
    }
    expected = post(server, "/v1/decisions", model="reranker", input=STATE, questions=OF_OPENAI)
    for found in (litellm.decisions(**asked), run(litellm.adecisions(**asked))):
        assert found.model_dump(mode="json") == numbers_of(expected)
