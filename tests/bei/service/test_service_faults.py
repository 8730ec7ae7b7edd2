"""InferenceService when clients leave, deadlines pass, drains begin and engines fail: each call hears of it once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from bei.artifact.manifest import Artifact
from bei.core import Encoding, Engine, Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from bei.errors import BeiError, DeadlineExceededError, EngineDeadError, EngineError, OverloadedError, ShuttingDownError
from bei.service.call import ModelRequest
from bei.service.service import InferenceService
from bei.tokenizer.encoder import EncodingOptions, Input
from bei.tokenizer.pool import CHUNK
from tests.bei.scheduler.front import wait_until
from tests.support.artifacts import LIMITS, save_artifact, token_ids
from tests.support.engines import DEADLINE_S, GatedEngine, sequences_of
from tests.support.services import entered, infer, run_async, running_service


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "tiny")


class SlowTokenizer:
    """Stands before a service's tokenizer and holds a chunk until the test lets it go."""

    def __init__(self, service: InferenceService) -> None:
        self._encode = service.encoder.encode
        self.entered, self.may = threading.Event(), threading.Event()
        service.encoder.encode = self.encode  # type: ignore[assignment,method-assign]

    def encode(self, inputs: Sequence[Input], options: EncodingOptions, *more: Any) -> list[Encoding]:
        if "slow" in inputs:
            self.entered.set()
            assert self.may.wait(DEADLINE_S)
        return self._encode(inputs, options, *more)


async def until(event: threading.Event) -> None:
    """Off the event loop."""
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, DEADLINE_S)


def test_what_is_tokenized_after_its_client_has_left_is_neither_run_nor_counted(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine, max_queue_tokens=100) as service:
            tokenizer = SlowTokenizer(service)
            stays = asyncio.ensure_future(infer(service, [[1]]))
            await entered(engine)
            leaves = asyncio.ensure_future(infer(service, ["slow", "a"], lane="bulk"))
            await until(tokenizer.entered)
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            tokenizer.may.set()
            service._readers.close()  # every chunk has been handed over now
            assert service._admission.num_tokens == 1
            assert service._port.stats().lanes["bulk"].num_sequences == 0
            engine.open()
            await stays
        assert [sequences_of(batch) for batch in engine.batches] == [[[1]]]

    run_async(test)


def test_a_deadline_that_passes_is_told_with_the_time_waited_and_takes_the_work_back(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            first = asyncio.ensure_future(infer(service, [[1]]))
            await entered(engine)
            ticket = service.admit([[2]], deadline_s=asyncio.get_running_loop().time() + 1000)
            ticket.deadline_s = ticket.accepted_s + 0.001
            with pytest.raises(DeadlineExceededError, match=r"deadline passed after \d+\.\d{3} s"):
                await service.infer(ModelRequest([[2]]), ticket=ticket, outputs={"embedding"})
            assert service._admission.num_open == 1
            assert service._port.stats().lanes["bulk"].num_sequences == 0
            engine.open()
            await first
        assert [sequences_of(batch) for batch in engine.batches] == [[[1]]]

    run_async(test)


def test_a_deadline_far_beyond_any_clock_is_kept(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            for deadline_s in (1e18, 1e300):
                assert len((await infer(service, ["a"], deadline_s=deadline_s)).rows) == 1

    run_async(test)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_drain_that_begins_between_two_calls_of_a_request_refuses_nothing_of_it(
    artifact: Artifact, num_calls: int
) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            with service.admit(["a", "b"]) as ticket:
                service.begin_drain()
                drained = asyncio.ensure_future(service.wait_drained())
                for _ in range(num_calls):
                    await service.encode(ModelRequest(["a"]), ticket=ticket)
                    await service.infer(ModelRequest(["b"]), ticket=ticket, outputs={"embedding"})
                    assert not drained.done()
            await drained
            with pytest.raises(ShuttingDownError):
                service.admit(["a"])

    run_async(test)


def test_texts_and_token_ids_of_one_request_are_admitted_once(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine, max_queue_tokens=4) as service:
            mixed = asyncio.ensure_future(infer(service, ["a", [5]]))  # exactly as many as may wait
            await entered(engine)
            service.begin_drain()
            engine.open()
            answer = await mixed
        assert [row["embedding"][1] for row in answer.rows] == [token_ids("a")[0], 5]

    run_async(test)


def test_a_long_queue_in_front_of_an_engine_that_works_is_ready_and_alive(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            engine.let_one_through()
            await service.check_ready()
            await entered(engine)
            bulk = asyncio.ensure_future(infer(service, [[1, index] for index in range(100)]))
            await entered(engine)
            for _ in range(3):
                await service.check_ready()  # at once: nothing stands in the queue for it
                assert service.is_alive
                engine.let_one_through()
                await entered(engine)
            engine.open()
            await bulk
        assert all(token_ids("hello world") not in sequences_of(batch) for batch in engine.batches[1:])

    run_async(test)


class DyingEngine(FakeEngine):
    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        if 9 in batch.input_ids:
            raise SystemExit
        return super().run(batch)


def test_a_dead_engine_is_an_error_for_everybody_and_nobody_waits(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, DyingEngine(LIMITS)) as service:
            await service.check_ready()
            with pytest.raises(EngineDeadError, match="restart the server"):
                await infer(service, [[9]])
            for inputs in (["a"], [[1]], ["a"] * (2 * CHUNK)):
                with pytest.raises(EngineDeadError):
                    await infer(service, inputs)
            assert not service.is_alive
            with pytest.raises(EngineError, match="has died: restart the server"):
                await service.check_ready()
            await service.wait_drained()

    run_async(test)


def test_an_engine_that_is_being_replaced_is_not_ready_and_answers_afterwards(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.scheduler.batch_manager._WATCH_EVERY_S", 0.002)
    may_load = threading.Event()

    def reload() -> Engine:
        assert may_load.wait(DEADLINE_S)
        return FakeEngine(LIMITS)

    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine, reload=reload, hang_timeout=3600.0) as service:
            overdue = threading.Semaphore(0)
            service._port._is_overdue = lambda step: overdue.acquire(blocking=False)  # type: ignore[attr-defined]
            call = asyncio.ensure_future(infer(service, ["a"]))
            await entered(engine)
            overdue.release()
            await asyncio.to_thread(wait_until, lambda: not service.is_alive, "the watchdog has looked")
            with pytest.raises(EngineError, match="hangs"):
                await service.check_ready()
            may_load.set()
            assert len((await call).rows) == 1
            assert service.is_alive
            await service.check_ready()

    run_async(test)


def test_errors_of_every_kind_leave_nothing_behind(artifact: Artifact) -> None:
    class Failing(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            if 9 in batch.input_ids:
                raise RuntimeError
            return super().run(batch)

    async def test() -> None:
        async with running_service(artifact, Failing(LIMITS), max_queue_tokens=100, auto_truncate=False) as service:
            bad: list[list[str | list[int]]] = [[[9]], ["a " * 50], ["a", [9], "a " * 50], [[1], [10**6]]]
            calls = [infer(service, inputs) for inputs in bad * 5]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(answer, BeiError) for answer in answers)
            assert not any(isinstance(answer, OverloadedError) for answer in answers[:4])
            await service.wait_drained()
            assert service._admission.num_tokens == 0
            assert len((await infer(service, ["a"] * 33)).rows) == 33

    run_async(test)
