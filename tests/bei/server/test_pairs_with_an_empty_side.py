"""A pair with an empty side has tokens: those of the other side, and the special ones. It is scored, on every route."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import LABELS, answer, expected_output, post

# A query and documents, each with an empty side, and one where both are.
PAIRS = [("cat", ["hello", ""]), ("", ["hello", "the cat"]), ("", ["", "hello"])]


class RerankRoute(NamedTuple):
    """A route, its body, the field of the answer that has results, and their score."""

    path: str
    body: Callable[[str, list[str]], dict[str, Any]]
    results: str | None
    score: str
    is_raw: bool = False


def of_texts(query: str, texts: list[str]) -> dict[str, Any]:
    return {"query": query, "texts": texts}


def of_documents(query: str, texts: list[str]) -> dict[str, Any]:
    return {"query": query, "documents": texts}


def of_objects(query: str, texts: list[str]) -> dict[str, Any]:
    return {"query": query, "documents": [{"text": text} for text in texts]}


def of_passages(query: str, texts: list[str]) -> dict[str, Any]:
    return {"query": {"text": query}, "passages": [{"text": text} for text in texts]}


def shortened(query: str, texts: list[str]) -> dict[str, Any]:
    return {**of_documents(query, texts), "max_tokens_per_doc": 7}


ROUTES = [
    RerankRoute("/rerank", of_texts, None, "score"),
    RerankRoute("/tei/rerank", of_texts, None, "score"),
    RerankRoute("/rerank", of_documents, "results", "relevance_score"),
    RerankRoute("/v1/rerank", of_objects, "results", "relevance_score"),
    RerankRoute("/v2/rerank", shortened, "results", "relevance_score"),
    RerankRoute("/cohere/v2/rerank", of_documents, "results", "relevance_score"),
    RerankRoute("/jina/v1/rerank", of_documents, "results", "relevance_score"),
    RerankRoute("/jina/v1/rerank", of_objects, "results", "relevance_score"),
    RerankRoute("/voyage/v1/rerank", of_documents, "data", "relevance_score"),
    RerankRoute("/infinity/rerank", of_documents, "results", "relevance_score"),
    RerankRoute("/vllm/v1/rerank", of_documents, "results", "relevance_score"),
    RerankRoute("/v1/ranking", of_passages, "rankings", "logit", True),
    RerankRoute("/nim/v1/ranking", of_passages, "rankings", "logit", True),
    RerankRoute("/score", lambda query, texts: {"text_1": query, "text_2": texts}, "data", "score"),
    RerankRoute("/vllm/score", lambda query, texts: {"queries": query, "documents": texts}, "data", "score"),
]


def logits(query: str, texts: list[str]) -> list[float]:
    return [float(expected_output("logits", (query, text), 1)[0]) for text in texts]


def sigmoid(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.path} {route.body.__name__}")
@pytest.mark.parametrize(("query", "texts"), PAIRS)
def test_every_rerank_route_scores_it(kinds: App, route: RerankRoute, query: str, texts: list[str]) -> None:
    found = answer(kinds, route.path, **route.body(query, texts), model="reranker")
    results = found if route.results is None else found[route.results]
    expected = [logit if route.is_raw else sigmoid(logit) for logit in logits(query, texts)]
    scores = {result["index"]: result[route.score] for result in results}
    assert [scores[index] for index in range(len(texts))] == pytest.approx(expected)


@pytest.mark.parametrize(("query", "text"), [("", "the cat " * 5_000), ("the cat " * 5_000, "")])
def test_the_other_side_may_be_long(kinds: App, query: str, text: str) -> None:
    (rank,) = answer(kinds, "/rerank", query=query, texts=[text], model="reranker")
    assert rank["score"] == pytest.approx(sigmoid(logits(query, [text])[0]))


@pytest.mark.parametrize("path", ["/predict", "/tei/predict", "/"])
@pytest.mark.parametrize("inputs", [["", "hello"], [["cat", ""], ["hello"], ["", ""]]])
def test_pairs_of_a_classifier(kinds: App, path: str, inputs: Any) -> None:
    found = answer(kinds, path, inputs=inputs, model="classifier")
    pairs, found = (inputs, found) if isinstance(inputs[0], list) else ([inputs], [found])
    for pair, labels in zip(pairs, found, strict=True):
        text = pair[0] if len(pair) == 1 else tuple(pair)
        expected = expected_output("logits", text, 3)
        assert labels[0]["label"] == LABELS[int(expected.argmax())]


def test_pairs_of_the_open_inference_protocol(kinds: App) -> None:
    data = ["cat", "", "", "hello"]
    tensor = {"name": "text", "shape": [2, 2], "datatype": "BYTES", "data": data}
    (scores,) = answer(kinds, "/oip/v2/models/reranker/infer", inputs=[tensor])["outputs"]
    assert scores["data"] == pytest.approx([sigmoid(logits("cat", [""])[0]), sigmoid(logits("", ["hello"])[0])])


def test_instances_of_vertex(kinds: App) -> None:
    instance = {"query": "", "texts": ["", "hello"]}
    (ranks,) = answer(kinds, "/vertex", instances=[instance], model="reranker")["predictions"]
    assert {rank["index"] for rank in ranks} == {0, 1}


REFUSED: Mapping[str, dict[str, Any]] = {
    "/predict": {"inputs": "", "model": "classifier"},
    "/predict ": {"inputs": [[""], ["a"]], "model": "classifier"},
    "/score": {"text_1": "", "text_2": ["a"], "model": "embedder"},
    "/score ": {"text_1": "a", "text_2": ["a", ""], "model": "embedder"},
    "/similarity": {"inputs": {"source_sentence": "", "sentences": ["a"]}, "model": "embedder"},
    "/classify": {"input": [""], "model": "classifier"},
}


@pytest.mark.parametrize("path", REFUSED)
def test_an_empty_text_by_itself_is_refused(kinds: App, path: str) -> None:
    check_error(post(kinds, path.strip(), **REFUSED[path]), 400, "empty text")


def test_a_pair_of_which_nothing_is_left_is_refused_by_the_encoder(kinds: App) -> None:
    body = {"query": "", "texts": [""], "model": "reranker", "add_special_tokens": False}
    response = kinds.request("POST", "/rerank", json.dumps(body).encode())
    check_error(response, 400, "An input has no tokens")
