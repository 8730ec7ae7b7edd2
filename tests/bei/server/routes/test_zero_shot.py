"""``/v1/classify``: labels of the request for models of natural language inference, the model's own without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.server.routes import root, zero_shot
from bei.tasks.zero_shot import HYPOTHESIS
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import answer, expected_output, post, softmax
from tests.bei.server.routes.test_root import app_of
from tests.support.artifacts import token_ids

NLI = ["contradiction", "neutral", "entailment"]
LABELS = ["a", "cat", "world"]


@pytest.fixture
def nli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    monkeypatch.setattr(zero_shot, "HYPOTHESIS", "the {}")  # the tiny model would cut the label off the other
    app = app_of(tmp_path / "nli", *NLI)
    yield app
    app.close()


def test_a_label_is_asked_as_in_transformers_pipeline() -> None:
    default = root.ZeroShotParameters(candidate_labels=[]).hypothesis_template
    assert HYPOTHESIS == default == "This example is {}."


def expected_scores(text: str) -> Any:
    logits = [expected_output("logits", (text, f"the {label}"), len(NLI)) for label in LABELS]
    return softmax(np.stack(logits)[:, NLI.index("entailment")])


@pytest.mark.parametrize("form", [lambda text: text, lambda text: {"text": text}], ids=["texts", "objects"])
@pytest.mark.parametrize("mount", ["", "/jina"])
def test_each_text_has_a_score_for_each_label_in_the_request_s_order(nli: App, mount: str, form: Any) -> None:
    texts = ["cat", "the", "hello"]
    found = answer(nli, f"{mount}/v1/classify", input=[form(text) for text in texts], labels=LABELS)
    assert list(found) == ["usage", "data"]
    for index, (text, one) in enumerate(zip(texts, found["data"], strict=True)):
        scores = expected_scores(text)
        assert (one["object"], one["index"]) == ("classification", index)
        assert [label["label"] for label in one["predictions"]] == LABELS
        np.testing.assert_allclose([label["score"] for label in one["predictions"]], scores, rtol=1e-6)
        assert one["prediction"] == LABELS[int(scores.argmax())]
        assert one["score"] == pytest.approx(scores.max(), rel=1e-6)
    pairs = [(text, f"the {label}") for text in texts for label in LABELS]
    num_tokens = sum(min(16, len(token_ids(a, 99)) + len(token_ids(b, 99)) - 1) for a, b in pairs)
    assert found["usage"] == {"total_tokens": num_tokens}


@pytest.mark.parametrize("text", ["cat", {"text": "cat"}])
def test_one_text_and_one_label(nli: App, text: Any) -> None:
    (found,) = answer(nli, "/v1/classify", input=text, labels=["a"])["data"]
    logits = expected_output("logits", ("cat", "the a"), len(NLI))
    assert found["prediction"] == "a"
    assert found["score"] == pytest.approx(softmax(logits[[0, 2]])[1], rel=1e-6)


def test_texts_that_were_cut_are_named_and_not_their_pairs(nli: App) -> None:
    response = post(nli, "/v1/classify", input=["a", "b " * 40, "c"], labels=["x", "y"])
    assert response.headers["x-truncated-inputs"] == "1"


def test_without_labels_the_model_s_own_are_scored_as_by_classify(kinds: App) -> None:
    found, expected = (
        answer(kinds, path, input=["cat", "a"], model="classifier") for path in ("/v1/classify", "/classify")
    )
    assert found["data"] == expected["data"]


def test_other_models_and_trained_classifiers_are_refused_by_name(kinds: App) -> None:
    refused = post(kinds, "/v1/classify", input=["cat"], labels=LABELS, model="classifier")
    check_error(refused, 400, "entailment and contradiction", code="task_not_supported")
    refused = post(kinds, "/v1/classify", input=["cat"], classifier_id="x", model="classifier")
    check_error(refused, 400, "send labels", param="classifier_id")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ["cat"], "labels": []}, "labels"),
        ({"input": ["cat"], "labels": ["a", ""]}, "labels"),
        ({"input": [], "labels": ["a"]}, "input"),
        ({"input": [{"text": ""}], "labels": ["a"]}, "input"),
        ({"input": [{"text": "cat", "image": "data:image/png;base64,AA=="}], "labels": ["a"]}, "input"),
        ({"input": [{"image": "x"}], "labels": ["a"]}, "input"),
        ({"labels": ["a"]}, None),
        ({"input": "cat", "labels": "a"}, "labels"),
    ],
)
def test_wrong_requests_are_refused(nli: App, body: dict[str, Any], param: str | None) -> None:
    check_error(post(nli, "/v1/classify", **body), 400, **({} if param is None else {"param": param}))


def test_texts_times_labels_are_inputs(tmp_path: Path) -> None:
    app = app_of(tmp_path / "nli", *NLI, max_client_batch_size=6)
    try:
        assert len(answer(app, "/v1/classify", input=["cat", "the"], labels=LABELS)["data"]) == 2
        refused = post(app, "/v1/classify", input=["cat", "the", "a"], labels=LABELS)
        check_error(refused, 400, "has 9 inputs, the limit is 6", param="input")
    finally:
        app.close()


@pytest.mark.parametrize("other", [" cat", "cat ", "cat"])
def test_labels_with_the_same_tokens_are_refused_by_name(nli: App, other: str) -> None:
    """They had half of the score each."""
    response = post(nli, "/v1/classify", input=["the"], labels=["cat", "hello", other])
    check_error(response, 400, "have the same tokens", param="labels")


def test_labels_that_the_tokenizer_does_not_know_are_refused_by_name(nli: App) -> None:
    check_error(
        post(nli, "/v1/classify", input=["the"], labels=["\u732b", "\u72ac"]), 400, "same tokens", param="labels"
    )
