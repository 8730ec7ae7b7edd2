"""A 200 counts only with a complete body; bei's own answers pass the checks."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from bei.cli.bench.dialects import DIALECTS

VECTOR = base64.b64encode(np.ones(4, np.float32).tobytes()).decode()

RIGHT = {
    "openai": {"data": [{"embedding": VECTOR, "index": 0}, {"embedding": VECTOR, "index": 1}], "model": "m"},
    "openai-float": {"data": [{"embedding": [0.5, -1e-9]}, {"embedding": [1, 2]}]},
    "tei": [[0.5, 1.0], [0.25, 2.0]],
    "rerank": {"results": [{"index": 1, "relevance_score": 0.9, "document": None}, {"index": 0, "relevance_score": 1}]},
    "tei-rerank": [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}],
    "classify": {"data": [[{"label": "a", "score": 1}], {"label": "a", "probs": [0.5, 0.5]}]},
    "tei-predict": [[{"label": "a", "score": 1.0}], [{"label": "b", "score": 0.1}]],
}
WRONG: dict[str, list[object]] = {
    "openai": [
        {"data": []},
        {"data": [{"embedding": VECTOR}]},
        {"data": [{"embedding": VECTOR}, {"embedding": None}]},
        {"data": [{"embedding": ""}, {"embedding": ""}]},
        {"data": [{"embedding": VECTOR}, {"embedding": "AA=="}]},
    ],
    "openai-float": [
        {"data": [{"embedding": []}, {"embedding": []}]},
        {"data": [{"embedding": [None]}] * 2},
        {"data": [{"embedding": [1]}, {"embedding": [1, 2]}]},
        {"data": [{"embedding": {}}] * 2},
    ],
    "tei": [[], [[1.0]], [None, [1.0]], [[], []], {"error": "x"}],
    "rerank": [{"results": []}, {"results": [{"index": 0, "relevance_score": 1}] * 2}, {}],
    "tei-rerank": [[], [{"index": 0, "score": 1}, {"index": 2, "score": 1}], [{"index": 0}, {"index": 1}]],
    "classify": [{"data": []}, {"data": [None, []]}, []],
    "tei-predict": [[], [[], []], [{"label": "a", "score": 1.0}] * 2],
}


@pytest.mark.parametrize("name", DIALECTS)
def test_an_answer_is_right_if_it_has_what_was_asked_for(name: str) -> None:
    check = DIALECTS[name].check
    assert check(json.dumps(RIGHT[name]).encode(), 2) is None
    for wrong in WRONG[name]:
        assert check(json.dumps(wrong).encode(), 2), wrong
    assert check(json.dumps(RIGHT[name]).encode(), 3)
    for broken in (b"", b"null", b"{", b"<html>"):
        assert check(broken, 2), broken


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("openai", {"model": "m", "input": ["a", "ö"], "encoding_format": "base64"}),
        ("openai-float", {"model": "m", "input": ["a", "ö"], "encoding_format": "float"}),
        ("tei", {"model": "m", "inputs": ["a", "ö"], "truncate": True}),
        ("rerank", {"model": "m", "query": "q", "documents": ["a", "ö"], "return_documents": False}),
        ("tei-rerank", {"model": "m", "query": "q", "texts": ["a", "ö"], "truncate": True}),
        ("classify", {"model": "m", "input": ["a", "ö"]}),
        ("tei-predict", {"model": "m", "inputs": [["a"], ["ö"]], "truncate": True}),
    ],
)
def test_bodies_are_those_of_the_dialect(name: str, body: dict[str, object]) -> None:
    dialect = DIALECTS[name]
    assert json.loads(dialect.body(["a", "ö"], "q", "m")) == body
    assert "model" not in json.loads(dialect.body(["a"], "q", None))


def test_a_single_text_is_a_string_as_openai_s_clients_send_it() -> None:
    assert json.loads(DIALECTS["openai"].body(["a"], "", "m"))["input"] == "a"
