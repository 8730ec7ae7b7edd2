"""Ollama's lists of models, and where its routes stand. The bodies of its other routes are in ``ollama.json``."""

from __future__ import annotations

from datetime import datetime

import pytest

from bei.engine.fake import FakeEngine
from bei.server.dialects.ollama import _shortened
from tests.bei.server.app import App
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import answer, post
from tests.support.artifacts import LIMITS


def test_lists_have_every_model_and_every_alias(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), alias=("nomic-embed-text", "mxbai:large"))
    models = app.get("/api/tags").json()["models"]
    assert [one["name"] for one in models] == ["tiny:latest", "nomic-embed-text:latest", "mxbai:large"]
    (service,) = app.models
    assert {one["digest"] for one in models} == {service.manifest.digest}
    assert models[0]["size"] == sum(file.size for file in service.manifest.files)
    assert datetime.fromisoformat(models[0]["modified_at"].replace("Z", "+00:00")).tzinfo is not None
    assert models[0]["capabilities"] == ["embedding"]
    running = app.get("/api/ps").json()["models"]
    assert [{name: one[name] for name in models[0]} for one in running] == models
    for name in ("nomic-embed-text", "nomic-embed-text:latest", "mxbai:large"):
        assert answer(app, "/api/embed", model=name, input="cat")["model"] == name
    assert post(app, "/api/embed", model="mxbai", input="cat").status_code == 404


def test_the_vectors_are_those_of_other_routes(app: App) -> None:
    found = answer(app, "/api/embed", model="tiny", input=["cat", "the"])
    openai = post(app, "/v1/embeddings", input=["cat", "the"], normalize=True).json()
    assert found["embeddings"] == [one["embedding"] for one in openai["data"]]
    assert found["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    assert 0 < found["total_duration"] < 10**11
    raw = post(app, "/v1/embeddings", input=["cat"], normalize=False).json()["data"][0]["embedding"]
    assert answer(app, "/api/embeddings", model="tiny", prompt="cat")["embedding"] == raw


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/api/version", "/api/tags", "/api/ps", "/ollama/", "/"])
def test_what_clients_ask_before_they_begin(make_app: MakeApp, method: str, path: str) -> None:
    app = make_app(FakeEngine(LIMITS), dialect="ollama")
    response = app.request(method, path)
    assert response.status_code == 200
    if method == "GET" and "api" not in path:
        assert response.text == "Ollama is running"


def test_a_key_is_asked_for_but_at_its_root(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), api_keys=("0123456789abcdef",))
    assert [app.get(path).status_code for path in ("/api/tags", "/ollama/api/tags", "/ollama/")] == [401, 401, 200]
    assert app.get("/api/tags").json().keys() == {"error"}
    headers = {"authorization": "Bearer 0123456789abcdef"}
    assert app.run(app.client.get("/api/tags", headers=headers)).status_code == 200


def test_a_body_that_is_too_large_is_a_413(app: App) -> None:
    for path in ("/api/show", "/api/embed"):
        assert post(app, path, model="x" * 200_000).status_code == 413


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1"), (999, "999"), (22_713_216, "22.7M"), (109_482_240, "109M"), (7_240_000_000, "7.2B"), (150_000, "150K")],
)
def test_numbers_of_parameters_are_written_shortly(count: int, text: str) -> None:
    assert _shortened(count) == text


def test_the_page_allows_no_empty_text_in_a_list_as_the_route_does(app: App) -> None:
    """The page's limit was lost beside the type: a list or a text or null."""
    page = app.get("/openapi.json").json()
    schemas = [one for one in page["components"]["schemas"].values() if "keep_alive" in one.get("properties", {})]
    (of_list,) = [
        kind for one in schemas for kind in one["properties"].get("input", {}).get("anyOf", []) if "items" in kind
    ]
    assert of_list["items"]["minLength"] == 1
    assert post(app, "/api/embed", model="tiny", input=[""]).status_code == 400
    assert answer(app, "/api/embed", model="tiny", input=[])["embeddings"] == []
