"""A sparse retriever whose queries are looked up, from its files to HTTP and ``bei.Model``: vectors of queries and
documents are those of its own code, whichever way a request says its side, and in every front end's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bei import Model
from bei.core import Float32Array
from bei.errors import InvalidRequestError
from tests.e2e.process import DEADLINE_S, Server, serve
from tests.support.builds import build_artifact
from tests.support.checkpoints import MAX_TOKENS
from tests.support.inference_free import encode_documents, encode_queries, save_inference_free

QUERIES = ["the cat sat on the mat!", "Hello, the the THE world", "[MASK] a", "on " * 60]
DOCUMENTS = ["The cat sat on the mat.", "hello, world! " * 20, "-"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_inference_free(tmp_path_factory.mktemp("checkpoints") / "free")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Float32Array]:
    """By side, what its own code answers."""
    return {"query": encode_queries(checkpoint, QUERIES), "document": encode_documents(checkpoint, DOCUMENTS)}


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifacts") / "free").path


@pytest.fixture(scope="module")
def served(artifact: Path, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    with serve([artifact, "--http-workers", "2"], env, home) as server:
        yield server


def post(server: Server, path: str, **body: object) -> httpx.Response:
    response = httpx.post(server.url + path, json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response


def rows(weights: list[list[dict[str, Any]]], width: int) -> Float32Array:
    """Of /embed_sparse's answer."""
    found = np.zeros((len(weights), width), np.float32)
    for row, entries in zip(found, weights, strict=True):
        row[[entry["index"] for entry in entries]] = [entry["value"] for entry in entries]
    return found


SAID: list[tuple[dict[str, str], str]] = [
    ({"input_type": "query"}, "query"),
    ({"input_type": "search_query"}, "query"),
    ({"prompt_name": "query"}, "query"),
    ({"input_type": "document"}, "document"),
    ({"input_type": "passage"}, "document"),
    ({"prompt_name": "document"}, "document"),
    ({}, "document"),  # as the Router's default route says
]


@pytest.mark.parametrize(("said", "side"), SAID)
def test_each_side_has_the_vectors_of_its_own_code(
    said: dict[str, str], side: str, served: Server, expected: dict[str, Float32Array]
) -> None:
    texts = QUERIES if side == "query" else DOCUMENTS
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: post(served, "/embed_sparse", inputs=texts, **said), range(4)))
    answers.append(post(served, "/embed_sparse", inputs=texts[0], **said))
    for answer in answers:
        found = rows(answer.json(), expected[side].shape[1])
        tolerance = 0 if side == "query" else 2e-4
        np.testing.assert_allclose(found, expected[side][: len(found)], atol=tolerance, rtol=0)
    warned = "took the texts for the side document" in answers[0].headers.get("x-bei-warning", "")
    assert warned is (not said)


def test_other_routes_answer_queries_from_the_table_too(served: Server, expected: dict[str, Float32Array]) -> None:
    data = post(served, "/v1/embeddings", input=QUERIES, output_dtype="sparse", input_type="query").json()["data"]
    for one, row in zip(data, expected["query"], strict=True):
        assert one["embedding"]["indices"] == np.flatnonzero(row).tolist()
        np.testing.assert_array_equal(np.array(one["embedding"]["values"], np.float32), row[row != 0])
    (whole,) = post(served, "/vertex", instances=[{"inputs": QUERIES, "input_type": "query"}]).json()["predictions"]
    np.testing.assert_array_equal(rows(whole, expected["query"].shape[1]), expected["query"])


def test_what_is_cut_is_named_and_tokens_are_shown_as_they_are_read(served: Server) -> None:
    response = post(served, "/embed_sparse", inputs=QUERIES, input_type="query")
    assert response.headers["x-truncated-inputs"] == "3"
    (tokens,) = post(served, "/tokenize", inputs=["the cat"], input_type="query").json()
    assert [token["text"] for token in tokens] == ["the", "cat"]  # nothing around them
    report = httpx.post(
        f"{served.url}/embed_sparse",
        json={"inputs": ["the cat", "", "on " * 60], "input_type": "query"},
        headers={"X-Bei-Report": "true"},
        timeout=DEADLINE_S,
    ).json()
    assert [len(vector) if vector else vector for vector in report["embeddings"]] == [2, None, 1]
    assert [entry.get("truncated") for entry in report["report"]][2] is True
    assert MAX_TOKENS < 60


def test_a_side_that_is_no_side_is_refused(served: Server) -> None:
    body = {"inputs": ["a"], "input_type": "classification"}
    response = httpx.post(f"{served.url}/embed_sparse", json=body, timeout=DEADLINE_S)
    assert response.status_code == 400
    assert "has no prompt for 'classification'. Its prompts: query, document." in response.text


def test_a_model_in_its_own_process_does_the_same(artifact: Path, expected: dict[str, Float32Array]) -> None:
    with Model(artifact) as model:
        found = model.embed_sparse(QUERIES, input_type="query")
        with pytest.warns(UserWarning, match="took the texts for the side document"):
            documents = model.embed_sparse(DOCUMENTS)
        with pytest.raises(InvalidRequestError, match="has no prompt for 'image'"):
            model.embed_sparse(DOCUMENTS, input_type="image")
    for vector, row in zip(found, expected["query"], strict=True):
        np.testing.assert_array_equal(vector.indices, np.flatnonzero(row))
        np.testing.assert_array_equal(vector.values, row[row != 0])
    for vector, row in zip(documents, expected["document"], strict=True):
        np.testing.assert_allclose(vector.values, row[vector.indices], atol=2e-4)
