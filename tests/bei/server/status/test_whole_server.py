"""Whichever front end is asked speaks for the whole server: /metrics, /stats, /health, /ready, dialects' too."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import httpx
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from bei.metrics.registry import Metrics, ModelMetrics
from bei.server.app import create_app
from bei.server.endpoint.models import Models
from bei.server.server_parts import ServerParts
from bei.server.status.whole_server import offer_steps, on_loop
from tests.support.artifacts import LIMITS
from tests.support.engines import DEADLINE_S
from tests.support.peers import Bus, NoPeers
from tests.support.services import make_service

ROUTE = "/v1/embeddings"


class Front:
    """A front end with an engine of its own, where others would share one: what it counts is what matters here."""

    def __init__(self, artifact: Artifact, peers: Any) -> None:
        self.metrics = Metrics()
        config = ServeConfig(openai_token_ids="accept")
        self.models = Models([make_service(artifact, FakeEngine(LIMITS), self.metrics)], started_s=1234)
        app = create_app(self.models, ServerParts(config, self.metrics), peers=peers)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bei.test")

    async def embed(self, times: int = 1) -> None:
        for _ in range(times):
            assert (await self.client.post(ROUTE, json={"input": [[1, 2]]})).status_code == 200

    async def get(self, path: str) -> Any:
        return (await self.client.get(path)).json()

    async def samples(self, path: str = "/metrics") -> dict[tuple[str, ...], float]:
        response = await self.client.get(path)
        assert response.status_code == 200
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }


class Server:
    """Front ends, made and closed on one loop."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.bus = Bus()
        self.fronts: list[Front] = []
        self.loop = asyncio.new_event_loop()

    async def start(self, name: str, peers: Any = None) -> Front:
        self.fronts.append(Front(self.artifact, peers or self.bus.process(name)))
        return self.fronts[-1]

    def run(self, test: Callable[[], Any]) -> None:
        self.loop.run_until_complete(asyncio.wait_for(test(), DEADLINE_S))


