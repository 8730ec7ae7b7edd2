"""Which dialect a request is in, and what of a request a dialect must not let through."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bei import __version__
from bei.artifact.manifest import Artifact
from bei.config.settings import DIALECTS
from bei.engine.fake import FakeEngine
from bei.server.dialects import tei
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import post
from tests.support.artifacts import LIMITS, token_ids
from tests.support.engines import GatedEngine


def send(app: App, method: str, path: str, body: Any = None, dialect: str | None = None) -> Any:
    """A request that names its dialect in the header."""
    headers = {} if dialect is None else {"X-Bei-Dialect": dialect}
    content = None if body is None else json.dumps(body).encode()
    return app.run(app.client.request(method, path, content=content, headers=headers))


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "bei"])
def test_what_a_dialect_does_not_have_is_ours_with_our_errors(app: App, name: str) -> None:
    assert send(app, "GET", "/metrics", dialect=name).status_code == 200
    assert send(app, "HEAD", "/health", dialect=name).status_code == 200
    check_error(send(app, "POST", "/predict_tokens", {"inputs": 1}, name), 400, code="invalid_request")
    check_error(send(app, "GET", "/nothing", dialect=name), 404, code="route_not_found")


def test_a_server_may_speak_a_dialect_to_whoever_does_not_say(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), dialect="tei")
    assert send(app, "POST", "/embed", {"inputs": ""}).json()["error_type"] == "Empty"
    assert send(app, "GET", "/health").content == b""
    assert send(app, "HEAD", "/health").status_code == 200
    check_error(send(app, "POST", "/embed", {"inputs": ""}, "bei"), 400, code="invalid_request")
    assert send(app, "POST", "/voyage/embeddings", {"input": []}).json() == {
        "detail": "input is an empty list: send at least one input."
    }


@pytest.mark.parametrize("path", ["/tei//embed", "/TEI/embed", "/tei/%2e%2e/embed", "/teiembed"])
def test_a_path_that_only_looks_like_a_mount_point_s_has_no_route(app: App, path: str) -> None:
    assert send(app, "POST", path, {"inputs": "cat"}).status_code == 404


@pytest.mark.parametrize("name", ["a\r\nset-cookie: p=1", "x" * 90_000, "\x00\x7f☃"])
def test_a_warning_is_a_short_line_whatever_the_client_called_the_model(app: App, name: str) -> None:
    response = post(app, "/tei/embed", inputs="cat", model=name)
    assert response.status_code == 200
    warning = response.headers["x-bei-warning"]
    assert warning.isascii()
    assert warning.isprintable()
    assert len(warning) < 1_000
    assert "set-cookie" not in response.headers


def test_a_model_that_is_not_ready_is_unavailable_in_every_dialect(kinds: App) -> None:
    # The reranker of these is not ready.
    for path in ("/tei/health", "/tei/ping", "/nim/v1/health/ready", "/oip/v2/health/ready"):
        assert kinds.get(path).status_code == 503
        assert kinds.request("HEAD", path).status_code == 503


def test_every_model_that_answers_is_ready_in_every_dialect(app: App) -> None:
    for path in (
        "/tei/health",
        "/tei/ping",
        "/tei/",
        "/nim/v1/health/ready",
        "/nim/v1/health/live",
        "/infinity/health",
        "/vllm/health",
        "/vllm/ping",
    ):
        assert app.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/vllm/health", "/vllm/ping", "/nim/v1/health/live", "/infinity/health"])
def test_a_dead_model_is_unavailable_in_every_dialect(make_app: MakeApp, path: str) -> None:
    app = make_app(FakeEngine(LIMITS))
    assert app.get(path).status_code == 200
    (service,) = app.models
    service.close()
    assert app.get(path).status_code == 503
    assert app.request("HEAD", path).status_code == 503


@pytest.mark.parametrize("path", ["/tei/metrics", "/nim/v1/metrics", "/infinity/metrics", "/vllm/metrics"])
def test_this_server_s_metrics_are_on_the_peers_paths(app: App, path: str) -> None:
    response = app.get(path)
    assert response.headers["content-type"] == app.get("/metrics").headers["content-type"]
    assert "# TYPE bei_requests_total counter" in response.text


def test_versions_are_this_server_s(app: App) -> None:
    assert app.get("/vllm/version").json() == {"version": __version__}
    assert app.get("/nim/v1/version").json() == {"release": __version__, "api": "1"}


def test_vllm_s_load_is_the_number_of_requests_that_are_not_answered(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine)

    async def loads() -> list[int]:
        async def load() -> int:
            number: int = (await app.client.get("/vllm/load")).json()["server_load"]
            return number

        asked = asyncio.ensure_future(app.client.post("/embed", content=b'{"inputs": ["a", "b"]}'))
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        found = [await load()]
        engine.open()
        await asked
        return [*found, await load()]

    assert app.run(loads()) == [1, 0]


@pytest.mark.parametrize("ids", [[5_000_000_000], [10**30], [[2**31]], [[2, 9], [4000]]])
def test_an_id_that_is_no_token_is_refused(app: App, ids: Any) -> None:
    check_error(post(app, "/decode", ids=ids), 400, "tokenizer has no token", param="ids")


def test_ids_are_decoded_up_to_a_number_that_holds_nobody_up(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    check_error(post(app, "/decode", ids=[5] * 65_537), 400, "the limit is 65536: send it in parts", param="ids")
    assert post(app, "/decode", ids=[5] * 65_536).status_code == 200
    lists = [[5, 6]] * 60_000
    check_error(post(app, "/decode", ids=lists), 400, "the limit is 16384: split it")
    short, long = (post(app, "/decode", ids=lists[:count]).json() for count in (2, 16_384))
    assert long == short * 8_192


def test_openai_s_route_under_tei_gives_unit_length_whatever_the_checkpoint_says(
    make_app: MakeApp, second_artifact: Artifact
) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))  # the second does not normalize
    for path, is_unit in (("/tei/v1/embeddings", True), ("/v1/embeddings", False)):
        (vector,) = (one["embedding"] for one in post(app, path, input="cat", model="org/second").json()["data"])
        assert (abs(sum(value * value for value in vector) - 1) < 1e-5) == is_unit


def test_ids_deeper_in_a_long_body_are_not_decoded() -> None:
    deeper = {"metadata": {"ids": [[6]] * 70_000}}
    read = tei.parse_ids(json.dumps({**deeper, "ids": [[5]]}).encode(), 8)
    assert read.ids == [[5]]
    assert tei.parse_ids(json.dumps({**deeper, "ids": []}).encode(), 8).ids == []


def test_cohere_s_tokens_are_the_text_s_own_and_are_decoded_as_vllm_s(kinds: App) -> None:
    text = "hello the cats"
    found = post(kinds, "/cohere/v1/tokenize", text=text, model="embedder").json()
    assert found["tokens"] == token_ids(text)[1:-1]
    assert "".join(found["token_strings"]) == text.replace(" ", "")
    again = post(kinds, "/cohere/v1/detokenize", tokens=found["tokens"], model="embedder").json()
    text = post(kinds, "/detokenize", tokens=found["tokens"], model="embedder").json()["prompt"]
    assert again == {"text": text, "meta": {"api_version": {"version": "1"}}}


def test_cohere_s_texts_have_a_limit_and_are_not_cut(kinds: App) -> None:
    text = "cat " * 16_384
    found = post(kinds, "/cohere/v1/tokenize", text=text, model="embedder").json()
    assert len(found["tokens"]) == len(found["token_strings"]) == 16_384
    refused = post(kinds, "/cohere/v1/tokenize", text=text + "c", model="embedder")
    assert refused.status_code == 400
    assert "has 65537 characters, the limit is 65536" in refused.json()["message"]


def test_documents_are_returned_by_cohere_s_default_under_its_mount_point(kinds: App) -> None:
    body = {"query": "a", "documents": ["cat"], "model": "reranker"}
    assert "document" not in post(kinds, "/cohere/v1/rerank", **body).json()["results"][0]
    assert "document" in post(kinds, "/v1/rerank", **body).json()["results"][0]
