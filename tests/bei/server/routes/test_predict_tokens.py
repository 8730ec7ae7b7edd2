"""``/predict_tokens``. The aggregations themselves are tested in tests/bei/tasks/test_entities.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import TAGS, answer, expected_output, post, softmax
from tests.support.artifacts import token_ids

TEXT = "the cats"  # [CLS] the cat ##s [SEP]
SPANS = [("the", 0, 3), ("cat", 4, 7), ("s", 7, 8)]


@pytest.mark.parametrize("inputs", [TEXT, [TEXT], [[TEXT]]], ids=["text", "list", "list of lists"])
def test_every_token_but_the_special_ones_has_its_best_label(kinds: App, inputs: object) -> None:
    (tokens,) = answer(kinds, "/predict_tokens", inputs=inputs)
    assert [(token["token"], token["start"], token["end"]) for token in tokens] == SPANS
    assert [token["token_id"] for token in tokens] == token_ids(TEXT)[1:-1]
    for token, row in zip(tokens, softmax(expected_output("token_logits", TEXT, len(TAGS)))[1:-1], strict=True):
        ((label, score),) = token["results"].items()
        assert label == TAGS[int(row.argmax())]
        assert score == pytest.approx(row.max(), rel=1e-6)


def test_raw_scores_of_tokens_are_the_logits_of_all_labels(kinds: App) -> None:
    (tokens,) = answer(kinds, "/predict_tokens", inputs=[[TEXT]], raw_scores=True)
    logits = expected_output("token_logits", TEXT, len(TAGS))[1:-1]
    assert [list(token["results"]) for token in tokens] == [TAGS] * 3
    np.testing.assert_allclose([list(token["results"].values()) for token in tokens], logits)


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
@pytest.mark.parametrize("raw", [False, True])
def test_entities_have_one_label_without_its_prefix_and_their_characters(kinds: App, strategy: str, raw: bool) -> None:
    texts = ["the cats", "hello", "world !"]
    found = answer(kinds, "/predict_tokens", inputs=[[t] for t in texts], aggregation_strategy=strategy, raw_scores=raw)
    assert len(found) == len(texts)
    entities = [(text, entity) for text, entities in zip(texts, found, strict=True) for entity in entities]
    assert entities
    for text, entity in entities:
        assert list(entity["results"]) == ["PER"]
        assert entity["token"] == text[entity["start"] : entity["end"]]


def test_several_texts_are_answered_in_order_and_cut_ones_named(kinds: App) -> None:
    response = post(kinds, "/predict_tokens", inputs=["a", "b " * 40, "cat"])
    assert [tokens[0]["token"] for tokens in response.json()] == ["a", "b", "cat"]
    assert response.headers["x-truncated-inputs"] == "1"


@pytest.mark.parametrize("inputs", [[["a", "b"]], [["a"], []]])
def test_an_inner_list_holds_one_text(kinds: App, inputs: object) -> None:
    check_error(post(kinds, "/predict_tokens", inputs=inputs), 400, "a list of one", param="inputs")


@pytest.mark.parametrize("inputs", [None, 1, [], "", [""], [[""]], [[1]], ["a"] * 9])
def test_wrong_inputs_are_refused(kinds: App, inputs: object) -> None:
    check_error(post(kinds, "/predict_tokens", inputs=inputs), 400)


def test_an_unknown_aggregation_is_refused(kinds: App) -> None:
    response = post(kinds, "/predict_tokens", inputs="a", aggregation_strategy="best")
    check_error(response, 400, "Invalid enum value 'best'", param="aggregation_strategy")
