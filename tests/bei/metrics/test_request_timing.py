"""Times of a request: each part is measured, and none counts twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from bei.artifact.manifest import Artifact
from bei.core import Encoding
from bei.engine.fake import FakeEngine
from bei.metrics.request_timing import CallTimes, Timing
from bei.port import Item, StepTimes
from bei.service.call import ModelInput, ModelRequest
from bei.service.service import InferenceService
from tests.support.artifacts import LIMITS, save_artifact, token_ids
from tests.support.engines import GatedEngine
from tests.support.services import entered, run_async, running_service

# How long a gate is held: measured times must be longer, however busy the machine is.
HELD_S = 0.02


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "tiny")


async def timed(service: InferenceService, inputs: list[ModelInput]) -> Timing:
    timing = Timing()
    with service.admit(inputs) as ticket:
        ticket.timing = timing
        await service.infer(ModelRequest(inputs), ticket=ticket, outputs={"embedding"})
    return timing


def item(place: int, num_tokens: int) -> Item:
    return Item(place, Encoding(np.zeros(num_tokens, np.int32)))


def test_a_call_s_times_are_the_sums_over_its_inputs() -> None:
    before_s = time.monotonic()
    times = CallTimes(3, before_s - 2)
    times.submitted([item(1, 5), item(0, 7)])
    times.submitted([item(2, 1)])
    now_s = time.monotonic()
    times.answered(0, StepTimes(now_s + 3, now_s + 7))
    times.answered(1, StepTimes(now_s - 100, now_s + 4))  # joined a step that ran: only the rest of it counts
    times.answered(2, None)  # from the cache: no step
    np.testing.assert_allclose(times.sums, [2 + 2 + 2, 3 + 0 + 0, 4 + 4 + 0], atol=3 * (now_s - before_s) + 1e-6)
    assert times.num_tokens == 13


def test_a_step_that_ended_before_an_input_joined_it_took_none_of_its_time() -> None:
    times = CallTimes(1, time.monotonic())
    times.submitted([item(0, 1)])
    times.answered(0, StepTimes(0.0, 1e-9))
    assert times.sums[1:] == (0, 0)


def test_means_are_over_the_inputs_of_all_calls() -> None:
    timing = Timing()
    now_s = time.monotonic()
    for num_inputs, step_s in ((1, 6.0), (3, 2.0)):
        times = timing.of_call(num_inputs, now_s)
        times.submitted([item(place, 2) for place in range(num_inputs)])
        for place in range(num_inputs):
            times.answered(place, StepTimes(now_s + 1_000, now_s + 1_000 + step_s))
    assert timing.means().inference_s == pytest.approx(3.0, abs=1e-6)
    assert timing.num_tokens == 8


def test_inputs_that_never_came_to_the_engine_are_not_in_the_means() -> None:
    timing = Timing()
    assert timing.means() == (0, 0, 0)
    times = timing.of_call(2, time.monotonic() - 8)
    assert timing.means() == (0, 0, 0)
    times.submitted([item(1, 3)])
    times.answered(1, None)
    assert timing.means().tokenization_s >= 8


def test_characters_are_counted_as_tei_does() -> None:
    timing = Timing()
    timing.admitted(["é😀", ("ab", "c"), [7, 8, 9, 10]], "cpu", timing.begun_s)
    assert (timing.num_characters, timing.target) == (2 + 3 + 4, "cpu")


def test_the_wait_is_the_queue_s_and_the_step_the_engine_s(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            asked_s = time.monotonic()
            running = asyncio.ensure_future(timed(service, ["cat"]))
            await entered(engine)
            entered_s = time.monotonic()
            waiting = asyncio.ensure_future(timed(service, ["hello", "the world"]))
            while service.num_waiting < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(HELD_S)
            opened_s = time.monotonic()
            engine.open()
            first, second = await running, await waiting
            answered_s = time.monotonic()
        assert first.means().inference_s >= HELD_S
        assert first.means().queue_s <= entered_s - asked_s
        assert second.means().queue_s >= HELD_S
        assert second.means().inference_s <= answered_s - opened_s
        for timing, texts in ((first, ["cat"]), (second, ["hello", "the world"])):
            assert min(timing.means()) >= 0
            assert sum(timing.means()) <= timing.total_s
            assert timing.num_tokens == sum(len(token_ids(text)) for text in texts)

    run_async(test)


def test_a_sequence_that_joins_an_equal_one_in_its_step_has_not_waited(artifact: Artifact) -> None:
    async def test() -> None:
        engine = GatedEngine(LIMITS)
        async with running_service(artifact, engine) as service:
            first = asyncio.ensure_future(timed(service, ["cat"]))
            await entered(engine)
            await asyncio.sleep(HELD_S)
            joined = asyncio.ensure_future(timed(service, ["cat"]))
            while not joined_is_submitted(service):  # noqa: ASYNC110
                await asyncio.sleep(0)
            engine.open()
            owner, other = (await first).means(), (await joined).means()
        assert len(engine.batches) == 1
        assert other.queue_s == 0
        assert 0 <= other.inference_s <= owner.inference_s - HELD_S

    def joined_is_submitted(service: InferenceService) -> bool:
        return bool(service._metrics._in_flight.value == 1)

    run_async(test)


def test_an_answer_from_the_cache_took_no_step(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS), cache_megabytes=1) as service:
            await timed(service, ["cat"])
            means = (await timed(service, ["cat"])).means()
        assert (means.queue_s, means.inference_s) == (0, 0)
        assert means.tokenization_s > 0

    run_async(test)


def test_only_a_request_that_asks_for_it_is_timed(artifact: Artifact) -> None:
    async def test() -> None:
        async with running_service(artifact, FakeEngine(LIMITS)) as service:
            with service.admit(["cat"]) as ticket:
                await service.encode(ModelRequest(["cat"]), ticket=ticket)
                await service.infer(ModelRequest(["cat"]), ticket=ticket, outputs={"embedding"})
                assert ticket.timing is None
            timing = Timing()
            with service.admit(["cat"]) as ticket:
                ticket.timing = timing
                await service.encode(ModelRequest(["cat"]), ticket=ticket)  # no step: none of its inputs are counted
                await service.infer(ModelRequest(["cat"]), ticket=ticket, outputs={"embedding"})
            assert timing.num_tokens == len(token_ids("cat"))

    run_async(test)
