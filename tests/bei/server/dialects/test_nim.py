"""Which model ranks on NIM's hosted path: it may stand in the path and in the body."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bei.server.app import App
from tests.bei.server.kinds import answer, post, save_kind

BODY: dict[str, Any] = {"query": {"text": "cat"}, "passages": [{"text": "world"}]}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder: Path = tmp_path_factory.mktemp("rerankers")
    app = App(*(save_kind(folder / name, "reranker", name=name) for name in ("one", "nvidia/other")), alias=["1=one"])
    yield app
    app.close()


@pytest.mark.parametrize("name", ["one", "nvidia/other", "1"])
def test_without_a_model_in_the_body_that_of_the_path_ranks(name: str, app: App) -> None:
    """With several rerankers such a request was refused, and with one the path was ignored."""
    found = answer(app, f"/nim/v1/retrieval/{name}/reranking", **BODY)
    assert found == answer(app, "/nim/v1/ranking", model=name, **BODY)


def test_a_model_that_there_is_not_is_not_found(app: App) -> None:
    response = post(app, "/nim/v1/retrieval/nvidia/reranking", **BODY)
    assert response.status_code == 404
    assert "nvidia" in response.json()["message"]


@pytest.mark.parametrize("path", ["nvidia", "nvidia/other_1", "one", "1"])
def test_the_model_in_the_body_counts_where_the_path_names_no_other(path: str, app: App) -> None:
    """NVIDIA's own paths are not its models' names: llama-3_2 for llama-3.2, or the publisher alone."""
    answer(app, f"/nim/v1/retrieval/{path}/reranking", model="one", **BODY)


@pytest.mark.parametrize(("path", "model"), [("one", "nvidia/other"), ("nvidia/other", "1")])
def test_two_that_differ_are_refused(path: str, model: str, app: App) -> None:
    response = post(app, f"/nim/v1/retrieval/{path}/reranking", model=model, **BODY)
    assert response.status_code == 400
    assert f"the path {path} and model {model} contradict each other" in response.json()["message"]
