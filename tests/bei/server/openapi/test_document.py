"""/openapi.json says what is answered: every status, every body, and what of a request is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from bei.config.settings import DIALECTS, ServeConfig
from bei.engine.fake import FakeEngine
from bei.metrics.registry import Metrics
from bei.server.app import inference_routes
from bei.server.dialects.base import mounted
from bei.server.dialects.table import all_dialects
from bei.server.endpoint.models import Models
from bei.server.http.errors import FORM_KEY, ErrorBody, error_response, own_form
from bei.server.status.whole_server import WholeServer
from tests.bei.server.app import App
from tests.bei.server.conftest import MakeApp
from tests.bei.server.dialects.wire import ERRORS, exchanges, has_path
from tests.bei.server.endpoint.test_route import GOOD
from tests.bei.server.kinds import post
from tests.support.artifacts import LIMITS

CONFIG = ServeConfig()
DIALECT_LIST = all_dialects(Models([]), CONFIG, WholeServer(Models([]), Metrics()))
# All routes with a body, and the form and types of their errors.
ROUTES = [(route, own_form, ErrorBody) for route in inference_routes(CONFIG)] + [
    (route, dialect.error_form, dialect.error_body) for dialect in DIALECT_LIST for route in mounted(dialect)
]
# Of servers with API keys, and of other requests than those to a model.
OF_KEYS = {"UnauthorizedError", "ForbiddenError", "RateLimitedError"}
ELSEWHERE = {"RouteNotFoundError", "MethodNotAllowedError"}


@pytest.fixture(scope="module")
def page(app: App) -> dict[str, Any]:
    found: dict[str, Any] = app.get("/openapi.json").json()
    return found


def resolved(page: dict[str, Any], node: Any) -> Any:
    """What ``node`` refers to, or itself."""
    while isinstance(node, dict) and "$ref" in node:
        target: Any = page
        for name in node["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        node = target
    return node


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def schema_of(page: dict[str, Any], path: str) -> Any:
    """Of a request, its alternatives in a list."""
    schema = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return [resolved(page, one) for one in schema.get("anyOf", [schema])]


def type_of(body: Any, types: Any) -> Any:
    """Which of ``types`` ``body`` is of, with no field that the type does not have; None: of none."""
    for one in types if isinstance(types, tuple) else (types,):
        try:
            converted = msgspec.convert(body, one)
        except msgspec.ValidationError:
            continue
        if msgspec.to_builtins(converted) == body:
            return one
    return None


def test_references_lead_somewhere_and_everything_is_described(page: dict[str, Any]) -> None:
    for reference in references(page):
        assert resolved(page, {"$ref": reference})
    for item in page["paths"].values():
        for operation in item.values():
            for response in operation["responses"].values():
                assert resolved(page, response)["description"]


def test_components_are_all_in_use(page: dict[str, Any]) -> None:
    used = set(references(page))
    for kind, components in page["components"].items():
        for name in components:
            assert f"#/components/{kind}/{name}" in used, name


@pytest.mark.parametrize(("route", "form", "error_body"), ROUTES, ids=[route.path for route, *_ in ROUTES])
def test_every_error_of_a_route_is_documented(page: dict[str, Any], route: Any, form: Any, error_body: Any) -> None:
    check_errors(page, route, form, error_body, ELSEWHERE | OF_KEYS)


def test_a_server_with_keys_documents_their_errors_too(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), api_keys=("0123456789abcdef",))
    headers = {"x-api-key": "0123456789abcdef"}
    page = app.run(app.client.get("/openapi.json", headers=headers)).json()
    for reference in references(page):
        assert resolved(page, {"$ref": reference})
    for route, form, error_body in ROUTES:
        check_errors(page, route, form, error_body, ELSEWHERE)


def check_errors(page: dict[str, Any], route: Any, form: Any, error_body: Any, elsewhere: set[str]) -> None:
    """Assert that the page has every error that the route may end with, but those ``elsewhere``."""
    path = route.path.replace(":path", "")
    responses = page["paths"][path]["post"]["responses"]
    for error in ERRORS:
        if type(error).__name__ in elsewhere:
            continue
        answer = error_response(error, {FORM_KEY: form, "path": path})
        documented = resolved(page, responses[str(answer.status_code)])
        assert ("retry-after" in answer.headers) <= ("retry-after" in documented.get("headers", {}))
        schema = documented["content"]["application/json"]["schema"]
        titles = {resolved(page, one)["title"] for one in schema.get("anyOf", [schema])}
        assert type_of(json.loads(bytes(answer.body)), error_body).__name__ in titles


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "bei"])
def test_the_goldens_are_of_the_documented_types(page: dict[str, Any], name: str) -> None:
    seen = 0
    for exchange in exchanges(name):
        asked, answer = exchange["request"]["path"], exchange["response"]
        there = [(route, body) for route, _, body in ROUTES if has_path(route.path, asked)]
        if exchange["request"].get("headers") or not there or exchange["request"].get("method"):
            continue
        ((route, error_body),) = there
        path = re.sub(r":\w+}", "}", route.path)
        types = route.response if answer["status"] == 200 else error_body
        assert type_of(answer["body"], types) is not None, exchange["what"]
        assert str(answer["status"]) in page["paths"][path]["post"]["responses"]
        documented = resolved(page, page["paths"][path]["post"]["responses"][str(answer["status"])])
        assert set(answer.get("headers", {})) <= set(documented.get("headers", {}))
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize("path", sorted(GOOD))
def test_a_good_request_has_documented_fields(page: dict[str, Any], path: str) -> None:
    forms = schema_of(page, path)
    assert any(set(GOOD[path][0]) <= set(form["properties"]) for form in forms)
    assert all("model" in form["properties"] for form in forms)


def test_reads_have_types(page: dict[str, Any]) -> None:
    empty = {"/tei/health", "/tei/ping", "/tei/", "/vllm/health", "/vllm/ping"}
    for path, item in page["paths"].items():
        for method, operation in item.items():
            if method == "post":
                continue
            content = operation["responses"]["200"].get("content")
            if path in empty:
                assert content is None
            else:
                ((_, body),) = content.items()
                assert resolved(page, body["schema"]) not in ({}, {"type": "object"}), path


def test_no_two_paths_differ_by_the_names_of_parameters_alone(page: dict[str, Any]) -> None:
    forms = [re.sub(r"{\w+}", "{}", path) for path in page["paths"]]
    assert len(set(forms)) == len(forms)  # OpenAPI: such paths are identical, and invalid


def test_head_is_no_route_of_the_page(page: dict[str, Any]) -> None:
    assert {method for item in page["paths"].values() for method in item} <= {"get", "post", "delete"}


def test_routes_stand_in_groups_openai_s_first_and_the_server_s_state_last(page: dict[str, Any]) -> None:
    tags = [tag["name"] for tag in page["tags"]]
    assert all(tag["description"] for tag in page["tags"])
    assert (tags[:3], tags[-1]) == (["OpenAI", "Files and batches", "Rerank"], "Server")
    routes = [(path, *operation["tags"]) for path, item in page["paths"].items() for operation in item.values()]
    assert {tag for _, tag in routes} == set(tags)
    places = [item.get("post") or next(iter(item.values())) for item in page["paths"].values()]
    found = [tags.index(one["tags"][0]) for one in places]
    assert found == sorted(found)
    mounts = {dialect.name: dialect.title for dialect in DIALECT_LIST}
    own = set(tags) - set(mounts.values())
    for path, tag in routes:
        mount = path[1:].partition("/")[0]
        assert tag == mounts[mount] if mount in mounts else tag in own, path
    assert page["paths"]["/"]["get"]["tags"] == ["Server"]


def test_what_asks_a_model_is_not_among_the_routes_of_the_server_s_state(page: dict[str, Any]) -> None:
    state = {path for path, item in page["paths"].items() for one in item.values() if one["tags"] == ["Server"]}
    assert state == {
        "/",
        "/info",
        "/health",
        "/ping",
        "/ready",
        "/metrics",
        "/stats",
        "/certificate",
        "/v1/check-api-key",
    }


def num_alternatives(limit: dict[str, Any]) -> int:
    if "not" in limit:  # each field is absent, or is otherwise
        return 2 * len(limit["not"]["required"])
    return len(limit.get("anyOf") or limit["oneOf"])


def test_the_limits_of_a_request_have_few_alternatives(page: dict[str, Any]) -> None:
    # Tools that make requests multiply the alternatives of all limits, and give up a request that has too many.
    limited = {name: schema["allOf"] for name, schema in page["components"]["schemas"].items() if "allOf" in schema}
    numbers = {name: math.prod(map(num_alternatives, limits)) for name, limits in limited.items()}
    assert max(numbers.values()) <= 32, numbers


def test_the_page_has_the_server_s_own_limits(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), max_client_batch_size=7, openai_token_ids="refuse")
    page = app.get("/openapi.json").json()
    (texts,) = (one for one in schema_of(page, "/tokenize")[0]["properties"]["inputs"]["anyOf"] if "items" in one)
    assert (texts["minItems"], texts["maxItems"]) == (1, 7)
    assert "max_client_batch_size" not in json.dumps(schema_of(page, "/embed"))
    request = page["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    (own,) = (one for one in next(iter(request.values())) if "properties" in one)  # the other one is vLLM's chat form
    assert "integer" not in json.dumps(own["properties"]["input"])


def test_a_server_of_another_dialect_says_that_its_own_needs_the_header(make_app: MakeApp) -> None:
    for dialect, is_required in (("bei", False), ("tei", True)):
        page = make_app(FakeEngine(LIMITS), dialect=dialect).get("/openapi.json").json()
        assert page["components"]["parameters"]["X-Bei-Dialect"]["required"] is is_required
        names = [resolved(page, one)["name"] for one in page["paths"]["/embed"]["post"]["parameters"]]
        assert names == [
            *("X-Bei-Lane", "Request-Timeout-Ms", "Request-Deadline-Ms", "X-Request-Timeout"),
            *("X-Bei-Report", "X-Bei-Dialect"),
        ]
        mounted_names = [resolved(page, one)["name"] for one in page["paths"]["/tei/embed"]["post"]["parameters"]]
        assert mounted_names == names[:-1]


def test_forms_of_answers_are_documented_where_there_are_such(page: dict[str, Any]) -> None:
    def media_types(path: str) -> list[str]:
        return list(page["paths"][path]["post"]["responses"]["200"]["content"])

    assert media_types("/rerank") == ["application/json", "application/msgpack"]
    assert media_types("/ollama/api/pull") == ["application/x-ndjson", "application/json"]
    assert media_types("/embed") == ["application/json", "application/msgpack", "application/octet-stream"]
    assert "x-bei-shape" in page["paths"]["/embed"]["post"]["responses"]["200"]["headers"]
    assert "406" in page["paths"]["/rerank"]["post"]["responses"]


def test_a_field_of_another_pair_is_refused_as_the_page_says(kinds: App, page: dict[str, Any]) -> None:
    body = {"model": "reranker", "queries": "a", "documents": "b"}
    assert post(kinds, "/score", **body).status_code == 200
    assert post(kinds, "/score", **body, text_1="").status_code == 400
    (limit,) = (one for one in schema_of(page, "/score")[0]["allOf"] if "oneOf" in one)
    pair = next(one["properties"] for one in limit["oneOf"] if one["required"] == ["queries", "documents"])
    assert pair["text_1"] == {"type": "null"}


def test_a_server_that_compresses_says_so(make_app: MakeApp, page: dict[str, Any]) -> None:
    def headers(found: dict[str, Any]) -> set[str]:
        return {*resolved(found, found["paths"]["/v1/embeddings"]["post"]["responses"]["200"])["headers"]}

    compressing = make_app(FakeEngine(LIMITS), compress_answers=True).get("/openapi.json").json()
    assert headers(compressing) - headers(page) == {"content-encoding", "vary"}
