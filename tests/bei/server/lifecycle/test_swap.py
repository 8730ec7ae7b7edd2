"""Swaps of artifacts over fake engines: who answers what, what is refused, and what is closed when."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.config.settings import ServeConfig
from bei.core import Engine
from bei.engine.fake import FakeEngine
from bei.errors import ArtifactHashMismatchError
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.server.auth.priority import Urgency
from bei.server.endpoint.context import Context, RequestContext
from bei.server.http.memory_budgets import AnswerMemory
from bei.server.lifecycle.swap import LocalSwaps
from bei.server.telemetry.request_record import RequestRecord
from bei.service.call import ModelRequest
from bei.service.loader import Loaded, Standing
from bei.service.service import InferenceService
from bei.tokenizer.encoder import TextEncoder
from tests.bei.server.app import ROUTE, App
from tests.support.artifacts import LIMITS, expected_vectors, save_artifact
from tests.support.engines import DEADLINE_S, GatedEngine
from tests.support.services import entered

CONFIG = ServeConfig(tokenizer_threads=1)


class ClosingEngine(FakeEngine):
    """Notes when it is closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class ClosingGate(GatedEngine):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def loaded(artifact: Artifact, engine: Engine) -> Loaded:
    encoder = TextEncoder(artifact.path / TOKENIZER, LIMITS.max_seq_len)
    return Loaded(artifact, encoder, engine, CostModel.assumed(LIMITS), None)


class Bench:
    """An application that serves ``artifacts``, whose next ones a test gives: ``next[name]()`` is asked in a thread."""

    def __init__(self, *served: tuple[Artifact, Engine]) -> None:
        self.app = App(*served, tokenizer_threads=1)
        self.models = self.app.models
        self.next: dict[str, Callable[[], Loaded | None]] = {}
        self.looked_at: list[str] = []
        gate = DeviceGate()

        def load_next(standing: Standing, service: InferenceService) -> Loaded | None:
            self.looked_at.append(service.name)
            return self.next[service.name]()

        def start(loaded: Loaded) -> InferenceService:
            return loaded.service(CONFIG, self.app.metrics, gate)

        standings = {
            artifact.manifest.name: Standing(artifact.path, "fake", 1, CostModel.assumed(LIMITS))
            for artifact, _ in served
        }
        self.swapping = LocalSwaps(self.models, standings, load_next, start, self.app.metrics)

    def run(self, test: Callable[[], Any]) -> None:
        self.app.run(test())

    def swap(self) -> None:
        """SIGHUP, and wait until nothing is under way."""

        async def look() -> None:
            await self.swapping.reload()
            await self.swapping.wait_closed()

        self.run(look)

    def ask(self, ids: list[int]) -> asyncio.Future[httpx.Response]:
        return asyncio.ensure_future(self.app.client.post(ROUTE, json={"input": [ids], "model": "tiny"}))

    def digest(self, name: str = "tiny") -> str:
        found: str = self.app.get(f"/info?model={name}").json()["digest"]
        return found

    def swaps(self, result: str, name: str = "tiny") -> float | None:
        return self.app.metrics.registry.get_sample_value("bei_swaps_total", {"model": name, "result": result})


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(int(DEADLINE_S / 0.001)):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited too long")


def vector_of(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    found: list[float] = response.json()["data"][0]["embedding"]
    return found


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "first")


@pytest.fixture
def second(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "second", bei_version="0.0.1")


@pytest.fixture
def make_bench() -> Any:
    made: list[Bench] = []

    def make(*served: tuple[Artifact, Engine]) -> Bench:
        made.append(Bench(*served))
        return made[-1]

    yield make
    for bench in made:
        bench.app.close()


def test_accepted_requests_are_answered_by_the_former_engine_and_later_ones_by_the_new_one(
    make_bench: Any, artifact: Artifact, second: Artifact
) -> None:
    former, new = ClosingGate(LIMITS), ClosingEngine(LIMITS)
    bench: Bench = make_bench((artifact, former))
    bench.next["tiny"] = lambda: loaded(second, new)

    async def test() -> None:
        accepted = bench.ask([1, 2])
        await entered(former)
        queued = bench.ask([3])
        await until(lambda: next(iter(bench.models)).num_waiting == 1)
        await bench.swapping.reload()
        await until(lambda: bench.swaps("swapped") == 1)
        later = vector_of(await bench.ask([4]))
        assert later == pytest.approx(expected_vectors([[4]])[0].tolist(), rel=1e-6)
        assert (accepted.done(), queued.done(), former.is_closed) == (False, False, False)
        former.open(2)
        await bench.swapping.wait_closed()
        for ids, answer in (([1, 2], accepted), ([3], queued)):
            assert vector_of(await answer) == pytest.approx(expected_vectors([ids])[0].tolist(), rel=1e-6)

    bench.run(test)
    assert [batch.input_ids.tolist() for batch in former.batches] == [[1, 2], [3]]
    assert [batch.input_ids.tolist() for batch in new.batches[1:]] == [[4]]  # after the canary
    assert (former.is_closed, new.is_closed) == (True, False)
    assert bench.digest() == second.manifest.digest


