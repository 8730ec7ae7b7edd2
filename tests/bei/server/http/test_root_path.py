"""A prefix in front of all paths: routes are found with it and without, and every link leads through the proxy."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bei.config.settings import FIRST_SEGMENTS
from bei.engine.fake import FakeEngine
from bei.server.http.root_path import RootPathRemoved
from tests.bei.server.app import ROUTE, App
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS

ROOT = "/embed-api"


@pytest.fixture
def behind(make_app: MakeApp) -> App:
    return make_app(FakeEngine(LIMITS), root_path=ROOT)


def ask(app: App, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    content = json.dumps({"input": "a", "inputs": "a"}).encode() if method == "POST" else None
    response: httpx.Response = app.run(app.client.request(method, path, headers=headers, content=content))
    return response


@pytest.mark.parametrize("path", [ROUTE, "/embed", "/tei/embed", "/", "/vllm/v1/embeddings"])
@pytest.mark.parametrize("prefix", [ROOT, ""], ids=["left", "cut off"])
def test_a_route_is_found_whether_the_proxy_cuts_the_prefix_off_or_not(behind: App, prefix: str, path: str) -> None:
    assert ask(behind, prefix + path, "POST").status_code == 200


@pytest.mark.parametrize("prefix", [ROOT, ""], ids=["left", "cut off"])
def test_reads_dialects_and_errors_are_the_same_both_ways(behind: App, prefix: str) -> None:
    for path in ("/health", "/v1/models", "/info", "/metrics", "/tei/health", "/openapi.json"):
        assert ask(behind, prefix + path).status_code == 200, path
    assert ask(behind, f"{prefix}/health", "HEAD").status_code == 200
    assert ask(behind, f"{prefix}/embed", "POST", **{"X-Bei-Dialect": "tei"}).status_code == 200
    assert ask(behind, f"{prefix}/no/such").status_code == 404
    response = ask(behind, prefix + ROUTE)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_a_name_within_a_path_is_found_both_ways(behind: App) -> None:
    (service,) = behind.models
    for prefix in (ROOT, ""):
        assert ask(behind, f"{prefix}/v1/models/{service.name}").json()["id"] == service.name


def test_the_prefix_alone_is_the_root_and_a_longer_word_is_not_the_prefix(behind: App) -> None:
    assert ask(behind, ROOT, "POST").status_code == ask(behind, f"{ROOT}/", "POST").status_code == 200
    assert ask(behind, f"{ROOT}x{ROUTE}", "POST").status_code == 404
    assert ask(behind, f"{ROOT}{ROOT}{ROUTE}", "POST").status_code == 404


@pytest.mark.parametrize("prefix", [ROOT, ""], ids=["left", "cut off"])
def test_pages_and_redirects_lead_through_the_proxy(behind: App, prefix: str) -> None:
    for path in ("/openapi.json", "/api-doc/openapi.json"):
        assert ask(behind, prefix + path).json()["servers"] == [{"url": ROOT}]
    assert f"{ROOT}/openapi.json" in ask(behind, f"{prefix}/docs").text
    redirect = ask(behind, f"{prefix}/", accept="text/html")
    assert (redirect.status_code, redirect.headers["location"]) == (307, f"{ROOT}/ui")
    assert ask(behind, f"{prefix}/info/").json() == ask(behind, "/info").json()


def test_metrics_have_the_route_without_the_prefix(behind: App) -> None:
    for prefix in (ROOT, ""):
        ask(behind, prefix + ROUTE, "POST")
        ask(behind, f"{prefix}/info")
    text = ask(behind, "/metrics").text
    assert f'bei_requests_total{{route="{ROUTE}",status="200"}} 2.0' in text
    assert 'bei_requests_total{route="/info",status="200"} 2.0' in text
    assert ROOT not in text


def test_without_a_prefix_there_are_no_servers_on_the_page(app: App) -> None:
    assert "servers" not in app.get("/openapi.json").json()


def test_keys_are_asked_for_both_ways(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), root_path=ROOT, api_keys=("0123456789abcdef",))
    for prefix in (ROOT, ""):
        assert ask(app, prefix + ROUTE, "POST").status_code == 401
        assert ask(app, f"{prefix}/health").status_code == 200
    for path in (f"{ROOT}{ROOT}/health", f"{ROOT}x/health"):
        assert ask(app, path).status_code == 401


def test_no_route_begins_as_a_prefix_may(app: App) -> None:
    paths = {*app.get("/openapi.json").json()["paths"], "/docs", "/ui", "/openapi.json", "/api-doc/openapi.json"}
    assert {path.split("/")[1] for path in paths} - {""} | {"api"} == FIRST_SEGMENTS  # Ollama's


def test_a_longer_word_is_not_taken_apart() -> None:
    async def check(scope: Scope, _: Receive, __: Send) -> None:
        assert scope == {"path": f"{ROOT}x/v1"}

    asyncio.run(_call(RootPathRemoved(check, ROOT), {"path": f"{ROOT}x/v1"}))


def test_scopes_are_not_changed_for_others(behind: App, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Scope] = []

    async def record(_: object, scope: Scope, __: Receive, ___: Send) -> None:
        passed.append(scope)

    monkeypatch.setattr(Starlette, "__call__", record)
    scope = {"type": "http", "method": "GET", "path": f"{ROOT}/x", "root_path": "", "headers": []}
    before = dict(scope)
    behind.run(_call(behind.asgi, scope))
    assert scope == before
    (placed,) = passed
    assert (placed["path"], placed["root_path"], placed["raw_path"]) == (f"{ROOT}/x", ROOT, f"{ROOT}/x".encode())


async def _call(app: ASGIApp, scope: Scope) -> None:
    async def receive() -> Message:
        raise AssertionError

    async def send(_: Message) -> None:
        raise AssertionError

    await app(scope, receive, send)
