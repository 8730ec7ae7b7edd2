"""``service_tier``: OpenAI's word for the lane, in the requests of every route."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.config.settings import DIALECTS, ServeConfig
from bei.engine.fake import FakeEngine
from bei.errors import InvalidRequestError
from bei.port import LANES, Lane
from bei.server.app import inference_routes
from bei.server.auth.priority import TIER_NAMES, Urgency, in_tier
from bei.server.dialects.base import mounted
from bei.server.endpoint.field_schema import structs_in
from bei.server.endpoint.shared_fields import ServiceTier, Tiered
from tests.bei.server.app import ROUTE, App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.dialects.wire import asked, exchanges, is_same
from tests.bei.server.endpoint.test_route import GOOD
from tests.bei.server.kinds import KINDS, save_kind
from tests.support.artifacts import LIMITS

LANE_OF: dict[str, Lane | None] = {"auto": None, "default": None, "priority": "interactive", "flex": "bulk"}
SERVED_AS = {None: "default", "interactive": "priority", "bulk": "flex"}

MANY = {"input": ["cat"] * 8}  # by its size: bulk
ONE = {"input": "cat"}  # by its size: interactive


@given(st.sampled_from([None, *LANES]), st.lists(st.sampled_from(TIER_NAMES), max_size=4))
def test_a_header_and_tiers_have_one_answer_in_any_order(header: Lane | None, tiers: list[str]) -> None:
    """The one lane that they name, or a refusal."""
    named = {lane for lane in (header, *(LANE_OF[tier] for tier in tiers)) if lane is not None}
    found, is_done = Urgency(header, 5.0), False
    with contextlib.suppress(InvalidRequestError):
        for tier in tiers:
            found = in_tier(found, tier)
        is_done = True
    assert is_done is (len(named) < 2)
    assert not is_done or (found.lane, found.deadline_s) == (next(iter(named), None), 5.0)


@given(st.text().filter(lambda text: text not in TIER_NAMES))
def test_any_other_tier_is_refused_by_name(tier: str) -> None:
    with pytest.raises(InvalidRequestError, match="must be auto, default, priority or flex, not ") as caught:
        in_tier(Urgency(), tier)
    assert repr(tier[:40]) in str(caught.value)
    assert caught.value.param == "service_tier"


@pytest.fixture(scope="module")
def app_of_kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("kinds")
    served = [save_kind(folder / kind, kind) for kind in KINDS]
    app = App(*served, max_client_batch_size=8, payload_limit=100_000, interactive_inputs=2)
    yield app
    app.close()


@pytest.fixture
def lanes(app_of_kinds: App, monkeypatch: pytest.MonkeyPatch) -> list[Lane | None]:
    """The lane of each request, None of those that were not admitted."""
    found: list[Lane | None] = []
    monkeypatch.setattr(app_of_kinds.metrics, "request", lambda *values: found.append(values[4]))
    return found


def send(app: App, path: str, header: str | None = None, **body: object) -> httpx.Response:
    headers = {} if header is None else {"X-Bei-Lane": header}
    response: httpx.Response = app.run(app.client.post(path, content=json.dumps(body).encode(), headers=headers))
    return response


def routes_of(app: App) -> dict[str, Any]:
    """Every route that asks an engine, by its path."""
    under = (route for dialect in app.dialects for route in mounted(dialect))
    return {route.path: route for route in (*inference_routes(ServeConfig()), *under) if route.runs_engine}


def requests_of(app: App) -> list[dict[str, Any]]:
    """A good request of every route that asks an engine, of goldens all that are answered."""
    paths = routes_of(app)
    good = {**GOOD, "/openai/v1/embeddings": GOOD[ROUTE]}
    own = [{"path": path, "body": {**body, "model": model}} for path, (body, _, model) in good.items()]
    of_dialects = [
        one["request"] for name in DIALECTS[1:] for one in exchanges(name) if one["response"]["status"] == 200
    ]
    return [one for one in (*own, *of_dialects) if "body" in one and one["path"].rstrip("/") in {*paths, ""}]


def test_every_route_that_asks_an_engine_is_tried_here(app_of_kinds: App) -> None:
    missing = routes_of(app_of_kinds).keys() - {one["path"] for one in requests_of(app_of_kinds)}
    same_requests = {"/tei", "/tei/invocations", "/tei/embeddings", "/tei/embed_all", "/vllm/v2/rerank"}
    same_requests |= {"/voyage/v1/embeddings", "/voyage/v1/rerank"}
    named = {path for path in missing if "{" in path}
    beyond = {"/jina/v1/classify", "/voyage/contextualizedembeddings", "/voyage/v1/contextualizedembeddings"}
    beyond |= {"/voyage/multimodalembeddings", "/voyage/v1/multimodalembeddings"}
    assert missing - named <= same_requests | beyond  # which no model here can do


def test_every_request_for_an_engine_has_the_field(app_of_kinds: App) -> None:
    for path, route in routes_of(app_of_kinds).items():
        requests = route.request if isinstance(route.request, tuple) else (route.request,)
        for request in requests:
            outer = next(structs_in(request))
            assert issubclass(outer, Tiered), path
            (field,) = (field for field in msgspec.structs.fields(outer) if field.name == "service_tier")
            assert field.type == ServiceTier | None


@pytest.mark.parametrize(("tier", "lane"), [("flex", "bulk"), ("priority", "interactive")])
def test_the_tier_is_the_lane_on_every_route_and_other_servers_answers_keep_their_form(
    app_of_kinds: App, lanes: list[Lane | None], tier: str, lane: Lane
) -> None:
    for request in requests_of(app_of_kinds):
        plain, tiered = (
            asked(app_of_kinds, {**request, "body": {**request["body"], **more}})
            for more in ({}, {"service_tier": tier})
        )
        if request["path"] in ("/v1/embeddings", "/embeddings", "/openai/v1/embeddings"):
            assert tiered["body"].pop("service_tier") == tier
        assert plain["status"] == tiered["status"] == 200, request
        assert is_same(tiered["body"], plain["body"]), request
        assert lanes[-1] == lane, request


def test_a_tier_that_there_is_not_is_refused_on_every_route_before_it_is_admitted(
    app_of_kinds: App, lanes: list[Lane | None]
) -> None:
    for request in requests_of(app_of_kinds):
        answer = asked(app_of_kinds, {**request, "body": {**request["body"], "service_tier": "turbo"}})
        assert answer["status"] == (422 if request["path"].startswith(("/tei", "/jina")) else 400), request
        assert "'turbo'" in json.dumps(answer["body"])
        assert lanes[-1] is None


def test_paths_that_name_the_model_take_the_tier_too(app_of_kinds: App, lanes: list[Lane | None]) -> None:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["cat"]}
    answer = send(app_of_kinds, "/oip/v2/models/embedder/infer", inputs=[tensor], service_tier="flex")
    assert answer.status_code == 200, answer.text
    for path in ("/models/embedder", "/models/embedder/pipeline/feature-extraction"):
        assert send(app_of_kinds, path, inputs="cat", service_tier="flex").status_code == 200
    asked = {"labels": ["the"]}
    found = send(app_of_kinds, "/v1/extract/spans", items=[{"text": "cat"}], params=asked, service_tier="flex")
    assert found.status_code == 200
    azure = "/openai/deployments/embedder/embeddings"
    assert send(app_of_kinds, azure, **ONE, service_tier="flex").json()["service_tier"] == "flex"
    assert lanes == ["bulk"] * 5


@pytest.mark.parametrize("path", [ROUTE, "/embeddings"])
@pytest.mark.parametrize("header", [None, *LANES])
@pytest.mark.parametrize("tier", [None, *TIER_NAMES])
@pytest.mark.parametrize("body", [ONE, MANY], ids=["one", "many"])
def test_openais_route_says_which_tier_a_request_was_served_in(
    app_of_kinds: App, lanes: list[Lane | None], path: str, header: Lane | None, tier: str | None, body: dict[str, Any]
) -> None:
    response = send(app_of_kinds, path, header, **body, model="embedder", service_tier=tier)
    lane = header if tier is None else LANE_OF[tier] or header
    if header not in (None, lane):
        check_error(response, 400, f"service_tier {tier} is the lane {lane}", param="service_tier")
        assert lanes == [None]
        return
    assert response.status_code == 200
    assert response.json().get("service_tier") == (None if tier is None else SERVED_AS[lane])
    assert ("service_tier" in response.json()) is (tier is not None)
    assert lanes == [lane or ("interactive" if body is ONE else "bulk")]


def test_sparse_vectors_say_it_too(app_of_kinds: App) -> None:
    answer = send(app_of_kinds, ROUTE, input="cat", model="splade", output_dtype="sparse", service_tier="flex").json()
    assert answer["service_tier"] == "flex"


def test_parameters_of_similarity_may_hold_the_tier(app_of_kinds: App, lanes: list[Lane | None]) -> None:
    body = GOOD["/similarity"][0]
    for path in ("/similarity", "/"):
        answer = send(app_of_kinds, path, **body, model="embedder", parameters={"service_tier": "flex"})
        assert answer.status_code == 200
        assert lanes[-1] == "bulk"
    response = send(app_of_kinds, "/similarity", "interactive", **body, parameters={"service_tier": "flex"})
    check_error(response, 400, "x-bei-lane asks for interactive", param="service_tier")


def test_instances_of_vertex_ai_may_name_one_tier_among_them(app_of_kinds: App, lanes: list[Lane | None]) -> None:
    def instances(*tiers: str | None) -> httpx.Response:
        parts = [{"inputs": "cat", "model": "embedder", "service_tier": tier} for tier in tiers]
        return send(app_of_kinds, "/vertex", instances=parts)

    assert instances(None, "flex", "default").status_code == 200
    assert lanes == ["bulk"]
    check_error(instances("flex", "priority"), 400, "service_tier asks for bulk", param="service_tier")


@pytest.mark.parametrize("header", [{"Accept": "application/msgpack"}, {"X-Bei-Report": "true"}])
def test_other_forms_of_answers_say_it(app_of_kinds: App, header: dict[str, str]) -> None:
    content = json.dumps({**ONE, "model": "embedder", "service_tier": "priority"}).encode()
    response = app_of_kinds.run(app_of_kinds.client.post(ROUTE, content=content, headers=header))
    decode = msgspec.msgpack.decode if "Accept" in header else msgspec.json.decode
    assert decode(response.content)["service_tier"] == "priority"


SECRET = "a-secret-of-some-length"


@pytest.mark.parametrize(
    ("options", "tier", "served"),
    [
        ("lane: bulk", "auto", "flex"),
        ("lane: bulk", "flex", "flex"),
        ("lane: bulk", "priority", None),
        ("lane: bulk, may_raise_lane: true", "priority", "priority"),
        ("lane: interactive", "flex", "flex"),
        ("lane: interactive", "default", "priority"),
    ],
)
def test_a_tier_is_no_way_around_the_lane_of_a_key(
    make_app: MakeApp, tmp_path: Path, options: str, tier: str, served: str | None
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"crawler: {{key: {SECRET}, {options}}}")
    app = make_app(FakeEngine(LIMITS), api_keys_file=str(file))
    headers = {"Authorization": f"Bearer {SECRET}"}
    content = json.dumps({**ONE, "service_tier": tier}).encode()
    response = app.run(app.client.post(ROUTE, content=content, headers=headers))
    if served is None:
        check_error(response, 403, "leave service_tier out", code="forbidden", param="service_tier")
    else:
        assert response.json()["service_tier"] == served


def test_what_is_no_text_is_refused_by_the_parser(app_of_kinds: App) -> None:
    check_error(send(app_of_kinds, ROUTE, **ONE, service_tier=1), 400, "Expected `str | null`", param="service_tier")


def test_the_fields_of_other_servers_for_urgency_are_ignored(app_of_kinds: App, lanes: list[Lane | None]) -> None:
    """vLLM's and Cohere's ``priority`` is a number, whose order differs from one to the other."""
    assert send(app_of_kinds, ROUTE, **ONE, model="embedder", priority=-1).status_code == 200
    assert lanes == ["interactive"]


def test_lanes_and_tiers_are_named_once() -> None:
    assert {*LANE_OF} == {*TIER_NAMES}
    assert {lane for lane in LANE_OF.values() if lane is not None} == {*get_args(Lane)}