def test_a_model_that_was_found_before_the_swap_still_accepts_and_is_the_only_one_its_request_meets(
    make_bench: Any, artifact: Artifact, second: Artifact
) -> None:
    former = ClosingEngine(LIMITS)
    bench: Bench = make_bench((artifact, former))
    bench.next["tiny"] = lambda: loaded(second, FakeEngine(LIMITS))
    call = RequestContext(
        Context(bench.models, 8, 1_000_000, AnswerMemory(1_000_000)), Urgency(None, None), RequestRecord()
    )

    async def test() -> None:
        found = call.able("embed", "tiny")
        await bench.swapping.reload()
        await until(lambda: bench.swaps("swapped") == 1)
        assert call.named("tiny") is found is not bench.models.named("tiny")
        with found.admit([[1]]) as ticket:
            await found.infer(ModelRequest([[1]]), ticket=ticket, outputs={"embedding"})
        assert not former.is_closed
        call.let_go()
        await bench.swapping.wait_closed()
        assert former.is_closed

    bench.run(test)


def test_an_artifact_with_a_wrong_canary_is_closed_and_the_former_one_serves(
    make_bench: Any, artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench: Bench = make_bench((artifact, FakeEngine(LIMITS)))
    wrong, engine = save_artifact(tmp_path / "wrong", canary=[0, 0, 0, 0, 1, 0, 0, 0]), ClosingEngine(LIMITS)
    bench.next["tiny"] = lambda: loaded(wrong, engine)
    with caplog.at_level(logging.INFO):
        bench.swap()
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "engine_failed: tiny answers its canary with cosine 0.0000" in error.getMessage()
    assert error.exc_info is None
    assert engine.is_closed
    assert bench.digest() == artifact.manifest.digest
    assert (bench.swaps("refused"), bench.swaps("swapped")) == (1, 0)
    assert bench.app.embed(input="cat").status_code == 200


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ArtifactHashMismatchError("a file is\nnot what was built"), "artifact_hash_mismatch: a file is not what was"),
        (PermissionError("no rights"), "bei_error: no rights"),
        (RuntimeError("a bug"), "cannot take its place"),
    ],
)
def test_whatever_keeps_an_artifact_from_loading_leaves_the_former_one_and_the_next_signal_is_obeyed(
    make_bench: Any,
    artifact: Artifact,
    second: Artifact,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    message: str,
) -> None:
    bench: Bench = make_bench((artifact, FakeEngine(LIMITS)))

    def fail() -> Loaded:
        raise error

    bench.next["tiny"] = fail
    bench.swap()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert message in record.getMessage()
    assert "\n" not in record.getMessage()
    assert (record.exc_info is None) == (not isinstance(error, RuntimeError))
    assert bench.app.embed(input="cat").status_code == 200
    assert bench.swaps("refused") == 1
    bench.next["tiny"] = lambda: loaded(second, FakeEngine(LIMITS))
    bench.swap()
    assert bench.digest() == second.manifest.digest


def test_signals_while_something_is_loaded_are_one_more_look(make_bench: Any, artifact: Artifact) -> None:
    bench: Bench = make_bench((artifact, FakeEngine(LIMITS)))
    is_loading, may_go_on = threading.Event(), threading.Event()

    def load() -> None:
        is_loading.set()
        assert may_go_on.wait(DEADLINE_S)

    bench.next["tiny"] = load

    async def test() -> None:
        await bench.swapping.reload()
        await until(is_loading.is_set)
        assert bench.swapping.is_loading
        for _ in range(3):
            await bench.swapping.reload()
        may_go_on.set()
        await bench.swapping.wait_closed()

    bench.run(test)
    assert bench.looked_at == ["tiny", "tiny"]
    assert bench.swaps("unchanged") == 2
    assert bench.digest() == artifact.manifest.digest


