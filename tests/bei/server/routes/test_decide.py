"""``/v1/systemone`` and ``/v1/decisions``: exchanges to the letter, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bei.artifact.manifest import Classification, OutputInfo
from bei.core import Limits
from bei.errors import InvalidRequestError
from bei.tasks import decide, decision_readings
from bei.tasks.decide import inputs_of
from bei.tasks.decision_readings import of_inference
from bei.tasks.questions import as_text, concentration
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import KindEngine, answer, expected_output, post, softmax
from tests.support.artifacts import save_artifact

STATE = "the cats"
NLI = ["contradiction", "neutral", "entailment"]
MOST_TOKENS = 180
QUESTIONS: dict[str, Any] = {
    "which": {"type": "choice", "instructions": "hello", "criteria": {"cat": "the cat", "world": None}},
    "how": {"type": "score", "instructions": "hello", "criteria": ["cat", "world", ["a"]]},
    "is": {"type": "noul", "instructions": "hello world"},
    "both": {"type": "noul", "instructions": "hello", "criteria": {"true": "cat", "false": "world"}},
}
STATEMENTS = {
    "which": ["hello cat: the cat", "hello world"],
    "how": ["hello cat", "hello world", 'hello ["a"]'],
    "is": ["hello world"],
    "both": ["hello world", "hello cat"],
}


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    artifact = save_artifact(
        tmp_path_factory.mktemp("nli") / "nli",
        name="nli",
        tasks=["classify"],
        outputs=[OutputInfo(name="logits", dimension=3)],
        classification=Classification(labels=NLI, function="softmax"),
        embedding=None,
        max_seq_len=MOST_TOKENS,
        max_num_tokens=256,
    )
    engine = KindEngine({"logits": 3}, Limits(max_num_tokens=256, max_batch_size=8, max_seq_len=MOST_TOKENS))
    app = App((artifact, engine), max_client_batch_size=8)
    yield app
    app.close()


def shares(name: str, *, by_reranker: bool) -> list[float]:
    """The probabilities of the options, by the rules that the module's docstring has."""
    if by_reranker:
        logits = [float(expected_output("logits", (one, STATE), 1)[0]) for one in STATEMENTS[name]]
        row = [0.0, *logits] if name == "is" else logits
    else:
        rows = [expected_output("logits", (STATE, one), 3) for one in STATEMENTS[name]]
        row = [float(rows[0][0]), float(rows[0][2])] if name == "is" else [float(one[2]) for one in rows]
    found: list[float] = softmax(np.array(row, np.float32)).tolist()
    return found


@pytest.mark.parametrize("by_reranker", [False, True])
def test_a_systemone_exchange(by_reranker: bool, nli: App, kinds: App) -> None:
    app, model = (kinds, "reranker") if by_reranker else (nli, "nli")
    found = answer(app, "/v1/systemone", model=model, state=STATE, questions=QUESTIONS, keep_alive="5m")
    which, how, yes, both = (shares(name, by_reranker=by_reranker) for name in QUESTIONS)
    best = int(np.argmax(how))
    spread = sum(share * abs(place - best) for place, share in enumerate(how)) / (2 / 3)
    expected: dict[str, dict[str, Any]] = {
        "which": {
            "type": "choice",
            "choice": "cat" if which[0] >= which[1] else "world",
            "probabilities": {"cat": which[0], "world": which[1]},
            "confidence": (max(which) - 0.5) / 0.5,
        },
        "how": {
            "type": "score",
            "score": how[1] + 2 * how[2],
            "legend": {"0": "cat", "1": "world", "2": ["a"]},
            "probabilities": {"0": how[0], "1": how[1], "2": how[2]},
            "confidence": max(0.0, 1 - spread),
        },
        "is": {"type": "noul", "noul": yes[1]},
        "both": {"type": "noul", "noul": both[1]},
    }
    assert [*found] == ["model", "answers", "usage"]
    assert (found["model"], [*found["answers"]]) == (model, [*expected])
    for name, wanted in expected.items():
        assert [*found["answers"][name]] == [*wanted]
        assert flat(found["answers"][name]) == pytest.approx(flat(wanted), abs=1e-6)
    assert found["usage"] == {"input_tokens": found["usage"]["input_tokens"], "output_tokens": 0}


