"""What is true of the application as a whole: its documentation, unknown routes, unexpected exceptions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bei import __version__
from bei.config.settings import DIALECTS, ServeConfig
from bei.engine.fake import FakeEngine
from bei.server.app import inference_routes
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS

ROUTES = {
    *(("post", route.path.replace(":path}", "}")) for route in inference_routes(ServeConfig())),
    *(("get", f"/openai{root}/models{name}") for root in ("", "/v1") for name in ("", "/{name}")),
    ("post", "/v1/check-api-key"),
    ("get", "/info"),
    *(("get", f"{root}/models{name}") for root in ("", "/v1") for name in ("", "/{name}")),
    *(("get", path) for path in ("/", "/health", "/ping", "/ready")),
    ("get", "/metrics"),
    ("get", "/stats"),
    ("get", "/certificate"),
    *((method, path) for path in ("/v1/files", "/v1/batches") for method in ("get", "post")),
    *(("get", "/v1/batches/{batch_id}"), ("post", "/v1/batches/{batch_id}/cancel")),
    *((method, "/v1/files/{file_id}") for method in ("get", "delete")),
    ("get", "/v1/files/{file_id}/content"),
}


def test_the_openapi_page_lists_every_route_and_no_other(app: App) -> None:
    page = app.get("/openapi.json").json()
    listed = {(method, path) for path, item in page["paths"].items() for method in item}
    mounted = {(method, path) for method, path in listed if path.split("/")[1] in DIALECTS}
    assert listed - mounted == ROUTES
    assert {path.split("/")[1] for _, path in mounted} == {name for name in DIALECTS if name != "bei"}
    assert page["openapi"].startswith("3.")
    assert (page["info"]["title"], page["info"]["version"]) == ("bei", __version__)


def test_every_operation_of_the_openapi_page_is_complete(app: App) -> None:
    page = app.get("/openapi.json").json()
    operations = [operation for item in page["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for operation in operations:
        assert operation["summary"]
        assert operation["description"]
        assert operation["responses"]


def test_the_docs_page_loads(app: App) -> None:
    response = app.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in response.text


@pytest.mark.parametrize("path", ["/v1", "/v1/embedding", "/favicon.ico", "/v1/%2e%2e/x", "/☃", "/metrics/x"])
def test_an_unknown_route_is_404_in_openai_form(app: App, path: str) -> None:
    check_error(app.get(path), 404, "see /openapi.json", type="invalid_request_error", code="route_not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/embeddings", "POST"), ("DELETE", "/v1/models", "GET, HEAD"), ("POST", "/health", "GET, HEAD")],
)
def test_a_wrong_method_is_405_and_names_the_right_one(app: App, method: str, path: str, allowed: str) -> None:
    response = app.request(method, path)
    check_error(response, 405, f"{path} does not take {method}", code="method_not_allowed")
    assert response.headers["allow"] == allowed


def test_a_bug_is_500_without_a_traceback_which_is_in_the_log(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(FakeEngine(LIMITS))

    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(app.models, "named", broken)
    response = app.embed(input="a")
    message = check_error(response, 500, "unexpected error", type="server_error", code="bei_error")
    assert "secret" not in message
    assert "RuntimeError: secret detail" in caplog.text
    monkeypatch.undo()
    assert app.embed(input="a").status_code == 200
    assert 'status="500"' in app.get("/metrics").text


def test_anything_but_http_is_passed_on_untouched(app: App) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup" if not sent else "lifespan.shutdown"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    app.run(app.asgi({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_answers_are_json_that_every_parser_takes(app: App) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(app.embed(input="a").content, parse_constant=refuse)
