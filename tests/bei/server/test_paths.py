"""Paths as clients write them: a slash too many, the root in a browser, those that clouds ask for."""

from __future__ import annotations

from typing import Any

import pytest

from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from bei.server.app import inference_routes
from bei.server.dialects.base import mounted
from tests.bei.server.app import App
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS

TEXTS = {"input": ["a text", "another"]}


def ask(app: App, method: str, path: str, body: Any = None, **headers: str) -> Any:
    return app.run(app.client.request(method, path, json=body, headers=headers))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/embeddings", TEXTS),
        ("POST", "/embeddings", TEXTS),
        ("POST", "/embed", {"inputs": "a text"}),
        ("POST", "/tei/embed", {"inputs": "a text"}),
        ("POST", "/tei/v1/embeddings", TEXTS),
        ("POST", "/v1/score", {"text_1": "a text", "text_2": "another"}),
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", "/tei/info", None),
        ("GET", "/ui/app.js", None),
    ],
)
def test_a_slash_at_the_end_changes_nothing(app: App, method: str, path: str, body: Any) -> None:
    answers = [ask(app, method, path + slashes, body, **{"x-forwarded-proto": "https"}) for slashes in ("", "/", "//")]
    assert [answer.status_code for answer in answers] == [200] * 3
    first, *others = ({key: value for key, value in answer.headers.items() if "-id" not in key} for answer in answers)
    assert all(other.keys() == first.keys() and other["content-type"] == first["content-type"] for other in others)
    assert len({len(answer.content) for answer in answers}) == 1


