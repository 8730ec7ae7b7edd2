"""The header Server-Timing: stages that add up, on good answers and on errors, and only where it is asked for."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from tests.bei.server.app import ROUTE, App
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine

ALL = ["receive", "parse", "tokenization", "queue", "inference", "render", "total"]
HELD_S = 0.02


def durations(response: httpx.Response) -> dict[str, float]:
    """Milliseconds by stage, as the header has them."""
    parts = response.headers["server-timing"].split(", ")
    found = [re.fullmatch(r"([a-z]+);dur=(\d+\.\d{3})", part) for part in parts]
    assert all(found), parts
    return {match[1]: float(match[2]) for match in found if match}


def check_sums(response: httpx.Response) -> list[str]:
    """The stages add up to the total; their names."""
    found = durations(response)
    *stages, total = found.values()
    assert sum(stages) == pytest.approx(total, abs=1e-6)
    return list(found)


@pytest.fixture
def timed(make_app: MakeApp) -> App:
    return make_app(FakeEngine(LIMITS), server_timing=True, payload_limit=1_000)


def ask(app: App, path: str = ROUTE, method: str = "POST", body: Any = None, **headers: str) -> httpx.Response:
    content = None if body is None else json.dumps(body).encode()
    response: httpx.Response = app.run(app.client.request(method, path, headers=headers, content=content))
    return response


def test_without_the_setting_no_answer_has_it(app: App) -> None:
    for path, method in ((ROUTE, "POST"), ("/embed", "POST"), ("/health", "GET")):
        assert "server-timing" not in ask(app, path, method, {"input": "a", "inputs": "a"}).headers


@pytest.mark.parametrize("body", [{"input": "cat"}, {"input": ["cat", "the world"]}, {"input": [[1]] * 20}])
def test_the_stages_of_an_answer_add_up(timed: App, body: Any) -> None:
    response = ask(timed, body=body)
    assert response.status_code == 200
    assert check_sums(response) == ALL


def test_a_large_answer_has_the_times_until_it_begins(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), server_timing=True)
    response = ask(app, body={"input": [[number % 100 + 1] for number in range(12_000)]})
    assert len(response.content) > 256_000
    assert check_sums(response) == ALL


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "stages"),
    [
        (ROUTE, {"input": []}, {}, 400, ["receive", "parse"]),
        (ROUTE, {"input": "a", "model": "nobody"}, {}, 404, ["receive", "parse"]),
        (ROUTE, {"input": "a" * 2_000}, {}, 413, ["receive"]),
        (ROUTE, {"input": "a"}, {"Content-Encoding": "br"}, 415, ["receive"]),
        (ROUTE, {"input": "a"}, {"X-Bei-Dialect": "nobody"}, 400, []),
        ("/no/such/route", {"input": "a"}, {}, 404, []),
    ],
)
def test_an_error_has_the_stages_it_came_to(
    timed: App, path: str, body: Any, headers: dict[str, str], status: int, stages: list[str]
) -> None:
    response = ask(timed, path, body=body, **headers)
    assert response.status_code == status
    assert check_stages(response) == stages


def check_stages(response: httpx.Response) -> list[str]:
    """As ``check_sums``, where there may be no stages."""
    names = list(durations(response))
    if len(names) > 1:
        check_sums(response)
    assert names.pop() == "total"
    return names


def test_a_route_that_asks_no_model_has_its_total(timed: App) -> None:
    assert check_stages(ask(timed, "/health", "GET")) == []


def test_a_tokenizer_s_route_has_no_inference(timed: App) -> None:
    response = ask(timed, "/tokenize", body={"inputs": "the cat"})
    assert check_sums(response) == ["receive", "parse", "tokenization", "render", "total"]
    assert durations(response)["tokenization"] > 0


def test_an_answer_from_the_cache_has_no_inference(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), server_timing=True, cache_megabytes=1)
    first, second = (ask(app, body={"input": "cat"}) for _ in range(2))
    assert check_sums(first) == ALL
    assert check_sums(second) == ["receive", "parse", "tokenization", "render", "total"]


def test_the_wait_is_in_the_queue_and_the_step_in_the_inference(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine, server_timing=True)

    async def post(text: str, **headers: str) -> httpx.Response:
        return await app.client.post(ROUTE, content=json.dumps({"input": text}).encode(), headers=headers)

    async def test() -> list[httpx.Response]:
        moments_s.append(time.monotonic())
        running = asyncio.ensure_future(post("cat"))
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        moments_s.append(time.monotonic())
        waiting = asyncio.ensure_future(post("hello"))
        late = asyncio.ensure_future(post("world", **{"Request-Timeout-Ms": "2000"}))
        (service,) = app.models
        while service.num_waiting < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        moments_s.append(time.monotonic())
        refused = await late
        await asyncio.sleep(HELD_S)
        engine.open()
        return [await running, await waiting, refused]

    moments_s: list[float] = []
    running, waiting, late = app.run(test())
    asked_s, entered_s, queued_s = moments_s
    assert [response.status_code for response in (running, waiting, late)] == [200, 200, 504]
    assert durations(running)["inference"] >= HELD_S * 1000
    assert durations(running)["queue"] <= (entered_s - asked_s) * 1000
    assert durations(waiting)["queue"] >= HELD_S * 1000
    # Until its deadline: it was never in a step.
    assert durations(late)["queue"] >= 1999 - (queued_s - entered_s) * 1000
    assert "inference" not in durations(late)
    for response in (running, waiting, late):
        check_sums(response)


def test_pages_of_other_origins_may_read_it(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), server_timing=True, cors_origins=("https://a.example",))
    response = ask(app, body={"input": "a"}, Origin="https://a.example")
    assert "server-timing" in response.headers["access-control-expose-headers"].split(", ")


def test_the_page_names_it(timed: App, app: App) -> None:
    def headers(one: App) -> Any:
        return one.get("/openapi.json").json()["paths"][ROUTE]["post"]["responses"]["200"]["headers"]

    assert "server-timing" in headers(timed)
    assert "server-timing" not in headers(app)


def test_several_models_and_tei_s_own_headers_agree(make_app: MakeApp, second_artifact: Artifact) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)), server_timing=True)
    response = ask(app, "/tei/embed", body={"inputs": "cat", "model": "tiny"})
    found = durations(response)
    for tei, stage in (
        ("x-tokenization-time", "tokenization"),
        ("x-queue-time", "queue"),
        ("x-inference-time", "inference"),
    ):
        assert int(response.headers[tei]) == int(found[stage]), tei
    assert int(response.headers["x-total-time"]) <= found["total"]
