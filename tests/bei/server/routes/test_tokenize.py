"""``/tokenize`` in both dialects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.service.admission import Ticket
from bei.service.service import InferenceService
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import answer, post
from tests.support.artifacts import LIMITS, tiny_tokenizer


def test_tei_s_tokens_say_where_they_stand(app: App) -> None:
    assert answer(app, "/tokenize", inputs="the Cats") == [
        [
            {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None},
            {"id": 11, "text": "the", "special": False, "start": 0, "stop": 3},
            {"id": 12, "text": "Cat", "special": False, "start": 4, "stop": 7},
            {"id": 58, "text": "s", "special": False, "start": 7, "stop": 8},
            {"id": 3, "text": "[SEP]", "special": True, "start": None, "stop": None},
        ]
    ]


def test_several_texts_without_special_tokens(app: App) -> None:
    found = answer(app, "/tokenize", inputs=["cat", "the"], add_special_tokens=False)
    assert [[token["text"] for token in tokens] for tokens in found] == [["cat"], ["the"]]


def test_a_prompt_is_part_of_the_text(kinds: App) -> None:
    (tokens,) = answer(kinds, "/tokenize", inputs="cat", prompt_name="query", model="embedder")
    assert [token["text"] for token in tokens[1:-1]] == ["query", ":", "cat"]
    check_error(post(kinds, "/tokenize", inputs="cat", prompt_name="x", model="embedder"), 400, param="prompt_name")


@pytest.mark.parametrize("field", ["prompt_name", "input_type"])
def test_a_side_of_late_interaction_is_read_as_the_model_reads_it(kinds: App, field: str) -> None:
    (tokens,) = answer(kinds, "/tokenize", inputs="cat", model="colbert", **{field: "query"})
    assert [token["text"] for token in tokens] == ["[CLS]", "query", ":", "cat", "[SEP]", "!", "!", "!"]
    assert [token["special"] for token in tokens[5:]] == [True] * 3
    (tokens,) = answer(kinds, "/tokenize", inputs="cat !", model="colbert", **{field: "document"})
    assert [token["text"] for token in tokens] == ["[CLS]", "cat", "!", "[SEP]"]
    (tokens,) = answer(kinds, "/tokenize", inputs="cat", model="colbert")
    assert len(tokens) == 3


def test_vllm_s_answer_is_ids_and_their_number(app: App) -> None:
    assert answer(app, "/tokenize", prompt="the cats", model="tiny") == {
        "count": 5,
        "max_model_len": LIMITS.max_seq_len,
        "tokens": [2, 11, 12, 58, 3],
        "token_strs": None,
    }
    named = answer(app, "/tokenize", prompt="the cats", add_special_tokens=False, return_token_strs=True)
    assert (named["count"], named["token_strs"]) == (3, ["the", "cat", "##s"])


@pytest.mark.parametrize("field", ["inputs", "prompt"])
def test_a_long_text_is_admitted_as_bulk_work_with_all_of_its_length(
    app: App, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    tickets: list[Ticket] = []
    admit = InferenceService.admit

    def noted(*arguments: Any, **options: Any) -> Ticket:
        tickets.append(admit(*arguments, **options))
        return tickets[-1]

    monkeypatch.setattr(InferenceService, "admit", noted)
    for num_words in (1, 5000):
        answer(app, "/tokenize", **{field: "cat " * num_words})
    short, long = tickets
    assert (short.lane, short.admitted.num_tokens) == ("interactive", 4)
    assert (long.lane, long.admitted.num_tokens) == ("bulk", 5003)


def test_nothing_is_cut_because_clients_count_with_it(app: App) -> None:
    long = "cat " * 5000
    assert answer(app, "/tokenize", prompt=long)["count"] == 5002
    response = post(app, "/tokenize", inputs=[long])
    assert len(response.json()[0]) == 5002
    assert "x-truncated-inputs" not in response.headers


def test_where_several_models_are_served_one_must_be_named(kinds: App) -> None:
    check_error(post(kinds, "/tokenize", inputs="a"), 400, "set model to one of embedder", param="model")


@pytest.mark.parametrize(
    "body", [{}, {"inputs": "a", "prompt": "a"}, {"inputs": None}, {"messages": [{"role": "user", "content": "a"}]}]
)
def test_a_body_has_inputs_or_a_prompt(app: App, body: dict[str, object]) -> None:
    check_error(post(app, "/tokenize", **body), 400, "exactly one of the fields inputs, prompt")


@pytest.mark.parametrize("body", [{"inputs": []}, {"inputs": [""]}, {"inputs": [1]}, {"prompt": ""}, {"prompt": ["a"]}])
def test_wrong_texts_are_refused(app: App, body: dict[str, object]) -> None:
    check_error(post(app, "/tokenize", **body), 400)


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_tokens_are_the_library_s_and_lie_in_order_in_the_text(app: App, text: str) -> None:
    (tokens,) = answer(app, "/tokenize", inputs=text)
    assert [token["id"] for token in tokens] == tiny_tokenizer().encode(text).ids
    places = [(token["start"], token["stop"]) for token in tokens if not token["special"]]
    assert all(0 <= start <= stop <= len(text) for start, stop in places)
    assert places == sorted(places)
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in tokens if not token["special"])
