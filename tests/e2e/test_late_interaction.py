"""A late interaction model, from PyLate's files to HTTP: vectors of queries and documents are those of its own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.process import DEADLINE_S, Server, serve
from tests.support.builds import build_artifact
from tests.support.late_interaction import Settings, encode, save_colbert

SETTINGS = Settings()
QUERIES = ["the cat", "where is the mat? " * 9, "hello"]
DOCUMENTS = ["The cat sat on the mat.", "hello, world! " * 20, "-", "a b (c) d: e, f; g."]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_colbert(tmp_path_factory.mktemp("checkpoints") / "colbert", SETTINGS)


@pytest.fixture(scope="module")
def colbert(
    checkpoint: Path, env: Mapping[str, str], home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    artifact = build_artifact(checkpoint, tmp_path_factory.mktemp("artifacts") / "colbert")
    with serve([artifact.path], env, home) as server:
        yield server


def post(server: Server, path: str, **body: object) -> httpx.Response:
    response = httpx.post(server.url + path, json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response


def test_both_sides_have_the_vectors_of_its_own_code_all_at_once_and_one_by_one(
    colbert: Server, checkpoint: Path
) -> None:
    requests = [(side, texts) for side, texts in (("query", QUERIES), ("document", DOCUMENTS)) for _ in range(8)]
    requests += [("query", [text]) for text in QUERIES] + [("document", [text]) for text in DOCUMENTS]
    expected = {
        text: rows
        for side, texts in (("query", QUERIES), ("document", DOCUMENTS))
        for text, rows in zip(texts, encode(checkpoint, texts, SETTINGS, is_query=side == "query"), strict=True)
    }
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda r: post(colbert, "/embed_all", inputs=r[1], input_type=r[0]).json(), requests))
    for (_, texts), answer in zip(requests, found, strict=True):
        for text, rows in zip(texts, answer, strict=True):
            np.testing.assert_allclose(np.array(rows), expected[text], atol=2e-4, rtol=0)


def test_what_is_cut_is_named_and_tokens_are_shown_as_they_are_read(colbert: Server) -> None:
    response = post(colbert, "/embed_all", inputs=QUERIES, input_type="query")
    assert response.headers["x-truncated-inputs"] == "1"
    (tokens,) = post(colbert, "/tokenize", inputs=QUERIES[:1], prompt_name="query").json()
    names = [token["text"] for token in tokens]
    assert names[:6] == ["[CLS]", "[unused0]", "the", "cat", "[SEP]", "[MASK]"]
    assert len(names) == SETTINGS.query_length