def flat(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, inner in entry.items()
        for key, value in (inner.items() if isinstance(inner, dict) else [("", inner)])
        if not isinstance(value, (str, dict, list))
    }


def test_a_decisions_exchange(nli: App) -> None:
    questions = [
        {
            "type": "choice",
            "name": "which",
            "instructions": [{"type": "input_text", "text": "hello"}],
            "choices": [{"value": "cat", "description": "the cat"}, {"value": True}],
        },
        {"type": "score", "instructions": "hello", "levels": [{"label": "cat"}, {"label": "world"}]},
        {"type": "predicate", "name": "is", "instructions": "hello world"},
    ]
    found = answer(nli, "/v1/decisions", model="nli", input=STATE, questions=questions, safety_identifier="user")
    rows = [expected_output("logits", (STATE, one), 3)[2] for one in ("hello cat: the cat", "hello true")]
    which = softmax(np.array(rows, np.float32)).tolist()
    rows = [expected_output("logits", (STATE, one), 3)[2] for one in ("hello cat", "hello world")]
    how = softmax(np.array(rows, np.float32)).tolist()
    assert [*found] == ["model", "answers", "usage"]
    choice, score, predicate = found["answers"]
    assert [*choice] == ["type", "name", "choice", "probabilities", "confidence"]
    assert (choice["type"], choice["name"]) == ("choice", "which")
    assert choice["choice"] == ("cat" if which[0] >= which[1] else True)
    assert [one["value"] for one in choice["probabilities"]] == ["cat", True]
    assert [one["probability"] for one in choice["probabilities"]] == pytest.approx(which)
    assert (score["name"], score["score"]) == (None, pytest.approx(how[1]))
    assert [[one["value"], one["label"]] for one in score["probabilities"]] == [[0, "cat"], [1, "world"]]
    probability = pytest.approx(shares("is", by_reranker=False)[1])
    assert predicate == {"type": "predicate", "name": "is", "probability": probability}
    count = found["usage"]["input_tokens"]
    assert found["usage"] == {
        "input_tokens": count,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": count,
    }


def test_items_of_an_input_are_lines(nli: App) -> None:
    asked = [{"type": "predicate", "instructions": "hello"}]
    items = [
        {"role": "system", "content": "the"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "cat"}, {"type": "refusal", "refusal": "!"}]},
        {"type": "function_call", "name": "hello", "arguments": "{}", "call_id": "a"},
        {"type": "function_call_output", "call_id": "a", "output": "world"},
    ]
    text = "system: the\n\nassistant: cat\n!\n\nfunction_call hello: {}\n\nfunction_call_output: world"
    body = {"model": "nli", "questions": asked}
    assert answer(nli, "/v1/decisions", input=items, **body) == answer(nli, "/v1/decisions", input=text, **body)
    user = [{"role": "user", "type": "message", "content": [{"type": "input_json", "data": {"the": "cat"}}]}]
    plain = answer(nli, "/v1/decisions", input='{"the": "cat"}', **body)
    assert answer(nli, "/v1/decisions", input=user, **body) == plain


def test_another_order_of_options_has_the_same_probabilities(nli: App) -> None:
    criteria = {"cat": "the", "world": None, "hello": "cats"}
    asked = [
        {"q": {"type": "choice", "instructions": "the", "criteria": dict(items)}}
        for items in (criteria.items(), reversed(criteria.items()))
    ]
    first, second = (
        answer(nli, "/v1/systemone", model="nli", state=STATE, questions=one)["answers"]["q"]["probabilities"]
        for one in asked
    )
    assert first == second


