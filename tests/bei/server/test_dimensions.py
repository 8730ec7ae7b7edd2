"""Vectors that are cut, of models that were trained for it (Matryoshka) and of those that do not say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bei.engine.fake import DIMENSION, FakeEngine
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS, save_artifact

WARNING = "tiny does not say that its vectors may be cut (Matryoshka): those of 3 components may rank much worse"

_UNSUPPORTED = {"description": "Refused"}

_OPENAI: dict[str, object] = {"input": "a", "model": "tiny"}
_TEI: dict[str, object] = {"inputs": "a"}
_COHERE: dict[str, object] = {"texts": ["a"], "model": "tiny", "input_type": "search_document"}
# Every route that cuts vectors, with a body and the field.
ROUTES: dict[str, tuple[dict[str, object], str]] = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/vllm/v1/embeddings"), (_OPENAI, "dimensions")),
    **dict.fromkeys(("/tei/v1/embeddings", "/tei/embeddings"), (_OPENAI, "dimensions")),
    **dict.fromkeys(("/embed", "/", "/invocations"), (_TEI, "dimensions")),
    **dict.fromkeys(("/tei", "/tei/", "/tei/embed", "/tei/invocations"), (_TEI, "dimensions")),
    **dict.fromkeys(("/pooling", "/vllm/pooling"), (_OPENAI, "dimensions")),
    **dict.fromkeys(("/v2/embed", "/cohere/v2/embed"), (_COHERE, "output_dimension")),
    "/jina/v1/embeddings": (_OPENAI, "dimensions"),
    **dict.fromkeys(("/voyage/v1/embeddings", "/voyage/embeddings"), (_OPENAI, "output_dimension")),
    "/nim/v1/embeddings": ({**_OPENAI, "input_type": "passage"}, "dimensions"),
    "/infinity/embeddings": (_OPENAI, "dimensions"),
    "/openai/v1/embeddings": (_OPENAI, "dimensions"),
    "/openai/deployments/{deployment}/embeddings": (_OPENAI, "dimensions"),
    **dict.fromkeys(("/models/{name}", "/models/{name}/pipeline/{task}"), (_TEI, "dimensions")),
    "/pipeline/{task}/{name}": (_TEI, "dimensions"),
    "/ollama/api/embed": ({"input": "a"}, "dimensions"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    artifact = save_artifact(tmp_path_factory.mktemp("trained") / "tiny", embedding={"matryoshka_dimensions": [3]})
    app = App((artifact, FakeEngine(LIMITS)))
    yield app
    app.close()


def post(app: App, path: str, body: dict[str, Any]) -> httpx.Response:
    for name, value in (("deployment", "tiny"), ("model", "tiny"), ("name", "tiny"), ("task", "feature-extraction")):
        path = path.replace(f"{{{name}}}", value)
    return app.request("POST", path, json.dumps(body).encode())


def cut(app: App, path: str, dimensions: int) -> httpx.Response:
    body, field = ROUTES[path]
    return post(app, path, {**body, field: dimensions})


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_every_route_warns_where_the_model_does_not_say_that_it_may_be_cut(path: str, app: App, trained: App) -> None:
    warned = cut(app, path, 3)
    assert warned.status_code == 200, warned.text
    assert warned.headers["x-bei-warning"] == WARNING
    silent = (cut(trained, path, 3), cut(app, path, DIMENSION), post(app, path, ROUTES[path][0]))
    assert [(answer.status_code, answer.headers.get("x-bei-warning")) for answer in silent] == [(200, None)] * 3


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_every_route_refuses_it_where_the_server_is_to(path: str, make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), untrained_dimensions="refuse")
    refused = cut(app, path, 3)
    assert refused.status_code in (400, 422), refused.text
    said = f"may be cut (Matryoshka), and untrained_dimensions is refuse: leave {ROUTES[path][1]} out"
    assert said in refused.text
    assert cut(app, path, DIMENSION).status_code == 200


# For other models.
OF_OTHERS = {
    *("/voyage/contextualizedembeddings", "/voyage/v1/contextualizedembeddings"),
    *("/voyage/multimodalembeddings", "/voyage/v1/multimodalembeddings"),
}


def test_these_are_all_routes_that_cut(app: App) -> None:
    document = app.get("/openapi.json").json()
    fields = {
        name: [
            field
            for field in ("dimensions", "output_dimension")
            if not schema.get("properties", {}).get(field, _UNSUPPORTED).get("description", "").startswith("Refused")
        ]
        for name, schema in document["components"]["schemas"].items()
    }
    found = {
        path
        for path, methods in document["paths"].items()
        for name in fields
        if fields[name] and f'/{name}"' in json.dumps(methods.get("post", {}).get("requestBody", {}))
    }
    assert found - OF_OTHERS == ROUTES.keys()


def test_late_chunking_has_the_same_check(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), untrained_dimensions="refuse")
    response = app.embed(input=["a", "b"], late_chunking=True, dimensions=3)
    check_error(response, 400, "untrained_dimensions is refuse", param="dimensions")


ZERO_IS_ALL = {"/embeddings", "/infinity/embeddings"}  # Infinity's client sends it where nobody asks for a width


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_zero_is_what_the_peer_says(path: str, app: App) -> None:
    response = cut(app, path, 0)
    if path in ZERO_IS_ALL:
        whole = post(app, path, ROUTES[path][0])
        assert response.json()["data"] == whole.json()["data"]
    else:
        assert response.status_code in (400, 422)
        assert ROUTES[path][1] in response.text
