"""CORS: which origins browsers let read answers, and what they are told before they send."""

from __future__ import annotations

import httpx
import pytest

from bei.engine.fake import FakeEngine
from tests.bei.server.app import ROUTE, App
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS

PAGE = "https://page.example"
ASKED = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-bei-lane",
}


def ask(app: App, method: str, headers: dict[str, str], path: str = ROUTE) -> httpx.Response:
    content = b'{"input": "a"}' if method == "POST" else None
    response: httpx.Response = app.run(app.client.request(method, path, headers=headers, content=content))
    return response


def of_cors(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


def cors_app(make_app: MakeApp, *origins: str, **settings: object) -> App:
    return make_app(FakeEngine(LIMITS), cors_origins=origins, **settings)


def test_by_default_no_page_may_ask(app: App) -> None:
    for method in ("POST", "OPTIONS"):
        assert of_cors(ask(app, method, ASKED)) == {}
    assert ask(app, "OPTIONS", ASKED).status_code == 405


def test_a_page_of_a_named_origin_may_read_answers_and_errors(make_app: MakeApp) -> None:
    app = cors_app(make_app, "https://other.example", PAGE)
    for path, status in ((ROUTE, 200), ("/no/such/route", 404), ("/tei/embed", 422)):
        response = ask(app, "POST", {"Origin": PAGE}, path)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in response.headers
        assert response.headers["vary"] == "origin"


def test_before_it_sends_it_is_told_what_it_may_send(make_app: MakeApp) -> None:
    app = cors_app(make_app, PAGE, api_keys=("0123456789abcdef",))  # a browser sends no key with this question
    response = ask(app, "OPTIONS", ASKED)
    assert (response.status_code, response.content) == (204, b"")
    found = of_cors(response)
    assert found.pop("access-control-expose-headers")
    assert found == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "DELETE, GET, HEAD, POST",
        "access-control-allow-headers": ASKED["Access-Control-Request-Headers"],
        "access-control-max-age": "3600",
    }
    refused = ask(app, "POST", {"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize(
    "origin", ["http://page.example", "https://page.example:444", "https://page.example.evil.example", "null", "", "*"]
)
def test_a_page_of_another_origin_may_not(make_app: MakeApp, origin: str) -> None:
    app = cors_app(make_app, PAGE)
    for method, status in (("POST", 200), ("OPTIONS", 405)):
        response = ask(app, method, {**ASKED, "Origin": origin})
        assert (response.status_code, of_cors(response)) == (status, {})
        assert response.headers["vary"] == "origin"  # caches must not give it to the other page


def test_a_request_of_no_page_is_answered_as_ever(make_app: MakeApp) -> None:
    response = ask(cors_app(make_app, PAGE), "POST", {})
    assert (response.status_code, of_cors(response), response.headers["vary"]) == (200, {}, "origin")


def test_a_star_is_for_all_pages(make_app: MakeApp) -> None:
    app = cors_app(make_app, "*")
    for origin in (PAGE, "null"):
        response = ask(app, "POST", {"Origin": origin})
        assert response.headers["access-control-allow-origin"] == "*"
        assert "vary" not in response.headers
    assert ask(app, "OPTIONS", ASKED).status_code == 204
    assert of_cors(ask(app, "POST", {})) == {}


def test_cookies_may_come_along_where_that_is_set(make_app: MakeApp) -> None:
    app = cors_app(make_app, PAGE, cors_credentials=True)
    for method in ("POST", "OPTIONS"):
        assert ask(app, method, ASKED).headers["access-control-allow-credentials"] == "true"
    assert "access-control-allow-credentials" not in ask(app, "POST", {"Origin": "https://x.example"}).headers


@pytest.mark.parametrize("names", ["a b", "a,,b", "a" * 3000, "a\x01", "a:b"])
def test_names_of_headers_that_are_none_are_not_given_back(make_app: MakeApp, names: str) -> None:
    response = ask(cors_app(make_app, PAGE), "OPTIONS", {**ASKED, "Access-Control-Request-Headers": names})
    assert response.status_code == 204
    assert "access-control-allow-headers" not in response.headers


def test_options_of_no_browser_are_no_question(make_app: MakeApp) -> None:
    app = cors_app(make_app, PAGE)
    assert ask(app, "OPTIONS", {"Origin": PAGE}).status_code == 405
    assert ask(app, "OPTIONS", {"Access-Control-Request-Method": "POST"}).status_code == 405
