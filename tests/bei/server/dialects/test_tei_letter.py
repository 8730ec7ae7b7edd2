"""What TEI answers otherwise than the root, which follows the checkpoint or reads more fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.artifact.manifest import Artifact, Classification
from bei.core import Float32Array
from bei.engine.fake import FakeEngine
from tests.bei.server.app import App
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import answer, expected_output, post, save_kind
from tests.support.artifacts import LIMITS, save_artifact

LABELS = ["sad", "mad", "glad"]


@pytest.fixture(params=[LABELS, LABELS[:1]], ids=["three labels", "one"])
def classified(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[App, Float32Array]]:
    """A server of a classifier whose checkpoint wants another function, and the logits of "the cat"."""
    labels: list[str] = request.param
    several = len(labels) > 1
    classification = Classification(labels=labels, function="sigmoid" if several else "none")
    kind = "classifier" if several else "reranker"
    app = App(save_kind(tmp_path / kind, kind, classification=classification))
    yield app, np.array(expected_output("logits", "the cat", len(labels)))
    app.close()


def test_predict_has_the_functions_of_tei(classified: tuple[App, Float32Array]) -> None:
    """Those of the checkpoint were answered: independent probabilities, and of one label the logit itself."""
    app, logits = classified
    shares = np.exp(logits - logits.max())
    wanted = shares / shares.sum() if len(logits) > 1 else 1 / (1 + np.exp(-logits))
    scores = [one["score"] for one in answer(app, "/tei/predict", inputs="the cat")]
    np.testing.assert_allclose(scores, sorted(wanted, reverse=True), rtol=1e-5)
    raw = [one["score"] for one in answer(app, "/tei/predict", inputs="the cat", raw_scores=True)]
    np.testing.assert_allclose(raw, sorted(logits, reverse=True), rtol=1e-5)
    own = [one["score"] for one in answer(app, "/predict", inputs="the cat")]
    assert not np.allclose(own, scores)


@pytest.mark.parametrize("text", ["the cat", "é cat", "日本 cat", "🐈 cat\N{COMBINING ACUTE ACCENT}s 日"])
def test_places_of_tokens_are_bytes(text: str, kinds: App) -> None:
    """As TEI's tokenizer counts; characters were counted, so that a client cut the text elsewhere."""
    (tokens,) = answer(kinds, "/tei/tokenize", inputs=text, model="embedder")
    (own,) = answer(kinds, "/tokenize", inputs=text, model="embedder")
    assert [one["id"] for one in tokens] == [one["id"] for one in own]
    for token, at_root in zip(tokens, own, strict=True):
        if not token["special"]:
            assert text.encode()[token["start"] : token["stop"]].decode() == token["text"] == at_root["text"]
            assert text[at_root["start"] : at_root["stop"]] == at_root["text"]


@pytest.mark.parametrize("path", ["/tokenize", "/tei/tokenize"])
def test_tokens_are_those_that_are_read_with_the_default_prompt(path: str, tmp_path: Path) -> None:
    """Texts were shown without it."""
    artifact = save_artifact(tmp_path / "prompted", prompts={"query": "query: "}, default_prompt_name="query")
    app = App((artifact, FakeEngine(LIMITS)))
    try:
        (tokens,) = answer(app, path, inputs="the cat")
        assert [tokens] == answer(app, path, inputs="the cat", prompt_name="query")
        assert [one["text"] for one in tokens][1:4] == ["query", ":", "the"]
    finally:
        app.close()


def test_openai_s_route_reads_nothing_but_tei_s_fields(make_app: MakeApp, second_artifact: Artifact) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    asked: dict[str, Any] = {"input": "the cat", "model": "org/second"}
    plain = answer(app, "/tei/v1/embeddings", **asked)["data"]
    others = {"normalize": False, "output_dtype": "binary", "truncation_direction": "left", "add_special_tokens": False}
    assert answer(app, "/tei/v1/embeddings", **asked, **others)["data"] == plain
    np.testing.assert_allclose(np.linalg.norm(plain[0]["embedding"]), 1, rtol=1e-5)
    assert len(answer(app, "/tei/v1/embeddings", **asked, dimensions=4)["data"][0]["embedding"]) == 4


def test_an_empty_list_of_ids_is_empty(kinds: App) -> None:
    response = post(kinds, "/tei/embed", inputs=[[]], model="embedder")
    assert (response.status_code, response.json()["error_type"]) == (400, "Empty")


@pytest.mark.parametrize("path", ["/embed", "/tei/embed"])
def test_a_prompt_of_token_ids_alone_is_refused(path: str, kinds: App) -> None:
    """It was passed over. Beside texts it is theirs."""
    for asked in ({"prompt_name": "cats"}, {"prompt": "query: "}):
        response = post(kinds, path, inputs=[[5, 6]], model="embedder", **asked)
        assert response.status_code == (422 if path.startswith("/tei") else 400), response.text
        assert "A prompt is of texts" in response.text
        assert post(kinds, path, inputs=["the cat", [5, 6]], model="embedder", **asked).status_code == 200
    assert post(kinds, path, inputs=[[5]], model="embedder", prompt="").status_code == 200
