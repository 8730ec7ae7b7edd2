"""BatchManager when its engine hangs: nothing is lost, doubled or waited for in vain.

The tests decide which step is overdue, not a clock; how long a step may take is tested by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set

import pytest

from bei.core import Engine, Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from bei.errors import DeadlineExceededError, EngineDeadError, EngineError
from bei.port import LANES, LaneStats
from bei.scheduler import batch_manager as managers
from bei.scheduler.device_gate import DeviceGate, Turn
from bei.scheduler.execution import Step
from bei.scheduler.queue import Entry
from tests.bei.scheduler.conftest import MakeFront
from tests.bei.scheduler.front import LIMITS, Front, fake_rows, metric, rows_of, wait_until
from tests.bei.scheduler.hanging import LateEngine, Reload, Watch
from tests.support.engines import GatedEngine, TokenEngine, sequences_of


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "_WATCH_EVERY_S", 0.002)


def test_what_an_engine_that_hangs_had_is_run_once_more_and_answered_once(
    make_front: MakeFront, hung: LateEngine
) -> None:
    engine = FakeEngine(LIMITS)
    reload = Reload(engine)
    front = make_front(hung, reload=reload)
    watch = Watch(front)
    request = front.submit([1, 2], [3])
    hung.wait_entered()
    (worker,) = front.manager._workers
    queued = front.submit([4])
    watch.finds(1)
    front.wait(request, queued)
    assert (rows_of(request), rows_of(queued)) == (fake_rows([[1, 2], [3]]), fake_rows([[4]]))
    hung.open()
    worker.thread.join()
    front.wait(front.submit([5]))
    assert (request.num_answers, queued.num_answers, reload.count) == (2, 1, 1)
    assert metric(front, "bei_engine_restarts_total") == 1
    stats = front.manager.stats()
    assert stats.is_alive
    assert not stats.is_stalled


def test_an_engine_that_was_given_up_is_closed_once_by_its_last_thread(make_front: MakeFront) -> None:
    engine = LateEngine(LIMITS, num_streams=2)
    front = make_front(engine, reload=Reload(FakeEngine(LIMITS, num_streams=2)))
    watch = Watch(front)
    threads = [worker.thread for worker in front.manager._workers]
    requests = []
    for value in (1, 2):
        requests.append(front.submit([value]))
        engine.wait_entered()
    watch.finds(1)
    front.wait(*requests)
    assert engine.num_closed == 0  # threads are inside
    engine.let_one_through()
    wait_until(lambda: sum(thread.is_alive() for thread in threads) == 1, "one returns")
    assert engine.num_closed == 0
    engine.open()
    for thread in threads:
        thread.join()
    front.close()
    assert engine.num_closed == 1


def test_an_engine_that_cannot_be_closed_after_it_was_given_up_harms_nobody(
    make_front: MakeFront, hung: LateEngine, caplog: pytest.LogCaptureFixture
) -> None:
    front = make_front(hung, reload=Reload(FakeEngine(LIMITS)))
    watch = Watch(front)
    request = front.submit([1])
    hung.wait_entered()
    (worker,) = front.manager._workers
    watch.finds(1)
    front.wait(request)
    hung.close_error = RuntimeError("no")
    hung.open()
    worker.thread.join()
    front.wait(front.submit([2]))
    assert "an engine that was given up could not be closed" in caplog.text
    assert front.manager.stats().is_alive


def test_a_sequence_that_hangs_a_second_time_is_an_error_of_those_beside_it_alone(
    make_front: MakeFront, hung: LateEngine
) -> None:
    second, third = GatedEngine(LIMITS), FakeEngine(LIMITS)
    front = make_front(hung, reload=Reload(second, third))
    watch = Watch(front)
    guilty = front.submit([1])
    hung.wait_entered()
    watch.finds(1)
    second.wait_entered()
    innocent = front.submit([2])
    watch.finds(1)
    front.wait(guilty, innocent)
    second.open()
    assert type(guilty.error) is EngineError
    assert rows_of(innocent) == fake_rows([[2]])
    assert third.batches
    assert front.manager.stats().is_alive


def test_one_that_joins_a_step_that_hangs_again_is_still_run_once_more(make_front: MakeFront, hung: LateEngine) -> None:
    second, third = GatedEngine(LIMITS), FakeEngine(LIMITS)
    reload = Reload(second, third, waits=True)
    front = make_front(hung, reload=reload)
    watch = Watch(front)
    guilty = front.submit([1])
    hung.wait_entered()
    watch.finds(1)
    beside = front.submit([2])  # runs with the replayed one
    reload.may.set()
    second.wait_entered()
    assert sorted(sequences_of(second.batches[0])) == [[1], [2]]
    watch.finds(1)
    front.wait(guilty, beside)
    second.open()
    assert type(guilty.error) is EngineError
    assert rows_of(beside) == fake_rows([[2]])


def test_an_engine_that_was_given_up_runs_nothing_again(make_front: MakeFront) -> None:
    class Fails(LateEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            super().run(batch, outputs)
            raise RuntimeError

    engine = Fails(LIMITS)
    front = make_front(engine, reload=Reload(FakeEngine(LIMITS)))
    watch = Watch(front)
    request = front.submit([1], [2], [3])
    engine.wait_entered()
    (worker,) = front.manager._workers
    watch.finds(1)
    front.wait(request)
    engine.open()
    worker.thread.join()
    assert len(engine.batches) == 1
    assert rows_of(request) == fake_rows([[1], [2], [3]])


class _Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [RuntimeError, _Panic, None])
def test_an_engine_that_cannot_be_replaced_is_dead(
    make_front: MakeFront, hung: LateEngine, error: type[BaseException] | None
) -> None:
    def reload() -> Engine:
        assert error is not None
        raise error("no memory")

    front = make_front(hung, reload=reload if error else None)
    watch = Watch(front)
    requests = [front.submit([1])]
    hung.wait_entered()
    requests += [front.submit([2], lane="interactive"), front.submit([3], [4])]
    watch.finds(1)
    front.wait(*requests)
    assert all(type(request.error) is EngineDeadError for request in requests)
    assert [request.num_answers for request in requests] == [1, 1, 2]
    with pytest.raises(EngineDeadError, match="could not be replaced: restart the server"):
        front.submit([5])
    stats = front.manager.stats()
    assert not stats.is_alive
    assert stats.lanes == dict.fromkeys(LANES, LaneStats(0, 0, 0.0))
    front.close()  # although a thread is still inside the engine
    assert hung.num_closed == 0


def test_engines_that_hang_one_after_the_other_are_given_up(make_front: MakeFront, hung: LateEngine) -> None:
    assert managers._MOST_RESTARTS == 3
    engines = [GatedEngine(LIMITS) for _ in range(3)]
    reload = Reload(*engines)
    front = make_front(hung, reload=reload)
    watch = Watch(front)
    requests = {value: front.submit([value]) for value in (1,)}
    for value, engine in zip((1, 1, 2, 2), (hung, *engines), strict=True):  # each runs twice
        if value not in requests:
            requests[value] = front.submit([value])
        engine.wait_entered()
        if engine is engines[-1]:
            requests[3] = front.submit([3])
        watch.finds(value)
    front.wait(*requests.values())
    for engine in engines:
        engine.open()
    assert [type(request.error) for request in requests.values()] == [EngineError, EngineError, EngineDeadError]
    assert reload.count == 3


def test_while_the_engine_is_replaced_work_is_accepted_and_the_state_says_so(
    make_front: MakeFront, hung: LateEngine
) -> None:
    reload = Reload(FakeEngine(LIMITS), waits=True)
    front = make_front(hung, reload=reload)
    watch = Watch(front)
    request = front.submit([1])
    hung.wait_entered()
    watch.finds(1)
    wait_until(lambda: reload.count == 1, "it is loaded")
    assert front.manager.stats().is_stalled
    twin, other = front.submit([1]), front.submit([2])
    reload.may.set()
    front.wait(request, twin, other)
    assert not front.manager.stats().is_stalled
    assert rows_of(twin) == fake_rows([[1]])


def test_closing_while_the_engine_is_replaced_answers_everything(hung: LateEngine) -> None:
    engine = GatedEngine(LIMITS)
    reload = Reload(engine, waits=True)
    front = Front(hung, reload=reload)
    watch = Watch(front)
    requests = [front.submit([1])]
    hung.wait_entered()
    requests.append(front.submit(*([10 + i] for i in range(20))))
    watch.finds(1)
    wait_until(lambda: reload.count == 1, "it is loaded")
    looks: list[None] = []
    unfinished = front.manager._unfinished

    def look() -> threading.Thread | None:
        looks.append(None)
        return unfinished()

    front.manager._unfinished = look  # type: ignore[method-assign]
    closing = threading.Thread(target=front.close)
    closing.start()
    wait_until(lambda: len(looks) > 1, "it closes")
    reload.may.set()
    engine.wait_entered()
    seen = len(looks)
    wait_until(lambda: len(looks) > seen + 2, "it still waits")
    engine.open()
    closing.join()
    front.wait(*requests)
    assert rows_of(requests[1]) == fake_rows([[10 + i] for i in range(20)])


def test_a_step_that_ends_in_the_moment_it_is_given_up_costs_no_other_step_its_answer(
    make_front: MakeFront,
) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine, reload=Reload(FakeEngine(LIMITS)))
    watch = Watch(front)
    first = front.submit([1])
    engine.wait_entered()
    second = front.submit([2])
    (worker,) = front.manager._workers

    def restarted() -> None:
        """The step ends; where the engine is still in use, the next one begins."""
        engine.let_one_through()
        wait_until(lambda: len(engine.batches) == 2 or not worker.thread.is_alive(), "it goes on")

    front.manager._metrics.engine_restarted = restarted  # type: ignore[method-assign]
    watch.finds(1)
    front.wait(first, second)
    engine.open()
    assert rows_of(first) == fake_rows([[1]])
    assert rows_of(second) == fake_rows([[2]])
    assert first.num_answers == second.num_answers == 1


def test_steps_on_other_streams_of_an_engine_that_hangs_are_run_again_too(make_front: MakeFront) -> None:
    engine, second = LateEngine(LIMITS, num_streams=2), FakeEngine(LIMITS, num_streams=2)
    reload = Reload(second)
    front = make_front(engine, reload=reload)
    watch = Watch(front)
    requests = []
    for value in (1, 2):
        requests.append(front.submit([value]))
        engine.wait_entered()
    watch.finds(1)
    front.wait(*requests)
    engine.open(2)
    front.wait(front.submit([3]))
    assert [rows_of(request) for request in requests] == [fake_rows([[1]]), fake_rows([[2]])]
    assert [request.num_answers for request in requests] == [1, 1]
    assert reload.count == 1


def test_what_was_cancelled_or_has_expired_meanwhile_is_not_run_again(make_front: MakeFront, hung: LateEngine) -> None:
    engine = FakeEngine(LIMITS)
    reload = Reload(engine, waits=True)
    front = make_front(hung, reload=reload)
    watch = Watch(front)
    leaves, kept = front.submit([1], lane="interactive"), front.submit([2])
    hung.wait_entered()
    watch.finds(1)
    late = front.submit([3], in_s=0.0)
    front.cancel(leaves)
    reload.may.set()
    front.wait(kept, late)
    assert isinstance(late.error, DeadlineExceededError)
    assert leaves.num_answers == 0
    assert [sequences_of(batch) for batch in engine.batches] == [[[2]]]
    assert front.manager._entries_of == {}


def test_a_lost_sequence_joins_its_twin_that_wants_other_outputs(make_front: MakeFront, hung: LateEngine) -> None:
    engine = TokenEngine(LIMITS)
    reload = Reload(engine, waits=True)
    front = make_front(hung, reload=reload)
    watch = Watch(front)
    first = front.submit([1], outputs={"embedding"})
    hung.wait_entered()
    second = front.submit([1], outputs={"token_ids"})
    watch.finds(1)
    reload.may.set()
    front.wait(first, second)
    assert [set(request.rows[0] or ()) for request in (first, second)] == [{"embedding"}, {"token_ids"}]
    assert len(engine.batches) == 1
    assert front.manager._entries_of == {}


def test_a_model_whose_engine_hangs_does_not_keep_the_device_from_the_others(
    make_front: MakeFront, hung: LateEngine
) -> None:
    gate = DeviceGate()
    reload = Reload(FakeEngine(LIMITS), waits=True)
    front, other = make_front(hung, gate=gate, reload=reload), make_front(FakeEngine(LIMITS), gate=gate)
    watch = Watch(front)
    request = front.submit([1])
    hung.wait_entered()
    answered = other.submit([2])
    watch.finds(1)
    other.wait(answered)
    reload.may.set()
    front.wait(request)


# What is taken to hang


def step_of(predicted_s: float) -> Step:
    entries: list[Entry] = []
    return Step(entries, predicted_s, Turn(DeviceGate().join(1, lambda: False, lambda: 0.01)))


def ticks_until_overdue(front: Front, step: Step, most: int) -> int | None:
    """How often the watchdog looks before it takes ``step`` to hang."""
    return next((tick for tick in range(1, most) if front.manager._is_overdue(step)), None)


@pytest.fixture
def idle(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Front]:
    monkeypatch.setattr(managers, "_WATCH_EVERY_S", 0.25)
    return lambda **options: make_front(FakeEngine(LIMITS), **options)


@pytest.mark.parametrize(("predicted_s", "ticks"), [(0.001, 41), (1.0, 81)])
def test_a_step_is_overdue_after_the_least_time_and_a_multiple_of_what_was_predicted(
    idle: Callable[..., Front], predicted_s: float, ticks: int
) -> None:
    assert ticks_until_overdue(idle(hang_timeout_s=10.0), step_of(predicted_s), 1000) == ticks


def test_without_a_hang_timeout_nothing_is_overdue(idle: Callable[..., Front]) -> None:
    assert ticks_until_overdue(idle(hang_timeout_s=0.0), step_of(0.001), 10_000) is None


def test_a_process_that_was_stopped_for_an_hour_has_no_overdue_step(idle: Callable[..., Front]) -> None:
    """The watchdog counts its own ticks, and it was stopped too; the clock went on."""
    step = step_of(0.001)
    step.started_s = time.monotonic() - 3600
    assert ticks_until_overdue(idle(hang_timeout_s=10.0), step, 1000) == 41


def test_a_slow_healthy_step_is_left_alone(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    reload = Reload()
    front = make_front(engine, reload=reload, hang_timeout_s=3600.0)
    request = front.submit([1])
    engine.wait_entered()
    (worker,) = front.manager._workers
    step = worker.step
    assert step is not None
    wait_until(lambda: step.watched_s > 0.02, "the watchdog has looked at it")
    assert not front.manager.stats().is_stalled
    engine.open()
    front.wait(request)
    assert reload.count == 0
