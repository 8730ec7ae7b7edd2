"""Hugging Face's paths: what ``POST /`` answers for the model in the path, if it has the task there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import answer, post

TEXTS = ["cat", "the cat"]
ZERO_SHOT = {"inputs": "cat", "parameters": {"candidate_labels": ["a", "b"]}}
# Task, model, body.
TASKS: list[tuple[str, str, dict[str, Any]]] = [
    ("feature-extraction", "embedder", {"inputs": TEXTS}),
    ("feature-extraction", "embedder", {"inputs": "cat", "options": {"wait_for_model": True, "use_cache": False}}),
    ("sentence-similarity", "embedder", {"inputs": {"source_sentence": "cat", "sentences": TEXTS}}),
    ("text-classification", "classifier", {"inputs": "cat", "parameters": {"top_k": 2}}),
    ("text-classification", "classifier", {"inputs": [["cat"], ["a", "b"]]}),
    ("token-classification", "ner", {"inputs": "the cat", "parameters": {"aggregation_strategy": "none"}}),
    ("text-ranking", "reranker", {"query": "cat", "texts": TEXTS}),
]


@pytest.mark.parametrize(("task", "model", "body"), TASKS)
def test_the_answer_is_that_of_the_root(kinds: App, task: str, model: str, body: dict[str, Any]) -> None:
    expected = answer(kinds, "/", **body, model=model)
    for path in (f"/models/{model}", f"/models/{model}/pipeline/{task}", f"/pipeline/{task}/{model}"):
        assert answer(kinds, path, **body) == expected
        assert answer(kinds, path, **body, model="nobody") == expected  # the path says which


def test_a_model_without_the_task_is_refused(kinds: App) -> None:
    for path in ("/pipeline/feature-extraction/classifier", "/models/classifier/pipeline/feature-extraction"):
        check_error(post(kinds, path, inputs="cat"), 400, "classifier cannot embed", code="task_not_supported")


def test_what_is_not_there_is_a_404_that_says_what_is(kinds: App) -> None:
    check_error(post(kinds, "/models/nobody", inputs="cat"), 404, "Served: embedder", param="model")
    check_error(post(kinds, "/pipeline/text-to-image/embedder", inputs="cat"), 404, "feature-extraction, sentence-sim")
    check_error(kinds.get("/pipeline/feature-extraction/embedder"), 405)
    assert kinds.get("/models/embedder").json()["id"] == "embedder"
    assert kinds.request("DELETE", "/models/embedder").headers["allow"] == "GET, HEAD, POST"
