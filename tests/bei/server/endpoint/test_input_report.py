"""What became of each input, for clients that ask: one that is wrong costs the others nothing."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bei.artifact.manifest import Artifact
from bei.core import Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.endpoint.test_route import GOOD, filled
from tests.bei.server.kinds import post
from tests.support.artifacts import LIMITS, save_artifact, token_ids

LONG = "cat " * 40  # 42 tokens, of which 16 are read
REPORTING = {
    *("/v1/embeddings", "/embeddings", "/embed", "/embed_all", "/embed_sparse", "/", "/invocations"),
    *("/v1/embed", "/v2/embed"),
}


def ask(app: App, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    content = json.dumps(body).encode()
    response: httpx.Response = app.run(app.client.post(path, content=content, headers={"x-bei-report": "1", **headers}))
    return response


def test_each_input_says_its_tokens_and_what_was_dropped(app: App) -> None:
    body = ask(app, "/v1/embeddings", {"input": ["cats", LONG, [2, 9, 3]]}).json()
    plain = {"truncated": False, "dropped_tokens": 0, "error": None}
    assert body["report"] == [
        {"index": 0, "tokens": len(token_ids("cats")), **plain},
        {"index": 1, "tokens": 16, "truncated": True, "dropped_tokens": 42 - 16, "error": None},
        {"index": 2, "tokens": 3, **plain},
    ]
    without = app.embed(input=["cats", LONG, [2, 9, 3]]).json()
    assert without == {name: value for name, value in body.items() if name != "report"}


@pytest.mark.parametrize("direction", ["left", "right"])
def test_dropped_tokens_are_counted_with_the_prompt_and_below_a_limit_of_the_request(
    tmp_path: Path, direction: str
) -> None:
    artifact = save_artifact(tmp_path / "prompted", prompts={"query": "query: "}, default_prompt_name="query")
    app = App((artifact, FakeEngine(LIMITS)))
    asked = {"input": ["cat " * 10], "truncate_prompt_tokens": 8, "truncation_direction": direction}
    (entry,) = ask(app, "/v1/embeddings", asked).json()["report"]
    assert (entry["tokens"], entry["dropped_tokens"]) == (8, 2 + 2 + 10 - 8)
    app.close()


def test_wrong_inputs_have_no_vector_and_cost_the_others_nothing(app: App) -> None:
    inputs = ["cats", "", LONG, [2, 500], [], "hello"]
    response = ask(app, "/v1/embeddings", {"input": inputs, "truncate": False})
    assert response.status_code == 200
    body = response.json()
    good = app.embed(input=["cats", "hello"]).json()
    vectors = [one["embedding"] for one in body["data"]]
    assert [vectors[0], vectors[5]] == [one["embedding"] for one in good["data"]]
    assert [vector is None for vector in vectors] == [False, True, True, True, True, False]
    assert [one["index"] for one in body["data"]] == list(range(6))
    assert body["usage"] == good["usage"]
    errors: list[str] = [(entry["error"] or {}).get("message", "") for entry in body["report"]]
    assert [bool(error) for error in errors] == [False, True, True, True, True, False]
    for index, part in {1: "is an empty text", 2: "allow truncation", 3: "must be from 0 to", 4: "is empty"}.items():
        assert part in errors[index]
    assert [entry["tokens"] for entry in body["report"]] == [
        len(token_ids("cats")),
        0,
        0,
        0,
        0,
        len(token_ids("hello")),
    ]


def test_where_all_inputs_are_wrong_the_answer_has_no_vectors(app: App) -> None:
    for inputs in (["", ""], [[500], [500]]):
        body = ask(app, "/v1/embeddings", {"input": inputs}).json()
        assert [one["embedding"] for one in body["data"]] == [None, None]
        assert all(entry["error"]["code"] == "invalid_request" for entry in body["report"])
        assert body["usage"] == {"prompt_tokens": 0, "total_tokens": 0}
    check_error(ask(app, "/v1/embeddings", {"input": []}), 400, "is an empty list")


class Picky(FakeEngine):
    """Fails on sequences that begin with token 7."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        found = super().run(batch, outputs)
        starts = batch.input_ids[batch.cu_seqlens[:-1]]
        return {name: np.where((starts == 7)[:, None], np.float32(np.nan), rows) for name, rows in found.items()}