def test_ollama_s_confidence_is_that_of_entropy(kinds: App) -> None:
    """0.8906 of (0.0125, 0.9781, 0.0093): an answer that Ollama's documentation shows."""
    shown = np.array([0.0125, 0.9781, 0.0093], np.float32)
    assert concentration(shown, "choice", "entropy") == pytest.approx(0.8906, abs=5e-4)
    asked = {"model": "reranker", "state": STATE, "questions": QUESTIONS}
    ours, theirs = (answer(kinds, path, **asked)["answers"] for path in ("/v1/systemone", "/ollama/v1/systemone"))
    p = [*theirs["which"]["probabilities"].values()]
    entropy = -sum(share * math.log(share) for share in p)
    assert theirs["which"]["confidence"] == pytest.approx(1 - entropy / math.log(2), abs=1e-6)
    assert {**theirs["which"], "confidence": ours["which"]["confidence"]} == ours["which"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"questions": {}}, "questions is empty"),
    ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "has 0 choices"),
    ({"questions": {"q": {"type": "choice", "criteria": {str(n): None for n in range(256)}}}}, "has 256 choices"),
    ({"questions": {"q": {"type": "choice", "criteria": dict.fromkeys(map(str, range(10_000)))}}}, "has 10000 choices"),
    ({"questions": {"q": {"type": "score", "criteria": [*map(str, range(10_000))]}}}, "has 10000 levels"),
    ({"questions": {str(n): {"type": "noul", "instructions": "a"} for n in range(401)}}, "401 questions"),
    ({"questions": {"q": {"type": "choice", "criteria": {" \u2003\t": None, "a": None}}}}, "empty one among"),
    ({"questions": {"q": {"type": "score", "criteria": ["a", "\n"]}}}, "empty one among its levels"),
    ({"questions": {"q": {"type": "choice", "criteria": {"": None, "a": None}}}}, "empty one among its choices"),
    ({"questions": {"q": {"type": "choice", "criteria": {"a ": None, "a": None}}}}, "'a' twice"),
    ({"questions": {"q": {"type": "score", "criteria": ["a", "a"]}}}, "'a' twice"),
    ({"questions": {"q": {"type": "score", "criteria": [*"abcdefghijk"]}}}, "has 11 levels"),
    ({"questions": {"q": {"type": "noul"}}}, "neither instructions nor criteria"),
    ({"questions": {"q": {"type": "noul", "instructions": "a", "criteria": {"false": "b"}}}}, "criteria for false"),
    ({"questions": {"q": {"type": "box", "instructions": "a"}}}, "box"),
    ({"questions": {"q": {"type": "choice", "criteria": dict.fromkeys("abcdefghi")}}}, "9 inputs, the limit is 8"),
    ({"questions": {"q": {"type": "noul", "instructions": "a " * 200}}}, "tokens"),
    ({"state": "cat " * 200}, "tokens"),
    ({"questions": {"q": {"type": "noul", "instructions": "a", "labels": {"false": "n", "true": "y"}}}}, "`labels`"),
    ({"questions": {"q": {"type": "score", "criteria": ["a", "b"], "option_order": [1, 0]}}}, "`option_order`"),
    ({"questions": {"q": {"type": "choice", "instruction": "a", "criteria": {"a": None}}}}, "`instruction`"),
    ({"questions": {"q": {"type": "noul", "instructions": "a", "criteria": {"yes": "b"}}}}, "`yes`"),
    ({"min_confidence": 0.5}, "min_confidence 0.5 is not supported"),
    ({"images": ["aGk="]}, "images (a list) is not supported"),
    ({"state": [{"role": "user", "content": [{"image_url": {"url": "data:image/png;base64,aGk="}}]}]}, "has an image"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_does_not_fit_is_refused(fields: dict[str, Any], said: str, nli: App) -> None:
    asked = {"state": STATE, "questions": {"q": {"type": "noul", "instructions": "a"}}, **fields}
    check_error(post(nli, "/v1/systemone", model="nli", **asked), 400, said)


TWO = [{"value": "a"}, {"value": "b"}]
LEVELS = [{"label": "a"}, {"label": "b"}]
OF_OPENAI: list[tuple[dict[str, Any], str]] = [
    ({"questions": []}, "questions is empty"),
    ({"questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "b"}]}]}, "has 1 options"),
    (
        {"questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "true"}, {"value": True}]}]},
        "a value twice",
    ),
    ({"questions": [{"type": "predicate", "instructions": " "}]}, "has no instructions"),
    ({"input": " "}, "input is empty"),
    ({"input": []}, "is empty"),
    ({"input": [{"role": "user", "content": ""}]}, "input is empty"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "has an image"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "without its content"),
    ({"input": [{"content": "a"}, {"content": "b"}]}, "without a role"),
    ({"input": [{"role": "user"}]}, "without a role or content"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "type function_call without its arguments"),
    ({"input": [{"type": "custom_tool_call", "input": "a"}]}, "type custom_tool_call without its name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "type function_call_output without its output"),
    ({"questions": [{"type": "predicate", "instructions": "a", "threshold": 0.5}]}, "`threshold`"),
    (
        {"questions": [{"type": "choice", "instructions": "a", "choices": TWO, "option_order": [1, 0]}]},
        "`option_order`",
    ),
    ({"questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "a", "label": "b"}]}]}, "`label`"),
    ({"questions": [{"type": "score", "instructions": "a", "levels": [{"label": "b", "value": 3}]}]}, "`value`"),
    ({"questions": [{"type": "score", "instructions": "a", "levels": LEVELS, "criteria": []}]}, "`criteria`"),
]


def test_instructions_are_not_copied_for_each_option_beyond_a_bound(nli: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei.server.routes.systemone._MOST_READ_CHARS", 1000)
    asked = {"type": "choice", "instructions": "a" * 300, "criteria": {"x": "x", "y": "y", "z": "z", "w": "w"}}
    response = post(nli, "/v1/systemone", model="nli", state=STATE, questions={"q": asked})
    check_error(response, 400, "and their instructions with each option, read more than 1000", param="questions")


@pytest.mark.parametrize(("fields", "said"), OF_OPENAI, ids=[said for _, said in OF_OPENAI])
def test_what_openai_s_form_may_not_say_is_refused(fields: dict[str, Any], said: str, nli: App) -> None:
    asked = {"input": STATE, "questions": [{"type": "predicate", "instructions": "a"}], **fields}
    check_error(post(nli, "/v1/decisions", model="nli", **asked), 400, said)


def is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("is_large", [False, True])
def test_many_options_are_written_and_their_scores_read_off_the_event_loop(
    is_large: bool, nli: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 options, a megabyte, took 0.1 s each time that they were written."""
    own, found = of_inference(0, 2), dict[str, bool]()

    def noted(name: str) -> Any:
        def called(*args: Any) -> Any:
            found[name] = is_on_a_loop()
            return getattr(own, name)(*args)

        return called

    reading = own._replace(inputs=noted("inputs"), scores=noted("scores"))
    monkeypatch.setattr(decide, "reading_of", lambda service: reading)
    monkeypatch.setattr(decision_readings, "_PER_OPTION", 100_000 if is_large else 0)
    assert answer(nli, "/v1/systemone", model="nli", state=STATE, questions={"is": QUESTIONS["is"]})
    assert found == dict.fromkeys(("inputs", "scores"), not is_large)


@pytest.mark.parametrize("option", ["[SEP]", "a [CLS] b", "[PAD]", "\u0000", "\u202e", "\U0001f600" * 20])
def test_an_option_of_any_characters_is_an_option(option: str, nli: App) -> None:
    questions = {"q": {"type": "choice", "instructions": "a", "criteria": {option: None, "cat": None}}}
    shares = answer(nli, "/v1/systemone", model="nli", state=STATE, questions=questions)["answers"]["q"][
        "probabilities"
    ]
    assert [*shares] == [option, "cat"]
    assert sum(shares.values()) == pytest.approx(1, abs=1e-6)


TWICE = {
    "an option": '{"state": "a", "questions": {"q": {"type": "choice", "criteria": {"b": "c", "b": null}}}}',
    "a question": '{"state": "a", "questions": {"q": %s, "q": %s}}' % (('{"type": "noul", "instructions": "b"}',) * 2),
    "a state": '{"state": [{"b": 1, "b": 1}], "questions": {"q": {"type": "noul", "instructions": "b"}}}',
}


@pytest.mark.parametrize("body", TWICE.values(), ids=TWICE)
def test_a_key_that_stands_twice_in_an_object_is_refused(body: str, nli: App) -> None:
    param = "state" if '"state": [' in body else "questions"
    check_error(nli.request("POST", "/v1/systemone", body.encode()), 400, "twice: send each once", param=param)


def test_openai_s_data_may_not_have_a_key_twice(nli: App) -> None:
    part = '{"type": "input_json", "data": {"b": 1, "b": 2}}'
    body = '{"input": [{"role": "user", "content": [%s]}], "questions": [%s]}'
    content = body % (part, '{"type": "predicate", "instructions": "a"}')
    check_error(nli.request("POST", "/v1/decisions", content.encode()), 400, "'b' twice", param="input")


@pytest.mark.parametrize(("path", "param"), [("/v1/systemone", "state"), ("/v1/decisions", "input")])
def test_objects_that_are_larger_than_a_model_reads_are_refused_before_they_are_made(
    path: str, param: str, nli: App
) -> None:
    """7 MB of them were made, and written as text, while the event loop waited for the interpreter's lock."""
    parts = [{"role": "user", "content": [{"type": "input_json", "data": {"a": "b" * 1_000_000}}]}]
    content = json.dumps({"model": "nli", param: parts, "questions": ["not looked at"]})
    check_error(nli.request("POST", path, content.encode()), 400, "the limit is 1000000: send less", param=param)


@pytest.mark.parametrize("state", ["b" * 1_000_001, {"a": "b" * 990_000}], ids=["text", "object"])
def test_a_text_and_objects_below_that_bound_are_read(state: object, nli: App) -> None:
    """By this tokenizer as one word."""
    questions = {"q": {"type": "noul", "instructions": "a"}}
    answer(nli, "/v1/systemone", model="nli", state=state, questions=questions)


def test_json_that_is_nested_more_deeply_than_it_can_be_written_is_an_error_of_the_request() -> None:
    """From Python 3.12 on its decoders go deeper."""
    deep: Any = "a"
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested too deeply: send it as one text"):
        as_text(deep)


@pytest.mark.parametrize("model", ["embedder", "ner", "classifier"])
def test_a_model_that_cannot_decide_says_what_can(model: str, kinds: App) -> None:
    asked = {"model": model, "state": STATE, "questions": {"q": {"type": "noul", "instructions": "a"}}}
    check_error(post(kinds, "/v1/systemone", **asked), 400, "natural language inference", param="model")


@pytest.mark.parametrize("path", ["/v1/systemone", "/v1/decisions"])
def test_questions_of_a_long_body_are_made_off_the_event_loop(
    path: str, nli: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects were written as texts on the loop, and prompts of millions of characters made there."""
    threads, module = [], "systemone" if path == "/v1/systemone" else "decisions"

    def noted(content: Any) -> str:
        threads.append(threading.current_thread())
        return as_text(content)

    monkeypatch.setattr(f"bei.server.routes.{module}.as_text", noted)
    content = {"cats": "the cat " * 10_000}
    if module == "systemone":
        asked: dict[str, Any] = {"state": content, "questions": {"q": {"type": "noul", "instructions": "a"}}}
    else:
        parts = [{"type": "input_json", "data": content}]
        questions = [{"type": "predicate", "instructions": "a"}]
        asked = {"input": [{"role": "user", "content": parts}], "questions": questions}
    check_error(post(nli, path, model="nli", **asked), 400, "tokens")
    assert threads
    assert threading.main_thread() not in threads


def test_what_models_read_for_many_questions_is_made_off_the_event_loop(
    nli: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return inputs_of(*args)

    monkeypatch.setattr("bei.server.routes.systemone.inputs_of", noted)
    for state, is_long in ((STATE, False), ("a" * 60_000, True)):
        questions = {name: {"type": "noul", "instructions": "a"} for name in "pq"}
        post(nli, "/v1/systemone", model="nli", state=state, questions=questions)
        assert (threads.pop() is threading.main_thread()) is not is_long


@pytest.mark.parametrize(
    "criteria", [{"cat": None, "\u732b": "x", "\u72ac": "x"}, {"cat": None, "world": None, "cat\u200b": None}]
)
@pytest.mark.parametrize("model", ["nli", "reranker"])
def test_options_with_the_same_tokens_are_refused_by_name(model: str, criteria: Any, nli: App, kinds: App) -> None:
    app = nli if model == "nli" else kinds
    questions = {"which": {"type": "choice", "instructions": "hello", "criteria": criteria}}
    response = post(app, "/v1/systemone", model=model, state=STATE, questions=questions)
    check_error(response, 400, "have the same tokens", param="questions")


@pytest.mark.parametrize("model", ["nli", "reranker"])
def test_instructions_beyond_the_model_s_limit_are_not_options_that_are_alike(model: str, nli: App, kinds: App) -> None:
    """Both options were cut off behind them."""
    app = nli if model == "nli" else kinds
    questions = {"which": {**QUESTIONS["which"], "instructions": "hello " * 300}}
    response = post(app, "/v1/systemone", model=model, state=STATE, questions=questions)
    check_error(response, 400, "A text with a question and its options has more than", param="input")
