"""``GET /stats``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bei import __version__
from bei.engine.fake import FakeEngine
from bei.metrics.last_minute import step_sums
from bei.server.status.stats import Stats
from tests.bei.server.app import ROUTE, App
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import KINDS
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine


def stats(app: App) -> Any:
    response = app.get("/stats")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    msgspec.json.decode(response.content, type=Stats)
    return response.json()


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited too long")


def test_a_server_that_nobody_has_asked(make_app: MakeApp) -> None:
    found = stats(make_app(FakeEngine(LIMITS)))
    assert found["version"] == __version__
    assert 0 < found["window_s"] < 60
    nothing = {"answered": {}, "latency_s": {"p50": None, "p90": None, "p99": None}}
    for group in ("interactive", "bulk", "other"):
        assert {name: found["requests"][group][name] for name in nothing} == nothing
        assert found["requests"][group]["per_second"] == {"answered": [0] * 60, "p50": [None] * 60, "p99": [None] * 60}
    (model,) = found["models"]
    empty = {"sequences": 0, "tokens": 0, "seconds": 0.0}
    assert model == {
        "name": "tiny",
        "target": "fake",
        "precision": "fp32",
        "device": "none",
        "unshared_prefixes": "this engine computes every text whole",
        "is_alive": True,
        "open_requests": 0,
        "queue": {"interactive": empty, "bulk": empty},
        "sequences_per_second": 0.0,
        "tokens_per_second": 0.0,
        "steps_per_second": 0.0,
        "busy": 0.0,
        "batch": {
            "sequences": None,
            "tokens": None,
            "fill": None,
            "padding": None,
            "max_sequences": LIMITS.max_batch_size,
            "max_tokens": LIMITS.max_num_tokens,
        },
        "per_second": {"tokens": [0] * 60},
    }


def test_requests_have_their_lane_and_status(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    for headers in ({}, {"X-Bei-Lane": "bulk"}, {"X-Bei-Lane": "bulk"}):
        app.run(app.client.post(ROUTE, content=b'{"input": [1, 2, 3]}', headers=headers))
    app.embed(input="")  # refused before it was accepted
    app.get("/no/such")
    requests = stats(app)["requests"]
    assert requests["interactive"]["answered"] == {"200": 1}
    assert requests["bulk"]["answered"] == {"200": 2}
    assert requests["other"]["answered"] == {"400": 1, "404": 1}
    for lane in ("interactive", "bulk"):
        p50, p90, p99 = (requests[lane]["latency_s"][name] for name in ("p50", "p90", "p99"))
        assert 0 < p50 <= p90 <= p99 < 60
    assert stats(app)["requests"]["other"]["answered"]["200"] == 1  # the question before


def test_an_answer_in_pieces_has_its_lane(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei.server.endpoint.route.INLINE_BYTES", 10)
    app = make_app(FakeEngine(LIMITS))
    assert app.embed(input=[[1, 2]] * 20).status_code == 200
    assert stats(app)["requests"]["bulk"]["answered"] == {"200": 1}


def test_a_request_that_fails_after_it_was_accepted_has_its_lane(make_app: MakeApp) -> None:
    class Broken(FakeEngine):
        def run(self, *_: object) -> Any:
            raise RuntimeError("no")

    app = make_app(Broken(LIMITS))
    assert app.embed(input=[1, 2, 3]).status_code == 500
    assert stats(app)["requests"]["interactive"]["answered"] == {"500": 1}


def test_steps_and_what_they_held(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    for given in ([[1, 2, 3, 4]], [[5, 6]]):
        assert app.embed(input=given).status_code == 200
    (service,) = app.models
    app.run(until(lambda: step_sums(service.recent.window()).steps == 2))  # counted after the answers are handed over
    (model,) = stats(app)["models"]
    assert model["tokens_per_second"] > model["sequences_per_second"] > 0
    assert model["sequences_per_second"] == pytest.approx(model["steps_per_second"])
    assert 0 < model["busy"] <= 1
    assert (model["batch"]["sequences"], model["batch"]["tokens"]) == (1.0, 3.0)
    assert model["batch"]["fill"] == 3 / LIMITS.max_num_tokens
    assert model["batch"]["padding"] == 0.0


def test_what_waits_and_who(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine)

    async def asked() -> tuple[Any, Any]:
        def ask(lane: str, *ids: int) -> Any:
            body = json.dumps({"input": [[one, one] for one in ids]}).encode()
            return asyncio.ensure_future(app.client.post(ROUTE, content=body, headers={"X-Bei-Lane": lane}))

        first = ask("interactive", 1)
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        others = [ask("bulk", 2, 3, 4), ask("interactive", 5)]
        (service,) = app.models
        await until(lambda: service.num_waiting == 4)
        found = (await app.client.get("/stats")).json()
        engine.open()
        answered = await asyncio.gather(first, *others)
        return found, answered

    found, answered = app.run(asked())
    assert {response.status_code for response in answered} == {200}
    (model,) = found["models"]
    assert model["open_requests"] == 3
    assert {lane: (one["sequences"], one["tokens"]) for lane, one in model["queue"].items()} == {
        "interactive": (1, 2),
        "bulk": (3, 6),
    }
    assert model["queue"]["bulk"]["seconds"] > 0


def test_every_model_is_there(kinds: App) -> None:
    assert [model["name"] for model in stats(kinds)["models"]] == [*KINDS]


def test_it_needs_a_key_as_other_reads_do(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), api_keys=("0123456789abcdef",))
    assert app.get("/stats").status_code == 401
