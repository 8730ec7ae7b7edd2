"""``POST /``: what it refuses. What it answers is in ``dialects/tei.json`` and in the clients' tests."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.artifact.manifest import Classification, OutputInfo
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import KindEngine, expected_output, post, softmax
from tests.support.artifacts import save_artifact

NLI = {"contradiction": 0, "neutral": 1, "entailment": 2}


def app_of(path: Path, *labels: str, **settings: Any) -> App:
    artifact = save_artifact(
        path,
        name="nli",
        tasks=["classify"],
        outputs=[OutputInfo(name="logits", dimension=len(labels))],
        classification=Classification(labels=list(labels), function="softmax"),
        embedding=None,
    )
    return App((artifact, KindEngine({"logits": len(labels)})), **settings)


@pytest.fixture
def nli(tmp_path: Path) -> Iterator[App]:
    app = app_of(tmp_path / "nli", *NLI)
    yield app
    app.close()


def ask(app: App, labels: list[str], **more: Any) -> Any:
    return post(app, "/", inputs="cat", parameters={"candidate_labels": labels, **more})


def test_labels_share_one_probability_or_have_one_each(nli: App) -> None:
    labels = ["a", "b", "world"]
    logits = np.stack([expected_output("logits", ("cat", f"the {label}"), 3) for label in labels])
    for multi, expected in ((False, softmax(logits[:, 2])), (True, softmax(logits[:, [0, 2]])[:, 1])):
        found = ask(nli, labels, multi_label=multi, hypothesis_template="the {}").json()
        scores = {one["label"]: one["score"] for one in found}
        np.testing.assert_allclose([scores[label] for label in labels], expected, rtol=1e-6)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)


def test_a_text_that_was_cut_is_named(nli: App) -> None:
    """It was cut, and nothing was said of it."""
    asked = {"candidate_labels": ["a", "b"], "hypothesis_template": "the {}"}
    assert post(nli, "/", inputs="cat " * 40, parameters=asked).headers["x-truncated-inputs"] == "0"
    assert "x-truncated-inputs" not in post(nli, "/", inputs="cat", parameters=asked).headers


def test_of_two_labels_the_one_that_is_not_entailment_is_contradiction(tmp_path: Path) -> None:
    app = app_of(tmp_path / "two", "entailment", "not_entailment")
    try:
        (found,) = ask(app, ["a"], hypothesis_template="the {}").json()
        expected = softmax(expected_output("logits", ("cat", "the a"), 2)[None])[0, 0]
        assert found["score"] == pytest.approx(expected, rel=1e-6)
    finally:
        app.close()


def test_labels_with_the_same_tokens_are_refused_by_the_name_that_they_have_here(nli: App) -> None:
    check_error(ask(nli, ["cat", "hello", " cat"]), 400, "candidate_labels 0 and 2, ", param="candidate_labels")


def test_a_template_that_is_long_or_has_no_slot_is_refused_before_it_is_filled(nli: App) -> None:
    check_error(ask(nli, ["a"], hypothesis_template="it is"), 400, "has no {} for the label")
    check_error(ask(nli, [], hypothesis_template="{}"), 400, "empty list")
    tracemalloc.start()
    try:
        check_error(ask(nli, ["a"] * 2_000, hypothesis_template="{}" + "x" * 50_000), 400, "hypothesis_template")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_parameters_that_the_model_s_kind_does_not_read_are_refused(kinds: App) -> None:
    for model in ("embedder", "splade", "colbert"):
        check_error(post(kinds, "/", inputs="cat", model=model, parameters={"top_k": 1}), 400, param="parameters")
        assert post(kinds, "/", inputs="cat", model=model, parameters={}).status_code == 200
    check_error(
        post(kinds, "/", inputs="cat", model="ner", parameters={"stride": 3}), 400, "stride", param="parameters"
    )
    labels = {"candidate_labels": ["a"]}
    response = post(kinds, "/", inputs="cat", model="reranker", parameters=labels)
    check_error(response, 400, "natural language inference", code="task_not_supported")


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_a_model_that_finds_spans_reads_texts_and_labels(kinds: App, path: str) -> None:
    asked = {"input": ["cat"], "labels": ["a"], "model": "spans"}
    assert post(kinds, path, **asked).json() == post(kinds, "/v1/extract", **asked).json()
    check_error(post(kinds, path, inputs="cat", model="spans"), 400, "input")


@pytest.mark.parametrize("path", ["/info?model=spans", "/v1/models"])
def test_a_model_that_finds_spans_is_described(kinds: App, path: str) -> None:
    assert kinds.request("GET", path).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pooling", {"input": ["cat"]}),
        ("/vertex", {"instances": [{"inputs": "cat"}]}),
        ("/score", {"text_1": "a", "text_2": ["cat"]}),
        (
            "/oip/v2/models/spans/infer",
            {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}]},
        ),
    ],
)
def test_a_model_that_finds_spans_refuses_what_it_cannot_answer(kinds: App, path: str, body: dict[str, Any]) -> None:
    assert post(kinds, path, **body, model="spans").status_code == 400