@pytest.fixture
def server(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("bei.server.status.whole_server.PATIENCE_S", DEADLINE_S)
    server = Server(artifact)
    yield server
    for front in server.fronts:
        front.models.close()
    server.loop.close()


def requests(samples: dict[tuple[str, ...], float]) -> float:
    return samples["bei_requests_total", "/v1/embeddings", "200"]


def test_metrics_are_those_of_all_processes_whoever_is_asked(server: Server) -> None:
    async def test() -> None:
        first, second = [await server.start(f"front-{index}") for index in range(2)]
        await first.embed(2)
        await second.embed(3)
        for front in (first, second):
            for path in ("/metrics", "/tei/metrics", "/vllm/metrics"):
                found = await front.samples(path)
                assert requests(found) == 5
                assert found["bei_request_seconds_count", "/v1/embeddings", "200", "interactive", "tiny"] == 5
                assert found["te_request_success_total", "single"] == 5
                assert found["te_embed_count_total",] == 5
                ups = {name[1]: value for name, value in found.items() if name[0] == "bei_process_up"}
                assert ups == {"front-0": 1, "front-1": 1}

    server.run(test)


def test_no_counter_falls_when_a_process_dies_or_does_not_answer(server: Server) -> None:
    async def test() -> None:
        first, second = [await server.start(f"front-{index}") for index in range(2)]
        await first.embed(2)
        await second.embed(3)
        assert requests(await second.samples()) == 5  # which the second has answered itself
        server.bus.silent = {"front-1"}
        found = await first.samples()
        assert (requests(found), found["bei_process_up", "front-1"]) == (5, 0)
        server.bus.silent = set()
        server.bus.dies("front-1")
        found = await first.samples()
        assert (requests(found), "front-1" in {name[-1] for name in found}) == (5, False)
        again = await server.start("front-1")
        await again.embed()
        assert requests(await again.samples()) == requests(await first.samples()) == 6
        server.bus.dies("front-1")
        assert requests(await first.samples()) == 6

    server.run(test)


def test_a_process_that_nobody_answers_still_says_what_it_knows(server: Server) -> None:
    async def test() -> None:
        front = await server.start("front-0", NoPeers(silent=["front-1", "manager"]))
        await front.embed()
        found = await front.samples()
        assert requests(found) == 1
        ups = {name[1]: value for name, value in found.items() if name[0] == "bei_process_up"}
        assert ups == {"front-0": 1, "front-1": 0, "manager": 0}
        assert (await front.get("/stats"))["silent"] == ["front-1", "manager"]
        assert [await front.get(path) for path in ("/health", "/ready")] == [{"status": "alive"}, {"status": "ready"}]

    server.run(test)


def test_the_last_minute_is_that_of_all_processes(server: Server) -> None:
    async def test() -> None:
        first, second = [await server.start(f"front-{index}") for index in range(2)]
        await first.embed(2)
        await second.embed(3)
        manager = Metrics()
        offer_steps(server.bus.process("manager"), manager)
        steps = ModelMetrics(manager, "tiny")
        for _ in range(4):
            steps.batch([30, 30], engine_s=0.001, predicted_s=0.001, waits=[])
        tokens = pytest.approx((5 * 2 + 4 * 60) / 9)
        while (await first.get("/stats"))["models"][0]["batch"]["tokens"] != tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # steps are counted after the answers are handed over
        for front in (first, second):
            found = await front.get("/stats")
            assert found["requests"]["interactive"]["answered"] == {"200": 5}
            assert found["silent"] == []
            (model,) = found["models"]
            assert model["batch"]["tokens"] == tokens
            assert model["open_requests"] == 0
        server.bus.silent = {"manager"}
        assert (await first.get("/stats"))["silent"] == ["manager"]

    server.run(test)


def test_a_thread_that_has_died_in_another_process_makes_the_server_dead_and_names_the_process(server: Server) -> None:
    async def test() -> None:
        first, second = [await server.start(f"front-{index}") for index in range(2)]
        for path in ("/health", "/ready", "/tei/health", "/nim/v1/health/live", "/infinity/health", "/vllm/health"):
            assert (await first.client.get(path)).status_code == 200, path
        await asyncio.get_running_loop().run_in_executor(None, second.models.close)
        assert (await first.client.get("/health")).status_code == 503
        assert await first.get("/health") == {"status": "dead", "models": ["tiny"]}
        message = "A thread of tiny has died in front-1, which will be replaced."
        assert await first.get("/ready") == {"status": "not ready", "models": {"tiny": message}}
        for path in ("/tei/health", "/nim/v1/health/live", "/nim/v1/health/ready", "/infinity/health", "/vllm/health"):
            assert (await first.client.get(path)).status_code == 503, path
        (model,) = (await first.get("/stats"))["models"]
        assert not model["is_alive"]
        server.bus.dies("front-1")
        assert (await first.client.get("/health")).status_code == 200

    server.run(test)


def test_when_the_server_was_started_every_process_says_alike(server: Server) -> None:
    async def test() -> None:
        front = await server.start("front-0")
        assert (await front.get("/v1/models"))["data"][0]["created"] == 1234

    server.run(test)


def test_a_front_end_whose_event_loop_hangs_answers_no_question_about_its_health(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.server.status.whole_server.PATIENCE_S", 0.05)

    async def test() -> None:
        await server.start("front-0")
        for kind in ("health", "stats"):
            with pytest.raises(futures.TimeoutError):  # the loop is here, and waits
                server.bus.peers["front-0"].offers[kind]()
        assert server.bus.peers["front-0"].offers["metrics"]()
        await asyncio.sleep(0.01)  # what nobody waits for any more is computed

    server.run(test)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.filterwarnings("error")
def test_a_front_end_whose_loop_is_closed_has_no_answer_and_no_error(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def offered() -> Callable[[], bytes | None]:
        return on_loop(bytes)

    loop = make_loop()
    answer = loop.run_until_complete(offered())
    loop.close()
    assert answer() is None


def test_what_the_batch_manager_needs_loads_nothing_that_answers_requests() -> None:
    code = "import sys, bei.server.status.whole_server; print({'fastapi', 'starlette', 'uvicorn'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
