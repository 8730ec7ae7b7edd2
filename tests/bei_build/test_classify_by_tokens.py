"""Language models as classifiers (guards): scores of tokens behind a template, against transformers' logits of the same
prompt, by ``bei.Model`` and over HTTP, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bei import Model
from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Float32Array
from bei.errors import ConfigError, InvalidRequestError
from bei_build.config import BuildConfig
from tests.bei.server.app import App
from tests.support.builds import build_artifact, open_engine
from tests.support.reading import saved

TEXTS = ["hello the world", "a", "is {response} it? {text}", "in the end " * 40]
_FRAME: dict[str, Any] = {"classify_prefix": "hello ", "classify_suffix": "\nin it?"}
ASKED: dict[str, Any] = {"task": "classify", "classify_body": "Q: {text}", **_FRAME}
ABOUT_ANSWERS: dict[str, Any] = {**ASKED, "classify_body": "Q: {text} A: {response}"}


def expected(folder: Path, artifact: Artifact, body: str, tokens: tuple[str, ...], most: int = 48) -> Float32Array:
    """The softmax of ``tokens`` behind the prompt, of which only the body is cut; of two the last one's share."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    before, middle, behind = (
        tokenizer.encode(part, add_special_tokens=False).ids
        for part in (_FRAME["classify_prefix"], body, _FRAME["classify_suffix"])
    )
    ids = [*before, *middle[: most - len(before) - len(behind)], *behind]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    shares = torch.stack([logits[tokenizer.token_to_id(token)] for token in tokens]).softmax(0).numpy()
    return np.asarray(shares[-1:] if len(tokens) == 2 else shares, np.float32)


@pytest.mark.parametrize("tokens", [("t", "he"), ("t", "he", "in")], ids=["two", "three"])
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM"])
def test_scores_are_the_softmax_of_transformers_logits(name: str, tokens: tuple[str, ...], tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", name)
    if name == "Gemma2ForCausalLM" and len(tokens) > 2:
        with pytest.raises(ConfigError, match="compares two of such at most"):
            build_artifact(folder, tmp_path / "artifact", score_tokens=tokens, **ASKED, verify=False)
        return
    artifact = build_artifact(folder, tmp_path / "artifact", score_tokens=tokens, max_seq_len=48, **ASKED, verify=False)
    assert artifact.manifest.tasks == ["classify"]
    with Model(artifact.path, tune="off") as model:
        found = model.classify(TEXTS)
    assert found.labels == list(tokens[-1:] if len(tokens) == 2 else tokens)
    for row, text in zip(found.scores, TEXTS, strict=True):
        np.testing.assert_allclose(row, expected(folder, artifact, f"Q: {text}", tokens), atol=1e-4)


def test_answers_are_judged_with_their_questions_on_every_route(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    settings = {**ABOUT_ANSWERS, "score_tokens": ("t", "he"), "score_labels": ("unsafe",), "max_seq_len": 48}
    artifact = build_artifact(folder, tmp_path / "artifact", **settings, verify=False)
    share = expected(folder, artifact, "Q: hello A: the {text}", ("t", "he"))[0]
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    pair = ["hello", "the {text}"]
    try:

        def answer(path: str, **body: object) -> Any:
            response = app.request("POST", path, json.dumps(body).encode())
            assert response.status_code == 200, response.text
            return response.json()

        assert answer("/predict", inputs=pair) == [{"label": "unsafe", "score": pytest.approx(share, abs=1e-4)}]
        refused = app.request("POST", "/predict", b'{"inputs": "hello"}')
        assert refused.status_code == 400
        assert "template reads pairs of a text and a response" in refused.text
        for path in ("/rerank", "/embed"):
            other = {"query": "a", "texts": ["b"], "inputs": "a"}
            assert app.request("POST", path, json.dumps(other).encode()).status_code == 400
    finally:
        app.close()
    with Model(artifact.path, tune="off") as model, pytest.raises(InvalidRequestError, match="inputs 0 is none"):
        model.classify(["hello"])


def test_single_texts_are_judged_by_v1_classify(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    tokens = ("t", "he", "in")
    settings = {**ASKED, "score_tokens": tokens, "score_labels": ("safe", "unsafe", "unsure"), "max_seq_len": 48}
    artifact = build_artifact(folder, tmp_path / "artifact", **settings, verify=False)
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        body = json.dumps({"input": "hello"}).encode()
        (found,) = app.request("POST", "/v1/classify", body).json()["data"]
    finally:
        app.close()
    np.testing.assert_allclose(found["probs"], expected(folder, artifact, "Q: hello", tokens), atol=1e-4)
    assert found["label"] == ("safe", "unsafe", "unsure")[int(np.argmax(found["probs"]))]
    with Model(artifact.path, tune="off") as model, pytest.raises(InvalidRequestError, match="reads single texts"):
        model.classify([("a", "b")])


def test_tokens_with_one_name_need_labels(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    with pytest.raises(ConfigError, match="Labels must differ, and these are t, t, he"):
        build_artifact(folder, tmp_path / "artifact", score_tokens=("t", "t", "he"), **ASKED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_tokens": ("a", "b", "c")}, "score_tokens must be one or two tokens"),
        ({"task": "classify", "classify_body": "{text}"}, "classify_body is for language models"),
        ({**ASKED, "score_tokens": ("a",), "classify_body": "x"}, r"classify_body has no \{text\}"),
        ({"task": "classify", "score_tokens": ("a",), "classify_suffix": "x"}, "classify_suffix needs a classify_body"),
        ({"score_labels": ("a",)}, "score_labels names what score_tokens say"),
        (
            {"task": "classify", "score_tokens": ("a", "b"), "score_labels": ("a", "b")},
            "score_labels has 2 labels, and 2 score_tokens have 1",
        ),
        (
            {"task": "classify", "score_tokens": ("a", "b"), "rerank_body": "{query} {document}"},
            "rerank_body is for rerankers",
        ),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(model="m", target="cpu", **settings)
