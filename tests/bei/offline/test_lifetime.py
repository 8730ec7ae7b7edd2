"""Lanes of calls, deadlines, closing, and Models that are garbage-collected."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from bei import Model
from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from bei.errors import DeadlineExceededError, EngineError, ShuttingDownError
from bei.offline import service_thread
from bei.port import Lane
from tests.bei.offline.conftest import OpenModel
from tests.bei.offline.given import own_threads, texts
from tests.e2e.process import wait_until
from tests.support.artifacts import LIMITS
from tests.support.engines import DEADLINE_S, GatedEngine


@pytest.mark.parametrize(
    ("count", "options", "lane"),
    [
        (1, {}, "interactive"),
        (8, {}, "interactive"),
        (9, {}, "bulk"),
        (1, {"lane": "bulk"}, "bulk"),
        (300, {"lane": "interactive"}, "interactive"),
    ],
)
def test_a_call_is_in_the_lane_that_a_request_would_be_in(
    open_model: OpenModel, count: int, options: dict[str, Any], lane: Lane
) -> None:
    engine = GatedEngine(LIMITS)
    model = open_model(engine)
    holder = threading.Thread(target=lambda: model.embed("hello world !"))
    holder.start()
    engine.wait_entered()  # from now on whatever comes waits
    asker = threading.Thread(target=lambda: model.embed(texts(count), **options))
    asker.start()

    def waiting() -> dict[Lane, int]:
        lanes = model._runner.service._port.stats().lanes
        return {name: stats.num_sequences for name, stats in lanes.items() if stats.num_sequences}

    wait_until(lambda: waiting() == {lane: count}, "all of it waits, and in this lane")
    engine.open()
    holder.join(DEADLINE_S)
    asker.join(DEADLINE_S)


def test_a_deadline_ends_a_call(open_model: OpenModel) -> None:
    model = open_model(GatedEngine(LIMITS))
    with pytest.raises(DeadlineExceededError):
        model.embed(texts(600), timeout_s=0.05)
    wait_until(lambda: model._runner.service.num_waiting == 0, "what waited is given back")


def test_a_closed_model_says_so_and_may_be_closed_again(open_model: OpenModel) -> None:
    with open_model(FakeEngine(LIMITS)) as model:
        model.embed(["cat"])
    assert not own_threads()
    with pytest.raises(ShuttingDownError, match="This Model is closed: make another one"):
        model.embed(["cat"])
    model.close()
    assert model.name == "tiny"


def test_calls_end_when_the_model_is_closed_under_them(open_model: OpenModel) -> None:
    engine = GatedEngine(LIMITS)
    model = open_model(engine)
    ends: list[BaseException] = []

    def call(count: int) -> None:
        try:
            model.embed(texts(count))
        except BaseException as error:
            ends.append(error)

    callers = [threading.Thread(target=call, args=(count,)) for count in (1, 20, 6000)]
    for caller in callers:
        caller.start()
    engine.wait_entered()
    closer = threading.Thread(target=model.close)
    closer.start()
    for caller in callers:
        caller.join(DEADLINE_S)  # while the engine is still in its step
    assert [type(end) for end in ends] == [ShuttingDownError] * 3
    assert {str(end) for end in ends} == {"This Model is closed: make another one."}
    engine.open()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert not own_threads()


def test_a_model_that_nobody_holds_ends_its_threads(open_model: OpenModel, artifact: Artifact) -> None:
    open_model(FakeEngine(LIMITS)).close()  # leaves the loader of engines in place
    stream = Model(artifact.path, tune="off").embed_iter(texts(600))
    next(stream)
    gc.collect()
    assert own_threads()  # the stream holds it
    del stream
    gc.collect()
    wait_until(lambda: not own_threads(), "its threads end")


def test_models_of_a_process_share_the_device_and_leave_it(open_model: OpenModel) -> None:
    gc.collect()
    wait_until(lambda: not own_threads(), "models of other tests have left")
    before = len(service_thread._device._users)
    models = [open_model(FakeEngine(LIMITS, num_streams)) for num_streams in (1, 2)]
    assert len(service_thread._device._users) == before + 2
    assert {len(model.embed(texts(50))) for model in models} == {50}
    for model in models:
        model.close()
    assert len(service_thread._device._users) == before


def test_a_load_that_fails_leaves_nothing(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> FakeEngine:
        raise EngineError("no such device")

    monkeypatch.setattr("bei.service.loader.load_engine", fail)
    with pytest.raises(EngineError, match="no such device"):
        Model(artifact.path)
    wait_until(lambda: not own_threads(), "its thread ends")