def test_an_input_that_the_engine_fails_on_costs_the_others_nothing(make_app: MakeApp) -> None:
    app = make_app(Picky(LIMITS))
    body = ask(app, "/v1/embeddings", {"input": [[2, 9], [7, 1], [3]]}).json()
    assert [one["embedding"] is None for one in body["data"]] == [False, True, False]
    assert body["report"][1]["error"]["code"] == "non_finite_output"
    assert app.embed(input=[[2, 9], [7, 1], [3]]).status_code == 500


@pytest.mark.parametrize("path", sorted(GOOD))
def test_routes_that_embed_report_and_others_refuse_to(kinds: App, path: str) -> None:
    asked = {**filled(path, ["cat", "", "the cats"]), "model": GOOD[path][2]}
    response = ask(kinds, path, asked)
    if path not in REPORTING:
        check_error(response, 400, "x-bei-report is for routes that embed texts", param="x-bei-report")
        return
    found = response.json()
    assert [entry["error"] is None for entry in found["report"]] == [True, False, True]
    vectors: Any = found.get("embeddings") or found["data"]
    vectors = vectors["float"] if isinstance(vectors, dict) else vectors
    assert (vectors[1]["embedding"] if isinstance(vectors[1], dict) else vectors[1]) is None


def test_models_of_other_kinds_do_not_report(kinds: App) -> None:
    for model in ("reranker", "classifier"):
        inputs = {"query": "a", "texts": ["b"]} if model == "reranker" else {"inputs": ["a"]}
        check_error(ask(kinds, "/", {**inputs, "model": model}), 400, param="x-bei-report")


def test_vectors_of_tokens_are_reported_in_their_side_s_limits(kinds: App) -> None:
    inputs = ["cat", "", "cat cat the the world", "!"]
    asked = {"inputs": inputs, "model": "colbert", "input_type": "document"}
    found = ask(kinds, "/embed_all", asked).json()
    good = post(kinds, "/embed_all", **{**asked, "inputs": [text for text in inputs if text]}).json()
    assert found["embeddings"] == [good[0], None, *good[1:]]
    entries = [(one["tokens"], one["truncated"], one["dropped_tokens"]) for one in found["report"]]
    assert entries == [(3, False, 0), (0, False, 0), (5, True, 2), (3, False, 0)]  # a document has five
    assert found["report"][1]["error"]["param"] == "inputs"
    assert ask(kinds, "/embed_all", {**asked, "inputs": [""]}).json()["embeddings"] == [None]


@pytest.mark.parametrize("model", ["splade", "colbert"])
def test_the_root_reports_of_every_kind_that_embeds(kinds: App, model: str) -> None:
    found = ask(kinds, "/", {"inputs": ["cat", ""], "model": model}).json()
    path = "/embed_sparse" if model == "splade" else "/embed_all"
    assert found["embeddings"] == [post(kinds, path, inputs="cat", model=model).json()[0], None]


def test_a_report_and_bytes_alone_contradict_each_other(app: App) -> None:
    asked = {"input": ["cats"]}
    check_error(ask(app, "/v1/embeddings", asked, accept="application/octet-stream"), 406)
    found = ask(app, "/v1/embeddings", asked, accept="application/octet-stream, application/json;q=0.5").json()
    assert len(found["report"]) == 1


def test_what_is_no_input_s_own_fault_fails_the_request(artifact: Artifact) -> None:
    app = App((artifact, FakeEngine(LIMITS)), max_queue_tokens=40)
    check_error(ask(app, "/v1/embeddings", {"input": ["cats"] * 30}), 400, "split it into smaller ones")
    app.models.begin_drain()
    check_error(ask(app, "/v1/embeddings", {"input": ["cats"]}), 503)
    app.close()
