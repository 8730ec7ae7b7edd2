"""``score_mode``, ``score_weights`` and ``label`` on the routes that score pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bei.core import Float32Array
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import LABELS, MARK, TOKEN_DIMENSION, answer, expected_output, fake_output, post, softmax
from tests.support.artifacts import tiny_tokenizer

QUERY, TEXTS = "the cats", ["hello world", "the cat", "world"]
RERANK, SCORE = ("/rerank", "/v1/rerank", "/v2/rerank"), ("/score", "/v1/score", "/vllm/v1/score")


def found(app: App, path: str, **fields: Any) -> list[float]:
    """The scores of TEXTS, in their order."""
    if path in SCORE:
        return [one["score"] for one in answer(app, path, text_1=QUERY, text_2=TEXTS, **fields)["data"]]
    results = answer(app, path, query=QUERY, documents=TEXTS, **fields)["results"]
    return [one["relevance_score"] for one in sorted(results, key=lambda one: int(one["index"]))]


def late_interaction() -> list[float]:
    """ColBERT's sum, of the engine's rows and the roles of ``kinds.ROLES``."""

    def unit(ids: list[int]) -> Float32Array:
        rows = fake_output("token_embedding", np.array(ids, np.int32), np.zeros(len(ids), np.int32), TOKEN_DIMENSION)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)

    query = tiny_tokenizer().encode(f"query: {QUERY}").ids
    query = query if len(query) <= 10 else [*query[:9], query[-1]]
    query = [*query, *[MARK] * (8 - len(query))]
    scores = []
    for text in TEXTS:
        ids = tiny_tokenizer().encode(text).ids
        ids = ids if len(ids) <= 5 else [*ids[:4], ids[-1]]
        scores.append(float((unit(query) @ unit([one for one in ids if one != MARK]).T).max(axis=1).sum()))
    return scores


@pytest.mark.parametrize("path", [*RERANK, *SCORE])
def test_token_vectors_are_compared_as_colbert_does(path: str, kinds: App) -> None:
    for fields in ({"score_mode": "multi_vector"}, {}):
        np.testing.assert_allclose(found(kinds, path, model="colbert", **fields), late_interaction(), rtol=1e-5)


@pytest.mark.parametrize("path", [*RERANK, *SCORE])
def test_sparse_vectors_have_their_inner_product(path: str, kinds: App) -> None:
    width = 64
    rows = [np.maximum(expected_output("sparse", text, width), 0) for text in (QUERY, *TEXTS)]
    expected = [float(rows[0] @ row) for row in rows[1:]]
    np.testing.assert_allclose(found(kinds, path, model="splade", score_mode="sparse"), expected, rtol=1e-5)


@pytest.mark.parametrize("path", RERANK)
def test_dense_scores_are_those_of_score(path: str, kinds: App) -> None:
    expected = found(kinds, "/score", model="embedder")
    assert found(kinds, "/score", model="embedder", score_mode="dense") == expected
    np.testing.assert_allclose(found(kinds, path, score_mode="dense"), expected, rtol=1e-6)


@pytest.mark.parametrize("path", [*RERANK, *SCORE])
@pytest.mark.parametrize("label", LABELS)
def test_a_label_of_a_classifier_is_the_score(label: str, path: str, kinds: App) -> None:
    rows = np.stack([expected_output("logits", (QUERY, text), len(LABELS)) for text in TEXTS])
    column = LABELS.index(label)
    np.testing.assert_allclose(found(kinds, path, model="classifier", label=label), softmax(rows)[:, column], rtol=1e-6)
    raw = {"use_activation": False}
    np.testing.assert_allclose(found(kinds, path, model="classifier", label=label, **raw), rows[:, column], rtol=1e-6)


@pytest.mark.parametrize("path", [*RERANK, *SCORE])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "classifier", "label": "mad"}, "label"),
        ({"model": "embedder", "score_mode": "dense", "label": "sad"}, "label"),
        ({"model": "embedder", "score_mode": "hybrid"}, "score_mode"),
        ({"model": "embedder", "score_mode": "dense", "score_weights": {"dense": 1}}, "score_weights"),
        ({"model": "reranker", "score_weights": {"dense": 1}}, "score_weights"),
        ({"model": "reranker", "score_mode": "dense"}, "model"),
        ({"model": "embedder", "score_mode": "sparse"}, "model"),
        ({"model": "embedder", "score_mode": "late"}, "score_mode"),
        ({"model": "embedder", "score_mode": "dense", "use_activation": False}, "is of a reranker"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields: dict[str, Any], param: str, path: str, kinds: App) -> None:
    asked = {"text_1": QUERY, "text_2": TEXTS} if path in SCORE else {"query": QUERY, "documents": TEXTS}
    response = post(kinds, path, **asked, **fields)
    assert response.status_code in (400, 422), response.text
    assert param in response.text


@pytest.mark.parametrize("path", SCORE)
def test_a_weight_that_stands_twice_is_refused(path: str, kinds: App) -> None:
    body = '{"text_1": "a", "text_2": "b", "score_mode": "hybrid", "score_weights": {"dense": 1, "dense": 2}}'
    response = kinds.request("POST", path, body.encode())
    assert response.status_code == 400
    assert "twice: send each once" in response.text


def test_a_model_for_late_interaction_takes_nothing_of_a_reranker(kinds: App) -> None:
    for field, value in (("instruction", "find"), ("raw_scores", True), ("label", "sad")):
        asked = {"query": QUERY, "documents": TEXTS, "model": "colbert", field: value}
        check_error(post(kinds, "/rerank", **asked), 400, param="model" if field == "label" else field)


@pytest.mark.parametrize("path", [*RERANK, *SCORE])
def test_maxsim_of_raw_vectors_is_refused_by_the_field_that_asks_for_it(path: str, kinds: App) -> None:
    """``/score`` answered with cosines, and ``/rerank`` named a field that was not sent."""
    asked = {"text_1": QUERY, "text_2": TEXTS} if path in SCORE else {"query": QUERY, "documents": TEXTS}
    response = post(kinds, path, **asked, model="colbert", use_activation=False)
    assert response.status_code == 400
    assert "compares vectors, use_activation is of a reranker" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "use_activation"


def test_an_image_is_refused_where_pairs_are_read_together_or_no_tower_reads_it(kinds: App) -> None:
    picture = {"image": "data:image/png;base64,AAAA"}
    for fields in ({"model": "reranker"}, {"model": "embedder", "score_mode": "dense"}, {"model": "colbert"}):
        for path in RERANK:
            check_error(post(kinds, path, query=QUERY, documents=["a", picture], **fields), 400, param="documents")
        check_error(post(kinds, "/rerank", query=picture, documents=["a"], **fields), 400, param="query")
    check_error(post(kinds, "/rerank", query=QUERY, documents=[{"url": "a", "title": "b"}]), 400, param="documents")


def test_an_empty_text_is_refused_where_texts_are_read_apart(kinds: App) -> None:
    asked = {"query": "", "documents": TEXTS, "score_mode": "dense"}
    check_error(post(kinds, "/rerank", **asked), 400, param="query")
    asked = {"query": QUERY, "texts": ["a", ""], "score_mode": "dense"}
    check_error(post(kinds, "/rerank", **asked), 400, param="texts")
