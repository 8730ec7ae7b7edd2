"""TEI's headers about time, and Vertex AI's envelope. The bodies of its other routes are in ``tei.json``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.engine.fake import FakeEngine
from bei.errors import EngineError
from bei.metrics.request_timing import Timing
from bei.server.dialects.tei import timing_headers
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import answer, post, save_kind
from tests.support.artifacts import LIMITS, expected_vectors, token_ids
from tests.support.engines import GatedEngine

HEADERS = [
    *("x-compute-type", "x-compute-time", "x-compute-characters", "x-compute-tokens"),
    *("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"),
]
# Path -> body, model, characters and texts whose tokens are counted.
TIMED: dict[str, tuple[dict[str, Any], str, int, list[str | tuple[str, str]]]] = {
    "/embed": ({"inputs": ["cat", "é😀"]}, "embedder", 5, ["cat", "é😀"]),
    "/embed_all": ({"inputs": "cat"}, "colbert", 3, ["cat"]),
    "/embed_sparse": ({"inputs": "cat"}, "splade", 3, ["cat"]),
    "/similarity": ({"inputs": {"source_sentence": "a", "sentences": ["cat"]}}, "embedder", 4, ["a", "cat"]),
    "/predict": ({"inputs": [["cat"], ["a", "b"]]}, "classifier", 5, ["cat", ("a", "b")]),
    "/rerank": ({"query": "the", "texts": ["a", "cat"]}, "reranker", 10, [("the", "a"), ("the", "cat")]),
    "/": ({"inputs": "cat"}, "embedder", 3, ["cat"]),
    "/invocations": ({"query": "the", "texts": ["a"]}, "reranker", 4, [("the", "a")]),
}
OPENAI = {"/v1/embeddings": {"input": "cat"}, "/embeddings": {"input": "cat"}}
UNTIMED: dict[str, dict[str, Any]] = {
    "/tokenize": {"inputs": "cat"},
    "/decode": {"ids": [5]},
    "/vertex": {"instances": [{"inputs": "cat"}]},
}


def num_tokens(text: str | tuple[str, str]) -> int:
    """A pair has three special tokens, a text two."""
    if isinstance(text, str):
        return len(token_ids(text))
    return sum(len(token_ids(part)) - 2 for part in text) + 3


@pytest.mark.parametrize("path", sorted(TIMED))
@pytest.mark.parametrize("mount", ["", "/tei"])
def test_an_inference_route_says_what_it_took(kinds: App, mount: str, path: str) -> None:
    body, model, characters, texts = TIMED[path]
    response = post(kinds, mount + path, **body, model=model)
    assert response.status_code == 200, response.text
    assert [name for name in response.headers if name in HEADERS] == HEADERS
    assert response.headers["x-compute-type"] == "cpu+optimized"
    numbers = {name: int(response.headers[name]) for name in HEADERS[1:]}
    assert numbers["x-compute-characters"] == characters
    assert numbers["x-compute-tokens"] == sum(map(num_tokens, texts))
    assert numbers["x-compute-time"] == numbers["x-total-time"]
    parts = sum(numbers[f"x-{part}-time"] for part in ("tokenization", "queue", "inference"))
    assert 0 <= parts <= numbers["x-total-time"]


def test_openai_s_route_is_timed_where_it_is_tei_s(kinds: App) -> None:
    for path, body in OPENAI.items():
        assert set(HEADERS) <= set(post(kinds, f"/tei{path}", **body, model="embedder").headers)
        assert not set(HEADERS) & set(post(kinds, path, **body, model="embedder").headers)


@pytest.mark.parametrize("mount", ["", "/tei"])
def test_what_tei_does_not_time_and_errors_have_no_such_headers(kinds: App, mount: str) -> None:
    for path, body in UNTIMED.items():
        response = post(kinds, mount + path, **body, model="embedder")
        assert response.status_code == 200
        assert not set(HEADERS) & set(response.headers)
    refused = post(kinds, f"{mount}/embed", inputs="", model="embedder")
    assert refused.status_code == 400
    assert not set(HEADERS) & set(refused.headers)


def test_the_times_are_milliseconds_of_the_step_and_of_the_wait_for_it(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine)

    async def ask(text: str) -> Any:
        return await app.client.post("/embed", content=json.dumps({"inputs": text}).encode())

    async def both() -> tuple[Any, Any]:
        moments_s.append(time.monotonic())
        running = asyncio.ensure_future(ask("cat"))
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        moments_s.append(time.monotonic())
        waiting = asyncio.ensure_future(ask("hello"))
        (service,) = app.models
        while service.num_waiting < 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        moments_s.append(time.monotonic())
        engine.open()
        return await running, await waiting

    moments_s: list[float] = []
    running, waiting = app.run(both())
    asked_s, entered_s, opened_s = moments_s
    assert 50 <= int(running.headers["x-inference-time"]) <= int(running.headers["x-total-time"])
    assert 50 <= int(waiting.headers["x-queue-time"]) <= int(waiting.headers["x-total-time"])
    assert int(running.headers["x-queue-time"]) <= 1000 * (entered_s - asked_s)
    assert int(waiting.headers["x-inference-time"]) <= 1000 * (time.monotonic() - opened_s)


@pytest.mark.parametrize(("target", "kind"), [("cpu", "cpu+optimized"), ("tensorrt", "gpu+optimized")])
def test_the_type_is_that_of_the_engine(target: str, kind: str) -> None:
    timing = Timing()
    timing.admitted(["cat"], target, timing.begun_s)
    times = timing.of_call(1, timing.begun_s)
    times.answered(0, None)
    assert timing_headers(timing)["x-compute-type"] == kind


@pytest.mark.parametrize("path", ["/api-doc/openapi.json", "/tei/api-doc/openapi.json"])
def test_the_api_is_described_on_tei_s_path(kinds: App, path: str) -> None:
    assert kinds.get(path).json() == kinds.get("/openapi.json").json()


# /vertex


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[Any]:
    made: list[App] = []

    def make(kind: str, **settings: Any) -> App:
        made.append(App(save_kind(tmp_path / f"{kind}{len(made)}", kind), **settings))
        return made[-1]

    yield make
    for app in made:
        app.close()


@pytest.mark.parametrize("mount", ["", "/tei"])
@pytest.mark.parametrize(
    ("kind", "path", "bodies"),
    [
        ("embedder", "/embed", [{"inputs": "cat"}, {"inputs": ["a", [5, 6]], "normalize": False}, {"inputs": "a"}]),
        ("splade", "/embed_sparse", [{"inputs": ["cat", "a"]}, {"inputs": "hello", "top_k": 2}]),
        ("classifier", "/predict", [{"inputs": "cat"}, {"inputs": [["a", "b"], ["c"]], "raw_scores": True}]),
        ("reranker", "/rerank", [{"query": "cat", "texts": ["a", "the"]}, {"query": "a", "texts": ["b"]}]),
        ("reranker", "/predict", [{"inputs": ["a", "b"]}]),
    ],
)
def test_each_instance_is_answered_as_by_the_route_of_its_kind(
    apps: Any, mount: str, kind: str, path: str, bodies: list[dict[str, Any]]
) -> None:
    app = apps(kind)
    found = answer(app, f"{mount}/vertex", instances=bodies)
    assert found == {"predictions": [answer(app, path, **body) for body in bodies]}


def test_instances_are_run_in_one_batch_and_their_model_may_be_named_once(kinds: App) -> None:
    found = answer(kinds, "/vertex", instances=[{"inputs": "cat"}, {"inputs": "world"}], model="embedder")
    vectors = expected_vectors([token_ids("cat"), token_ids("world")])
    np.testing.assert_allclose(found["predictions"], vectors[:, None], rtol=1e-6)
    several = [{"inputs": "cat", "model": "embedder"}, {"inputs": "cat", "model": "splade"}]
    check_error(post(kinds, "/vertex", instances=several), 400, "send a request for each", param="instances")


def test_cut_instances_are_named(apps: Any) -> None:
    app = apps("embedder")
    response = post(app, "/vertex", instances=[{"inputs": "a"}, {"inputs": ["a", "b " * 40]}, {"inputs": "b " * 40}])
    assert response.headers["x-truncated-inputs"] == "1-2"


@pytest.mark.parametrize("instances", [["cat"], [{"inputs": 1}], [{"inputs": "a"}, {}], [{"query": "a"}], [None]])
def test_an_instance_of_a_wrong_form_is_refused(apps: Any, instances: list[Any]) -> None:
    app = apps("embedder")
    check_error(post(app, "/vertex", instances=instances), 400, code="invalid_request")
    assert app.models.named(None).num_open == 0


@pytest.mark.parametrize("kind", ["ner", "colbert"])
def test_kinds_that_tei_does_not_know_there_are_refused(apps: Any, kind: str) -> None:
    check_error(post(apps(kind), "/vertex", instances=[{"inputs": "a"}]), 400, "must ask for", param="instances")


def test_inputs_of_all_instances_count(apps: Any) -> None:
    app = apps("embedder", max_client_batch_size=4)
    assert post(app, "/vertex", instances=[{"inputs": ["a", "b"]}] * 2).status_code == 200
    check_error(post(app, "/vertex", instances=[{"inputs": ["a", "b"]}] * 3), 400, "has 6 inputs, the limit is 4")


def test_instances_are_admitted_together_or_refused_for_good(apps: Any) -> None:
    """One by one each of them would be let in, and the last be told to come back, every time."""
    app = apps("embedder", max_queue_tokens=16)
    assert post(app, "/vertex", instances=[{"inputs": "a"}] * 5).status_code == 200
    check_error(post(app, "/vertex", instances=[{"inputs": "a"}] * 6), 400, "the limit is 16: split it")
    assert app.models.named(None).num_open == 0


def test_an_answer_beyond_the_limit_is_refused_before_anything_is_run(apps: Any) -> None:
    app = apps("embedder", answer_limit=600, answer_memory=600)
    check_error(post(app, "/vertex", instances=[{"inputs": "a"}] * 8), 413, code="answer_too_large")
    assert app.models.named(None).num_open == 0


def test_an_instance_that_fails_fails_the_request_and_gives_everything_back(apps: Any) -> None:
    app = apps("embedder")
    (service,) = app.models
    infer, calls = service.infer, []

    async def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise EngineError("failed")
        return await infer(*args, **options)

    service.infer = failing
    check_error(post(app, "/vertex", instances=[{"inputs": "a"}, {"inputs": "b"}]), 500, code="engine_failed")
    assert len(calls) == 2
    assert service.num_open == 0


def test_special_tokens_have_no_place_which_is_null(kinds: App) -> None:
    for path in ("/tokenize", "/tei/tokenize"):
        ((first, *_),) = answer(kinds, path, inputs="cat", model="embedder")
        assert first == {"id": first["id"], "text": first["text"], "special": True, "start": None, "stop": None}


def test_ids_that_are_no_tokens_are_left_out_of_a_text_as_there(kinds: App) -> None:
    (cat,) = token_ids("cat")[1:-1]
    known = post(kinds, "/tei/decode", ids=[[cat, 10**6], [2**32 - 1]], model="embedder")
    assert (known.status_code, known.json()) == (
        200,
        [answer(kinds, "/tei/decode", ids=[cat], model="embedder")[0], ""],
    )
    assert known.headers["x-bei-warning"] == "ids 0: this model's tokenizer has no token 1000000, which was left out"
    check_error(post(kinds, "/decode", ids=[10**6], model="embedder"), 400, "has no token 1000000", param="ids")


@pytest.mark.parametrize(("path", "model"), [("/embed_all", "colbert"), ("/embed_sparse", "splade")])
@pytest.mark.parametrize("mount", ["", "/tei"])
def test_token_ids_are_read_as_they_are(kinds: App, mount: str, path: str, model: str) -> None:
    ids = token_ids("the cat")
    (by_text,) = answer(kinds, mount + path, inputs="the cat", model=model)
    assert answer(kinds, mount + path, inputs=ids, model=model) == [by_text]
    assert answer(kinds, mount + path, inputs=["the cat", ids], model=model) == [by_text] * 2
    assert answer(kinds, "/", inputs=[ids], model=model) == [by_text]
    mixed = post(kinds, mount + path, inputs=["cat", 5], model=model)
    assert (mixed.status_code, "mixes token ids" in mixed.text) == (422 if mount else 400, True)


def test_vertex_reads_token_ids_of_sparse_vectors(kinds: App) -> None:
    ids = token_ids("the cat")
    body = {"instances": [{"inputs": ids}, {"inputs": "the cat"}], "model": "splade"}
    first, second = answer(kinds, "/vertex", **body)["predictions"]
    assert first == second


def test_its_page_of_the_api_is_ours(app: App, make_app: MakeApp) -> None:
    for served in (app, make_app(FakeEngine(LIMITS), dialect="tei")):
        page = served.get("/tei/docs")
        assert (page.status_code, page.content) == (200, app.get("/docs").content)
        assert served.get("/tei/docs/docs.js").content == app.get("/docs/docs.js").content
        assert served.get("/docs").status_code == 200
