"""``/v1/extract``: labels that do not fit are clear errors, whatever their number and their characters."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import post

TEXT = "the cat, hello world"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"labels": []}, "labels is empty"),
    ({"labels": [""]}, "labels 0 is empty"),
    ({"labels": ["a", " \u2003\t"]}, "labels 1 is empty"),
    ({"labels": ["cat", "the", "cat"]}, "labels 2 is the same as labels 0"),
    ({"labels": [f"label {place}" for place in range(10_000)]}, "send fewer"),
    ({"labels": ["cat the hello", "the cat hello", "hello cat the", "world the cat"]}, "The labels take"),
    ({"labels": ["cat"], "threshold": {"dog": 0.5}}, "threshold has 'dog'"),
    ({"labels": ["cat"], "threshold": 1.5}, "threshold"),
    ({"labels": "cat"}, "labels"),
    ({"labels": [1]}, "labels"),
    ({"labels": None}, "labels is missing"),
    ({"labels": ["cat"], "input": []}, "input is an empty list"),
    ({"labels": {}}, "labels is empty"),
    ({"structures": {"cat": ["name"]}}, "leave structures out"),
    ({"labels": ["cat"], "relations": ["eats"]}, "leave relations out"),
    ({"labels": ["cat"], "entities": [[]]}, "send labels, and leave entities out"),
    ({"labels": ["cat"], "entities": [[{"start": 2, "end": 1, "kind": "a"}]]}, "kind"),
    ({"labels": ["cat"], "schema": {"entities": ["cat"]}}, "schema"),
    ({"labels": ["cat"], "classifications": []}, "classifications"),
    ({"labels": {"cat": "an animal"}}, "reads names of labels alone"),
    ({"labels": {"cat": {"validators": []}}}, "validators"),
    ({"labels": {"cat": {"threshold": 0.5}}, "threshold": {"cat": 0.4}}, "threshold and labels both have one"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_does_not_fit_is_refused(fields: dict[str, Any], said: str, kinds: App) -> None:
    body = {"model": "spans", "input": [TEXT], **fields}
    response = post(kinds, "/v1/extract", **body)
    if len(json.dumps(body)) > 100_000:
        check_error(response, 413)
        return
    check_error(response, 400, said)


TWICE = [
    ("/v1/extract", '"labels": {"cat": "a", "cat": "b"}', "labels"),
    ("/v1/extract", '"structures": {"cat": ["name"], "cat": ["age"]}', "structures"),
    ("/v1/extract", '"relations": {"eats": {"threshold": 0.1, "threshold": 0.2}}', "relations"),
    ("/v1/extract", '"classifications": [{"task": "a", "labels": {"b": "c", "b": "d"}}]', "classifications"),
    ("/v1/extract", '"labels": ["cat"], "threshold": {"cat": 0.1, "cat": 0.2}', "threshold"),
    ("/", '"labels": {"cat": "a", "cat": "b"}', "labels"),
    ("/v1/classify", '"labels": {"cat": "a", "cat": "b"}', "labels"),
    *(
        (path, '"score_weights": {"dense": 1, "dense": 2}, "query": "a", "documents": ["b"]', "score_weights")
        for path in ("/rerank", "/v2/rerank")
    ),
    ("/rerank", '"score_weights": {"dense": 1, "dense": 2}, "query": "a", "texts": ["b"]', "score_weights"),
]


@pytest.mark.parametrize(("path", "field", "param"), TWICE)
def test_a_name_that_stands_twice_in_a_table_is_refused(path: str, field: str, param: str, kinds: App) -> None:
    """The first one was dropped."""
    body = f'{{"model": "spans", "input": ["{TEXT}"], {field}}}'
    check_error(kinds.request("POST", path, body.encode()), 400, "twice: send each once", param=param)


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.text(max_size=12), max_size=8),
    text=st.text(max_size=40),
    threshold=st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_labels_are_answered_or_refused_by_name(labels: list[str], text: str, threshold: float, kinds: App) -> None:
    body = json.dumps({"model": "spans", "input": [text], "labels": labels, "threshold": threshold})
    response = kinds.request("POST", "/v1/extract", body.encode("utf-8", "surrogatepass"))
    if response.status_code != 200:
        error = check_error(response, 400)
        assert any(word in error for word in ("label", "threshold", "input", "JSON")), error
        return
    (found,) = response.json()["data"]
    assert all(span["text"] == text[span["start"] : span["end"]] for span in found["spans"])
    assert all(span["label"] in labels and threshold <= span["score"] <= 1 for span in found["spans"])


def test_scores_are_written_in_as_few_digits_as_they_have(kinds: App) -> None:
    spans = {"model": "spans", "input": [TEXT], "labels": ["cat", "the"], "threshold": 0.1}
    items = {"items": [{"text": TEXT}], "params": {"labels": ["cat", "the"], "options": {"threshold": 0.1}}}
    for path, body in (("/v1/extract", spans), ("/v1/extract/spans", items)):
        scores = re.findall(rb'"score":([0-9.]+)', post(kinds, path, **body).content)
        assert scores
        assert max(map(len, scores)) <= len("0.123456789")
