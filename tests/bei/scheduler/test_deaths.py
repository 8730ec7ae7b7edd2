"""BatchManager when its threads die: what waits hears of it, and what comes is refused."""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set

import pytest

from bei.core import Engine, Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from bei.errors import EngineDeadError, EngineError
from bei.port import LANES, Answer, LaneStats
from bei.scheduler import batch_manager as managers
from bei.scheduler.device_gate import DeviceGate
from bei.scheduler.execution import Done
from tests.bei.scheduler.conftest import MakeFront
from tests.bei.scheduler.front import LIMITS, Front, fake_rows, rows_of, wait_until
from tests.bei.scheduler.hanging import LateEngine, Reload, Watch
from tests.support.engines import DEADLINE_S, GatedEngine


class _Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "_WATCH_EVERY_S", 0.002)


class DyingEngine(FakeEngine):
    """Ends the thread that runs a sequence with this id."""

    def __init__(self, limits: Limits, poison_id: int, error: type[BaseException]) -> None:
        super().__init__(limits)
        self._poison_id, self._error = poison_id, error
        self.entered, self.may = threading.Event(), threading.Event()

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        answers = super().run(batch)
        if self._poison_id in batch.input_ids:
            self.entered.set()
            self.may.wait()
            raise self._error
        return answers


@pytest.mark.parametrize("error", [SystemExit, _Panic, KeyboardInterrupt])
def test_a_dead_engine_thread_fails_what_waits_and_refuses_what_comes(
    make_front: MakeFront, error: type[BaseException]
) -> None:
    engine = DyingEngine(LIMITS, 9, error)
    reload = Reload()
    front = make_front(engine, reload=reload)
    before = front.submit([1])
    front.wait(before)
    requests = [front.submit([9])]
    engine.entered.wait()
    requests += [front.submit([2], [3]), front.submit([4], lane="interactive")]
    engine.may.set()
    front.wait(*requests)
    assert all(type(request.error) is EngineDeadError for request in requests)
    assert error.__name__ in str(requests[0].error)
    assert rows_of(before) == fake_rows([[1]])
    with pytest.raises(EngineDeadError, match="restart the server"):
        front.submit([5])
    stats = front.manager.stats()
    assert not stats.is_alive
    assert not stats.is_busy  # nor is its step watched: another engine would not help
    assert stats.lanes == dict.fromkeys(LANES, LaneStats(0, 0, 0.0))
    front.close()
    assert reload.count == 0


def test_a_thread_that_dies_after_its_engine_was_replaced_harms_nobody(make_front: MakeFront) -> None:
    engine = DyingEngine(LIMITS, 1, SystemExit)
    front = make_front(engine, reload=Reload(FakeEngine(LIMITS)))
    watch = Watch(front)
    request = front.submit([1])
    engine.entered.wait()
    (worker,) = front.manager._workers
    watch.finds(1)
    front.wait(request)
    engine.may.set()
    worker.thread.join()
    after = front.submit([2])
    front.wait(after)
    assert rows_of(after) == fake_rows([[2]])
    assert front.manager.stats().is_alive


def test_a_front_that_raises_costs_others_no_answer(make_front: MakeFront) -> None:
    front = make_front(FakeEngine(LIMITS))
    answered = front.manager._on_answers
    has_failed = threading.Event()

    def on_answers(answers: Sequence[Answer]) -> None:
        if not has_failed.is_set():
            has_failed.set()
            raise RuntimeError("a bug")
        answered(answers)

    front.manager._on_answers = on_answers
    lost = front.submit([1])
    wait_until(has_failed.is_set, "the first answer was dropped")
    request = front.submit([2])
    front.wait(request)
    assert lost.num_answers == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_port_that_cannot_deliver_is_not_alive() -> None:
    front = Front(FakeEngine(LIMITS))

    def on_answers(answers: Sequence[Answer]) -> None:
        raise _Panic

    front.manager._on_answers = on_answers
    front.submit([1])
    wait_until(lambda: not front.manager.stats().is_alive, "it is dead")
    front.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watchdog_that_dies_is_the_end_of_the_port(make_front: MakeFront, hung: LateEngine) -> None:
    front = make_front(hung, reload=Reload(FakeEngine(LIMITS)))
    watch = Watch(front)

    def start_workers(engine: Engine) -> None:
        raise RuntimeError("can't start new thread")

    front.manager._start_workers = start_workers  # type: ignore[method-assign]
    request = front.submit([1])
    hung.wait_entered()
    watch.finds(1)
    front.wait(request)
    assert type(request.error) is EngineDeadError
    assert not front.manager.stats().is_alive


class DeadAndHanging(LateEngine):
    """The GPU is lost to one stream, and the other does not come back."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        if 9 in batch.input_ids:
            raise EngineDeadError("The GPU is lost: restart the server.")
        return super().run(batch, outputs)


def test_a_stream_that_hangs_on_a_dead_engine_is_given_up_so_that_the_port_can_be_closed() -> None:
    engine, reload, gate = DeadAndHanging(LIMITS, num_streams=2), Reload(), DeviceGate()
    front = Front(engine, gate=gate, reload=reload)
    watch = Watch(front)
    requests = [front.submit([1])]
    engine.wait_entered()
    requests.append(front.submit([9]))
    front.wait(*requests)
    assert all("GPU is lost" in str(request.error) for request in requests)
    closing = threading.Thread(target=front.close, daemon=True)
    closing.start()
    watch.finds(1)
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert (reload.count, engine.num_closed) == (0, 0)  # a thread is still inside
    assert gate._free == 0  # the engine has left with both turns
    engine.open()
    wait_until(lambda: engine.num_closed == 1, "its last thread closes it")


def test_answers_that_cannot_be_made_are_errors_of_their_step_alone(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = make_front(FakeEngine(LIMITS))
    with monkeypatch.context() as patch:
        made: list[object] = []

        def part_of(answer: object, outputs: object) -> object:
            made.append(answer)
            if len(made) == 2:  # after one that could be made
                raise MemoryError
            return answer

        patch.setattr(managers, "part_of", part_of)
        request = front.submit([1], [2], [3])
        front.wait(request)
    assert type(request.error) is EngineError
    assert (request.num_answers, request.rows) == (3, [None] * 3)
    after = front.submit([4])
    front.wait(after)
    assert rows_of(after) == fake_rows([[4]])
    assert front.manager._entries_of == {}
    assert front.manager._running == {}


def test_a_delivery_thread_that_fails_fails_what_waits_and_refuses_what_comes(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    settled = front.manager._settled
    failed: list[str] = []

    def settle(done: Done) -> list[Answer]:
        if not failed:
            failed.append(threading.current_thread().name)
            raise _Panic
        return settled(done)

    front.manager._settled = settle  # type: ignore[method-assign]
    requests = [front.submit([1])]
    engine.wait_entered()
    requests += [front.submit([2], [3]), front.submit([4], lane="interactive")]
    engine.let_one_through()  # others wait: the delivery thread has to deliver the first
    front.wait(*requests)
    assert failed == ["bei-delivery"]
    assert all(type(request.error) is EngineDeadError for request in requests)
    with pytest.raises(EngineDeadError, match="Answers cannot be delivered"):
        front.submit([5])
    assert not front.manager.stats().is_alive
