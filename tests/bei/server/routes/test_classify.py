"""``/predict`` and ``/classify``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import InvalidRequestError
from bei.server.routes.classify import by_score, inputs_of
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import LABELS, answer, expected_output, post, softmax
from tests.support.artifacts import token_ids

Given = str | tuple[str, str]


def check_ranked(found: list[dict[str, Any]], given_input: Given, *, raw: bool = False) -> None:
    """Assert that ``found`` are the labels' scores for ``given_input``, best first."""
    logits = expected_output("logits", given_input, len(LABELS))
    expected = logits if raw else softmax(logits)
    assert [entry["label"] for entry in found] == [LABELS[index] for index in np.argsort(-expected, kind="stable")]
    np.testing.assert_allclose([entry["score"] for entry in found], sorted(expected, reverse=True), rtol=1e-6)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("inputs", "meant"),
    [("cat", "cat"), (["cat"], "cat"), (["cat", "hello"], ("cat", "hello"))],
    ids=["text", "list of one text", "pair"],
)
def test_one_input_gets_one_list(kinds: App, inputs: object, meant: Given, raw: bool) -> None:
    check_ranked(answer(kinds, "/predict", inputs=inputs, raw_scores=raw, model="classifier"), meant, raw=raw)


def test_a_batch_of_texts_and_pairs_gets_a_list_of_lists(kinds: App) -> None:
    found = answer(kinds, "/predict", inputs=[["cat"], ["cat", "hello"], ["world"]])
    meant: list[Given] = ["cat", ("cat", "hello"), "world"]
    for entry, one in zip(found, meant, strict=True):
        check_ranked(entry, one)
    assert len(answer(kinds, "/predict", inputs=[["cat"]])) == 1


def test_two_texts_in_one_list_are_no_batch(kinds: App) -> None:
    pair, batch = (answer(kinds, "/predict", inputs=inputs) for inputs in (["cat", "a"], [["cat"], ["a"]]))
    assert (len(pair), len(batch)) == (len(LABELS), 2)
    assert pair != batch[0]


@pytest.mark.parametrize("inputs", [["a", "b", "c"], [["a", "b", "c"]], [[]], [["a"], "b"], ["a", ["b"]]])
def test_inputs_that_are_neither_texts_nor_pairs_are_refused_with_the_forms_there_are(
    kinds: App, inputs: object
) -> None:
    check_error(post(kinds, "/predict", inputs=inputs), 400, 'a pair as ["a", "b"]', param="inputs")


@pytest.mark.parametrize("inputs", ["", [""], [["a"], [""]], [["a", ""], [""]]])
def test_empty_texts_by_themselves_are_refused(kinds: App, inputs: object) -> None:
    check_error(post(kinds, "/predict", inputs=inputs), 400, "empty text: leave it out", param="inputs")


@pytest.mark.parametrize("inputs", [None, 1, {}, [1], [[1]], [[["a"]]]])
def test_inputs_of_other_types_are_refused(kinds: App, inputs: object) -> None:
    check_error(post(kinds, "/predict", inputs=inputs), 400)


def test_cut_inputs_of_a_batch_are_named(kinds: App) -> None:
    response = post(kinds, "/predict", inputs=[["a"], ["a " * 40], ["a", "b " * 40]])
    assert response.headers["x-truncated-inputs"] == "1-2"


# /classify


def test_vllm_s_body_gets_the_best_label_and_all_probabilities(kinds: App) -> None:
    found = answer(kinds, "/classify", input=["cat", "world"], model="classifier")
    assert found["object"] == "list"
    assert found["id"].startswith("classify-")
    for index, text in enumerate(["cat", "world"]):
        probabilities = softmax(expected_output("logits", text, len(LABELS)))
        entry = found["data"][index]
        assert (entry["index"], entry["num_classes"]) == (index, len(LABELS))
        assert entry["label"] == LABELS[int(probabilities.argmax())]
        np.testing.assert_allclose(entry["probs"], probabilities, rtol=1e-6)
    num_tokens = len(token_ids("cat")) + len(token_ids("world"))
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_one_text_is_a_list_of_one(kinds: App) -> None:
    assert answer(kinds, "/classify", input="cat")["data"] == answer(kinds, "/classify", input=["cat"])["data"]


@pytest.mark.parametrize("raw", [False, True])
def test_infinity_s_client_which_sends_raw_scores_gets_its_own_lists(kinds: App, raw: bool) -> None:
    found = answer(kinds, "/classify", input=["cat", "world"], raw_scores=raw, model="classifier")
    assert found["object"] == "classify"
    for entry, text in zip(found["data"], ["cat", "world"], strict=True):
        check_ranked(entry, text, raw=raw)


def test_vllm_s_client_asks_for_logits_in_its_own_word(kinds: App) -> None:
    (entry,) = answer(kinds, "/classify", input="cat", use_activation=False)["data"]
    np.testing.assert_allclose(entry["probs"], expected_output("logits", "cat", len(LABELS)))


@pytest.mark.parametrize("given_input", [None, [], "", ["a", ""], [1], ["a"] * 9])
def test_a_wrong_input_is_refused(kinds: App, given_input: object) -> None:
    check_error(post(kinds, "/classify", input=given_input), 400)


def test_a_reranker_classifies_where_it_is_named(kinds: App) -> None:
    assert len(answer(kinds, "/predict", inputs="cat", model="reranker")) == 1


# Laws

_texts = st.text(max_size=3)


@given(st.lists(_texts | st.lists(_texts, max_size=3), max_size=4))
def test_an_input_is_a_text_or_a_pair_and_a_list_of_lists_is_a_batch(given_inputs: list[str | list[str]]) -> None:
    try:
        inputs, is_batch = inputs_of(given_inputs)
    except InvalidRequestError:
        flat = [text for value in given_inputs for text in ([value] if isinstance(value, str) else value)]
        sizes = [1 if isinstance(value, str) else len(value) for value in given_inputs]
        kinds_of_value = {type(value) for value in given_inputs}
        assert "" in flat or len(kinds_of_value) != 1 or not all(1 <= size <= 2 for size in sizes) or len(sizes) > 2
        return
    as_lists = [[value] if isinstance(value, str) else list(value) for value in inputs]
    assert as_lists == (given_inputs if is_batch else [given_inputs])


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=6))
def test_labels_are_sorted_by_their_scores(row: list[float]) -> None:
    labels = [str(index) for index in range(len(row))]
    found = by_score(np.array(row, np.float32), labels)
    assert [float(entry["score"]) for entry in found] == sorted(row, reverse=True)
    assert {int(entry["label"]): float(entry["score"]) for entry in found} == dict(enumerate(row))
