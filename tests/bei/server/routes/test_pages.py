"""``/ui`` and ``/docs``: they come whole from this server, and say so to the browser; who gets them, and where."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from bei.artifact.manifest import Artifact
from bei.config.settings import DIALECTS, ServeConfig
from bei.engine.fake import FakeEngine
from bei.server.routes import pages
from bei.server.routes.pages import page_paths, pages_router, swagger_folder
from bei.utils.html.document import CONTENT_STYLE
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import KINDS
from tests.support.artifacts import LIMITS

FOLDER = Path(pages.__file__).parents[1] / "ui"
FILES = sorted(FOLDER.iterdir())
SCRIPTS = {path.name: path.read_text("utf-8") for path in FILES if path.suffix == ".js"}
PAGE = (FOLDER / "index.html").read_text("utf-8")
ROOT = "/embed-api"
SECRET = "0123456789abcdef"
DOCS = {"docs.html", "docs-missing.html", "docs.js", "docs.css"}


def policy_of(response: httpx.Response) -> dict[str, str]:
    """By directive."""
    parts = (part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    return {name: value for name, value in parts}


# The files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_names_no_other_host_and_evaluates_nothing(path: Path) -> None:
    text = path.read_text("utf-8")
    found = set(re.findall(r"(?:https?:)?//[\w.-]+[^\s'\")]*", re.sub(r"(?m)(^|\s)//.*$", "", text)))
    assert found <= {"http://www.w3.org/2000/svg"}, found  # a name, which nobody loads
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "@import"):
        assert word not in text, word
    assert not re.search(r"<[^>]*\s(on\w+|style)=", text)
    assert not re.search(r"<(script|style)(?![^>]*\ssrc=)[^>]*>", text)


def test_every_file_is_used_and_every_one_that_is_used_is_there() -> None:
    seen, waiting = set(), {"app.js"}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= set(re.findall(r"from '\./([\w.]+)'", SCRIPTS[name])) - seen
    linked = set(re.findall(r'(?:href|src)="ui/([\w.]+)"', PAGE)) | set(
        re.findall(r"'ui/([\w.]+)'", SCRIPTS["certificate.js"])
    )
    assert seen | linked | {"index.html"} | DOCS == {path.name for path in FILES} | {"certificate.css"}


def test_without_scripts_the_page_says_what_it_needs() -> None:
    (said,) = re.findall(r"<main[^>]*>\s*<noscript>(.*)</noscript>\s*</main>", PAGE)
    assert "This page needs JavaScript." in said


def test_what_the_page_asks_is_in_the_openapi_document(app: App) -> None:
    routes = re.findall(r"^  \w+: '(/[\w/]+)',$", SCRIPTS["api.js"], re.M)
    paths = app.get("/openapi.json").json()["paths"]
    assert len(routes) == 11
    assert set(routes) <= set(paths)
    asked = {name for text in SCRIPTS.values() for name in re.findall(r"ROUTES\.(\w+)", text)}
    assert asked == set(re.findall(r"^  (\w+): '/", SCRIPTS["api.js"], re.M))
    assert not [name for name, text in SCRIPTS.items() if name != "api.js" and "fetch(" in text]


def test_every_kind_of_model_but_late_interaction_has_a_tab() -> None:
    text = "".join(SCRIPTS.values())
    can = set(re.findall(r"model\.tasks\.includes\('(\w+)'\)", text))
    kinds = {task for tasks, *_ in KINDS.values() for task in tasks}
    assert can == kinds - {"embed_tokens"} | {"zero_shot"}  # GLiClass has the tab of labels of a request


# What is served


def test_the_page_and_its_files_are_served(app: App) -> None:
    for path in page_paths(ServeConfig()) - {"/ui/"}:  # which leads to the page
        response = app.get(path)
        assert response.status_code == 200, path
        assert response.content
        assert response.headers["x-content-type-options"] == "nosniff"
        assert policy_of(response)["default-src"] == "'none'"
        head = app.request("HEAD", path)
        assert (head.status_code, head.content) == (200, b"")
    assert app.get("/ui").headers["content-type"] == "text/html; charset=utf-8"
    assert app.get("/ui/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert app.get("/ui/style.css").headers["content-type"] == "text/css; charset=utf-8"
    assert app.get("/ui/icon.svg").headers["content-type"] == "image/svg+xml"
    assert app.get("/ui/certificate.css").text == CONTENT_STYLE


@pytest.mark.parametrize("path", ["/ui", "/ui/app.js"])
def test_scripts_come_from_here_alone(app: App, path: str) -> None:
    assert policy_of(app.get(path)) == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


@pytest.mark.parametrize(
    "name", ["index.html", "docs.html", "docs.js", "x.js", "..%2fui%2fapp.js", "%2e%2e/ui/x", "a/b"]
)
def test_other_files_are_not_there(app: App, name: str) -> None:
    check_error(app.get(f"/ui/{name}"), 404, "see /openapi.json", code="route_not_found")


def test_a_file_that_the_browser_has_is_not_sent_again(app: App) -> None:
    first = app.get("/ui/app.js")
    response = app.run(app.client.get("/ui/app.js", headers={"if-none-match": first.headers["etag"]}))
    assert (response.status_code, response.content) == (304, b"")
    response = app.run(app.client.get("/ui/app.js", headers={"if-none-match": '"other"'}))
    assert (response.status_code, response.content) == (200, first.content)


@pytest.mark.parametrize("prefix", [ROOT, ""], ids=["left", "cut off"])
def test_links_of_the_page_lead_through_a_proxy(make_app: MakeApp, prefix: str) -> None:
    app = make_app(FakeEngine(LIMITS), root_path=ROOT)
    response = app.get(f"{prefix}/ui")
    links = re.findall(r'(?:href|src)="([^"#]+)"', response.text)
    assert len(links) >= 6
    for link in links:
        url = urljoin(f"http://bei.test{ROOT}/ui", link)
        assert url.startswith(f"http://bei.test{ROOT}/")
        assert app.get(url.removeprefix("http://bei.test")).status_code == 200, link


def test_the_page_can_be_turned_off(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), ui=False)
    for path in ("/ui", "/ui/app.js"):
        check_error(app.get(path), 404, code="route_not_found")
    assert app.get("/stats").status_code == app.get("/docs").status_code == 200
    keyed = make_app(FakeEngine(LIMITS), ui=False, api_keys=(SECRET,))
    assert keyed.get("/ui").status_code == 401


def test_the_page_asks_for_the_key_itself(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), api_keys=(SECRET,))
    routes = {route.path for route in pages_router(ServeConfig()).routes if route.path.startswith("/ui")}
    assert routes - page_paths(ServeConfig()) == {"/ui/{name}"}
    for path in page_paths(ServeConfig()):
        assert app.get(path).status_code == (307 if path == "/ui/" else 200), path
        assert app.request("POST", path).status_code == 401, path
    assert 'data-keys="yes"' in app.get("/ui").text
    for path in ("/ui/x.js", "/docs", "/docs/swagger-ui.css", "/v1/models", "/stats", "/certificate"):
        assert app.get(path).status_code == 401, path


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_page_knows_the_server_s_dialect(make_app: MakeApp, dialect: str) -> None:
    app = make_app(FakeEngine(LIMITS), dialect=dialect)
    assert f'<html lang="en" data-dialect="{dialect}" data-keys="no">' in app.get("/ui").text
    assert app.get("/ui/app.js").status_code == 200


# /docs


def test_docs_come_from_an_installed_package(app: App) -> None:
    assert swagger_folder() is not None, "it is among the dependencies"
    page = app.get("/docs")
    assert not re.search(r"https?://", page.text)
    links = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
    for link in set(links) - {"data:,"}:
        response = app.get(urljoin("/docs", link))
        assert response.status_code == 200, link
        assert policy_of(response)["script-src"] == policy_of(response)["connect-src"] == "'self'"
    assert len(app.get("/docs/swagger-ui-bundle.js").content) > 500_000
    assert {app.get(f"/docs/{name}").status_code for name in ("docs.js", "docs.css")} == {200}
    for name in ("index.html", "docs.html", "x", "%2e%2e/__init__.py"):
        assert app.get(f"/docs/{name}").status_code == 404


def test_without_the_package_docs_say_what_to_install(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "swagger_folder", lambda: None)
    page = app.get("/docs")
    assert page.status_code == 501
    assert "pip install fastapi-swagger" in page.text
    assert not re.search(r"https?://", page.text)
    assert app.get("/docs/swagger-ui.css").status_code == 404


def test_a_package_of_another_shape_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tests", "no_such_package", "json"):
        monkeypatch.setattr(pages, "_SWAGGER_PACKAGE", name)
        assert swagger_folder() is None


# /certificate


def test_the_certificate_is_a_page(app: App) -> None:
    response = app.get("/certificate")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert policy_of(response)["default-src"] == "'none'"
    (service,) = app.models
    path = service.manifest.name
    assert f"<h1>Certificate of <bdi>{path}</bdi></h1>" in response.text


def test_of_several_models_the_query_names_the_certificate_s(kinds: App) -> None:
    check_error(kinds.get("/certificate"), 400, "set model to one of", code="invalid_request")
    check_error(kinds.get("/certificate?model=x"), 404, "not served here", code="model_not_found")
    for name in KINDS:
        assert f"<bdi>{name}</bdi></h1>" in kinds.get(f"/certificate?model={name}").text


def test_the_certificate_is_the_one_in_the_artifact(app: App, artifact: Artifact) -> None:
    assert app.get("/certificate").text == (artifact.path / "certificate.html").read_text("utf-8")