def test_a_slash_at_the_end_is_not_in_the_metrics(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    ask(app, "POST", "/v1/embeddings/", TEXTS)
    text = app.get("/metrics").text
    assert 'route="/v1/embeddings",status="200"} 1.0' in text
    assert "embeddings/" not in text


def test_a_slash_at_the_end_needs_the_key_and_the_method_all_the_same(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), api_keys=("0123456789abcdef",))
    assert ask(app, "POST", "/v1/embeddings/", TEXTS).status_code == 401
    assert ask(app, "GET", "/health/").status_code == 200
    allowed = ask(app, "GET", "/v1/embeddings/", authorization="Bearer 0123456789abcdef")
    assert (allowed.status_code, allowed.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/nothing/", "/v1/", "/ui/nothing/", "/v1/models/x/"])
def test_what_is_not_there_is_not_there_with_a_slash(app: App, path: str) -> None:
    assert ask(app, "GET", path).status_code == 404


def test_vertex_asks_for_the_paths_that_it_has_chosen(make_app: MakeApp) -> None:
    health, predict = "/v1/endpoints/7/deployedModels/8", "/v1/endpoints/7/deployedModels/8:predict"
    app = make_app(FakeEngine(LIMITS), health_path=health, predict_path=predict, api_keys=("0123456789abcdef",))
    assert ask(app, "GET", health).json() == {"status": "alive"}
    body = {"instances": [{"inputs": "a text"}]}
    assert ask(app, "POST", predict, body).status_code == 401
    key = {"authorization": "Bearer 0123456789abcdef"}
    found = ask(app, "POST", predict, body, **key).json()
    assert len(found["predictions"]) == 1
    assert found == ask(app, "POST", "/vertex", body, **key).json()


def test_a_browser_is_led_from_the_root_to_the_page_and_all_others_hear_that_it_lives(make_app: MakeApp) -> None:
    accept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    app = make_app(FakeEngine(LIMITS), api_keys=("0123456789abcdef",))
    led = ask(app, "GET", "/", accept=accept, **{"x-forwarded-proto": "https"})
    assert (led.status_code, led.headers["location"]) == (307, "ui")  # with the browser's own scheme and host
    for path in ("/", "/ping", "/ping/"):
        assert ask(app, "GET", path).json() == {"status": "alive"}
        assert ask(app, "HEAD", path).status_code == 200
    plain = make_app(FakeEngine(LIMITS), ui=False)
    assert ask(plain, "GET", "/", accept=accept).json() == {"status": "alive"}


@pytest.mark.parametrize("page", ["ui", "docs"])
def test_a_page_is_found_with_a_slash_and_its_links_stay_where_they_are(app: App, page: str) -> None:
    led = ask(app, "GET", f"/{page}/")
    assert (led.status_code, led.headers["location"]) == (307, f"../{page}")


def test_whatever_answers_get_answers_head(kinds: App) -> None:
    document = kinds.get("/openapi.json").json()
    paths = [path for path, methods in document["paths"].items() if "get" in methods and "{" not in path]
    assert {"/info", "/metrics", "/tei/info", "/tei/metrics", "/v1/models", "/nim/v1/metrics"} < {*paths}
    paths += ["/openapi.json", "/tei/api-doc/openapi.json", "/v1/models/embedder", "/oip/v2/models/embedder"]
    for path in paths:
        asked = {method: ask(kinds, method, path).status_code for method in ("GET", "HEAD")}
        assert asked["HEAD"] == asked["GET"], path


@pytest.mark.parametrize(
    ("path", "doubled"),
    [
        ("/v1/v1/embeddings", "/v1"),
        ("/voyage/v1/v1/rerank", "/v1"),
        ("/tei/tei/embed", "/tei"),
        ("/v1/embeddings/embeddings", "/embeddings"),
        ("/v1/embeddings/v1/embeddings", "/v1/embeddings"),
        ("/voyage/v1/voyage/v1/embeddings", "/voyage/v1"),
    ],
)
def test_a_path_with_a_part_twice_is_told_so(app: App, path: str, doubled: str) -> None:
    response = ask(app, "POST", path, TEXTS)
    assert response.status_code == 404
    assert (
        f"There is no route {path}: {doubled} stands there twice. Give the client a base URL without it."
        in response.text
    )


def test_a_path_is_named_as_it_was_asked_for(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), predict_path="/predict/7", root_path="/root")
    for path in ("/api/v1/embeddings", "/v1/nothing/", "/tei/nothing//"):
        for prefix in ("/root", ""):
            assert f"There is no route /root{path}:" in ask(app, "POST", prefix + path).text
    assert "/root/predict/7 does not take GET: send POST." in ask(app, "GET", "/predict/7").text
    assert "There is no route /root/v1/nothing:" in ask(app, "GET", "/v1/nothing", host="a?b").text
    assert "/root/v1/files/ is not served here" in ask(app, "GET", "/v1/files/").text


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/embedding", "/v1/embeddings"),
        ("/v1/reranks", "/v1/rerank"),
        ("/v1/chat/completions", None),
        ("/tei/embedd", "/tei/embed"),
        ("/" + "v1/embeddings/" * 1_000, None),
    ],
)
def test_the_nearest_route_is_named(app: App, path: str, nearest: str | None) -> None:
    advice = f"{nearest} may be meant, else see /openapi.json." if nearest else "see /openapi.json."
    assert ask(app, "POST", path, TEXTS).json()["error" if "/tei" in path else "detail"].endswith(f": {advice}")


def test_a_template_of_a_path_is_a_path_like_others(kinds: App) -> None:
    routes = (*inference_routes(ServeConfig()), *(route for dialect in kinds.dialects for route in mounted(dialect)))
    templates = [route.path for route in routes if "{" in route.path]
    assert len(templates) > 5
    for path in (*templates, "/v1/files/{file_id}", "/v1/batches/{batch_id}/cancel"):
        assert ask(kinds, "POST", path, TEXTS).status_code < 500, path


@pytest.mark.parametrize("path", ["/v1/v1", "/v1/v1/nothing", "/a/a", "/v1/embeddings/x"])
def test_other_paths_without_a_route_are_not(app: App, path: str) -> None:
    assert "twice" not in ask(app, "POST", path, TEXTS).text