def test_what_is_loaded_while_the_server_drains_is_closed_and_never_served(
    make_bench: Any, artifact: Artifact, second: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    bench: Bench = make_bench((artifact, FakeEngine(LIMITS)))
    engine, is_loading, may_go_on = ClosingEngine(LIMITS), threading.Event(), threading.Event()

    def load() -> Loaded:
        is_loading.set()
        assert may_go_on.wait(DEADLINE_S)
        return loaded(second, engine)

    bench.next["tiny"] = load

    async def test() -> None:
        await bench.swapping.reload()
        await until(is_loading.is_set)
        bench.swapping.end()
        bench.models.begin_drain()
        may_go_on.set()
        await bench.swapping.wait_closed()
        await bench.swapping.reload()  # a signal that comes too late

    bench.run(test)
    assert engine.is_closed
    assert bench.looked_at == ["tiny"]
    assert bench.digest() == artifact.manifest.digest
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_drain_waits_for_requests_of_a_former_engine(make_bench: Any, artifact: Artifact, second: Artifact) -> None:
    former = GatedEngine(LIMITS)
    bench: Bench = make_bench((artifact, former))
    bench.next["tiny"] = lambda: loaded(second, FakeEngine(LIMITS))

    async def test() -> None:
        accepted = bench.ask([1])
        await entered(former)
        await bench.swapping.reload()
        await until(lambda: bench.swaps("swapped") == 1)
        bench.swapping.end()
        bench.models.begin_drain()
        drained = asyncio.ensure_future(bench.models.wait_drained())
        assert (await bench.ask([2])).status_code == 503
        assert not drained.done()
        former.open(2)
        await drained
        assert (await accepted).status_code == 200
        await bench.swapping.wait_closed()

    bench.run(test)


def test_models_are_swapped_one_after_the_other(make_bench: Any, artifact: Artifact, tmp_path: Path) -> None:
    other = save_artifact(tmp_path / "other", name="other")
    former = GatedEngine(LIMITS)
    bench: Bench = make_bench((artifact, former), (other, FakeEngine(LIMITS)))
    for name in ("tiny", "other"):
        following = save_artifact(tmp_path / f"{name}-2", name=name, bei_version="0.0.1")
        bench.next[name] = partial(loaded, following, FakeEngine(LIMITS))

    async def test() -> None:
        accepted = bench.ask([1])
        await entered(former)
        await bench.swapping.reload()
        await until(lambda: bench.swaps("swapped") == 1)
        assert bench.looked_at == ["tiny"]  # its former engine is still in memory
        former.open(2)
        await bench.swapping.wait_closed()
        assert (await accepted).status_code == 200

    bench.run(test)
    assert bench.looked_at == ["tiny", "other"]
    assert bench.swaps("swapped", "other") == 1
    assert [service.name for service in bench.models] == ["tiny", "other"]


def fails_to_close(service: Any) -> None:
    """It ends its threads, and raises then: threads that go on would be other tests'."""
    close = service.close

    def fail() -> None:
        close()
        raise RuntimeError("the library has crashed")

    service.close = fail


def test_a_former_model_that_cannot_be_closed_ends_no_later_swap(
    make_bench: Any, artifact: Artifact, second: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    former, new = ClosingEngine(LIMITS), ClosingEngine(LIMITS)
    bench: Bench = make_bench((artifact, former))
    service = bench.models["tiny"]
    fails_to_close(service)
    bench.next["tiny"] = lambda: loaded(second, new)
    with caplog.at_level(logging.ERROR):
        bench.swap()
    assert "tiny: the swap to the artifact from" in caplog.text
    assert "the library has crashed" in caplog.text
    assert bench.digest() == second.manifest.digest
    assert not bench.models.is_replaced(service)
    bench.next["tiny"] = lambda: loaded(artifact, ClosingEngine(LIMITS))
    bench.swap()
    assert bench.looked_at == ["tiny", "tiny"]
    assert bench.digest() == artifact.manifest.digest
    assert new.is_closed


def test_the_models_behind_one_that_cannot_be_closed_are_looked_at(
    make_bench: Any, artifact: Artifact, second: Artifact, tmp_path: Path
) -> None:
    other = save_artifact(tmp_path / "other", name="other")
    bench: Bench = make_bench((artifact, ClosingEngine(LIMITS)), (other, ClosingEngine(LIMITS)))
    fails_to_close(bench.models["tiny"])
    bench.next = {"tiny": lambda: loaded(second, ClosingEngine(LIMITS)), "other": lambda: None}
    bench.swap()
    assert bench.looked_at == ["tiny", "other"]
    assert bench.swaps("unchanged", "other") == 1


def test_an_error_that_nothing_expects_does_not_keep_a_later_reload_from_beginning(
    make_bench: Any, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench: Bench = make_bench((artifact, ClosingEngine(LIMITS)))
    bench.next["tiny"] = lambda: None
    with monkeypatch.context() as patch:
        patch.setattr(bench.swapping, "path", lambda name: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bench.swap()
    bench.swap()
    assert bench.looked_at == ["tiny"]
