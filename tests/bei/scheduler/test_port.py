"""Whatever happens to an engine port, each item is answered once or was cancelled. A stateful test.

``tests.bei.multiprocess.remote.test_port_laws`` holds ports in other processes to it, too.

The engine stands still between the steps of the machine: each run waits until it is let through, and each step of the
machine waits until the port has nothing more to do by itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence, Set
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bei.core import Encoding, Engine, Limits, Outputs, PackedBatch
from bei.errors import BeiError, DeadlineExceededError, EngineError, NonFiniteOutputError
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import LANES, Answer, EnginePort, Item, Lane, LaneStats, OnAnswers, Submission
from bei.scheduler import batch_manager as managers
from bei.scheduler import scheduler as schedulers
from bei.scheduler.batch_manager import BatchManager
from bei.scheduler.cost_model import CostModel
from bei.scheduler.execution import Step
from bei.scheduler.lane_shares import full_step_s
from bei.scheduler.queue import Entry, Waiter
from bei.scheduler.scheduler import SchedulingRules
from tests.bei.scheduler.front import wait_until
from tests.support.engines import DEADLINE_S, TokenEngine, ids, sequences_of, token_rows

LIMITS = Limits(max_num_tokens=24, max_batch_size=3, max_seq_len=8)
RAISES, NAN = 8, 9  # token ids; others are below
OUTPUTS = (frozenset({"embedding"}), frozenset({"token_ids"}), frozenset({"embedding", "token_ids"}))

# Equal sequences, and others.
_COMMON = [[1], [2, 2], [3] * 8, [RAISES], [4, NAN]]
_sequences = st.one_of(st.sampled_from(_COMMON), st.lists(st.integers(0, 9), min_size=1, max_size=8))

_Place = tuple[int, int]


class SteppedEngine(TokenEngine):
    """Each run waits for ``go``. Raises and answers NaN where the ids say so.

    A batch beyond the limits is one of the ``problems``: the manager would take an exception for a poisonous sequence.
    """

    def __init__(self, arrived: queue.SimpleQueue[SteppedEngine], problems: list[str]) -> None:
        super().__init__(LIMITS, poison_id=NAN)
        self._arrived = arrived
        self._problems = problems
        self.go = threading.Semaphore(0)

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        if batch.num_tokens > LIMITS.max_num_tokens or batch.batch_size > LIMITS.max_batch_size:
            self._problems.append(f"a batch of {batch.batch_size} sequences has {batch.num_tokens} tokens")
        self._arrived.put(self)
        assert self.go.acquire(timeout=DEADLINE_S)
        rows = super().run(batch)
        if any(RAISES in sequence for sequence in sequences_of(batch)):
            raise RuntimeError("poison")
        embedding = rows["embedding"].copy()
        embedding[[NAN in sequence for sequence in sequences_of(batch)]] = np.nan
        computed = {"embedding": embedding, "token_ids": rows["token_ids"]}
        return {name: values for name, values in computed.items() if outputs is None or name in outputs}


class Port(RuleBasedStateMachine):
    """One manager, its engines and everything that was submitted, by way of ``port``."""

    port: EnginePort

    def opened(self, open_manager: Callable[[OnAnswers], BatchManager]) -> EnginePort:
        """What the requests go to: the manager itself."""
        return open_manager(self.on_answers)

    def place_of(self, waiter: Waiter) -> _Place:
        """What the manager knows as ``waiter``."""
        return waiter.request_id, waiter.place

    def is_up_to_date(self) -> bool:
        """Whether the port's state is the manager's."""
        return True

    @initialize(
        num_cached=st.sampled_from([0, 0, 100_000]),
        share=st.sampled_from([0.0, 0.3]),
        full_step=st.sampled_from([1.0, 0.25]),
    )
    def begin(self, num_cached: int, share: float, full_step: float) -> None:
        step_s = full_step * full_step_s(CostModel.assumed(LIMITS), LIMITS)
        self._sooner = mock.patch.object(schedulers, "full_step_s", return_value=step_s)  # flows share sooner
        self._sooner.start()
        self._often = mock.patch.object(managers, "_WATCH_EVERY_S", 0.001)
        self._often.start()
        self.arrived: queue.SimpleQueue[SteppedEngine] = queue.SimpleQueue()
        self.problems: list[str] = []
        self.engines = [SteppedEngine(self.arrived, self.problems)]
        self.running: SteppedEngine | None = None
        self.items: dict[_Place, tuple[Submission, Item]] = {}
        self.expected: set[_Place] = set()
        self.answers: dict[_Place, object] = {}
        self.num_requests = 0

        self.may_hang: set[_Place] = set()
        self.overdue = threading.Semaphore(0)
        rules = SchedulingRules(bulk_share=share, cache_bytes=num_cached)

        def open_manager(on_answers: OnAnswers) -> BatchManager:
            costs, metrics = CostModel.assumed(LIMITS), ModelMetrics(Metrics(), "tiny")
            self.manager = BatchManager(self.engines[0], on_answers, costs, metrics, rules=rules, reload=self.reload)
            self.manager._is_overdue = self.is_overdue  # type: ignore[method-assign]
            return self.manager

        self.port = self.opened(open_manager)

    def is_overdue(self, step: Step) -> bool:
        return self.overdue.acquire(blocking=False)

    def reload(self) -> Engine:
        self.engines.append(SteppedEngine(self.arrived, self.problems))
        return self.engines[-1]

    def on_answers(self, answers: Sequence[Answer]) -> None:
        for request_id, place, result, _ in answers:
            if (request_id, place) in self.answers:
                self.problems.append(f"{request_id}, {place} was answered twice")
            self.answers[request_id, place] = result

    # What may happen.

    @rule(
        values=st.lists(_sequences, min_size=1, max_size=5),
        lane=st.sampled_from(LANES),
        outputs=st.sampled_from(OUTPUTS),
        in_s=st.sampled_from([None, None, 0.0, 1000.0]),
        again=st.booleans(),
    )
    def submit(self, values: list[list[int]], lane: Lane, outputs: frozenset[str], in_s: float | None, again: bool):  # type: ignore[no-untyped-def]
        if not again or not self.num_requests:
            self.num_requests += 1
        request_id = self.num_requests
        first = max((place for number, place in self.items if number == request_id), default=-1) + 1
        items = [Item(first + index, Encoding(ids(*given))) for index, given in enumerate(values)]
        deadline_s = None if in_s is None else time.monotonic() + in_s
        submission = Submission(request_id, lane, outputs, items, deadline_s, request_id % 3)
        places = {(request_id, item.place) for item in items}
        for item in items:
            self.items[request_id, item.place] = (submission, item)
        self.expected |= places
        self.port.submit(submission)
        self.settle()

    # What is drawn does not depend on what threads have done meanwhile: rules that make no sense do nothing.

    @rule(number=st.integers(0, 5))
    def cancel(self, number: int) -> None:
        waiting = sorted({request_id for request_id, _ in self.expected - set(self.answers)})
        if not waiting:
            return
        request_id = waiting[number % len(waiting)]
        self.port.cancel(request_id)
        self.expected -= {place for place in self.expected - set(self.answers) if place[0] == request_id}
        self.settle()

    @rule(count=st.integers(1, 4))
    def let_through(self, count: int) -> None:
        for _ in range(count):
            if self.running is not None:
                engine, self.running = self.running, None
                engine.go.release()
                self.settle()

    @rule()
    def hang(self) -> None:
        """The fourth in a row is the end of the port: here at most two come without a step that ends."""
        if self.running is None or self.manager._num_hangs >= 2:
            return
        (worker,) = self.manager._workers
        assert worker.step is not None
        self.may_hang |= {self.place_of(waiter) for entry in worker.step.entries for waiter in entry.waiters}
        late, self.running, count = self.running, None, len(self.engines)
        self.overdue.release()
        wait_until(lambda: len(self.engines) > count, "the engine is replaced")
        assert late is not None
        late.go.release(1000)  # its answer comes late
        self.settle()

    def settle(self) -> None:
        """Return when the engine waits at its gate, or nothing is left to do; and what is done has been delivered."""

        def is_settled() -> bool:
            while not self.arrived.empty():
                engine = self.arrived.get()
                if engine is self.engines[-1]:
                    self.running = engine
            stats = self.manager.stats()
            if stats.is_stalled:
                return False
            with self.manager._lock:
                entries = set[Entry]().union(*self.manager._entries_of.values())
                waiters = [waiter for entry in entries for waiter in entry.waiters]
            waiting = {self.place_of(waiter) for waiter in waiters}
            if waiting != self.expected - set(self.answers) or not self.is_up_to_date():
                return False
            return self.running is not None or (not stats.is_busy and not waiting)

        wait_until(is_settled, "the port works on what it has")

    # What must hold at any moment.

    @invariant()
    def no_item_is_answered_twice_or_without_being_asked_and_no_batch_exceeds_the_limits(self) -> None:
        assert self.problems == []
        assert set(self.answers) <= set(self.items)

    @invariant()
    def an_idle_engine_means_an_empty_queue(self) -> None:
        stats = self.port.stats()
        if self.running is None:
            assert stats.lanes == dict.fromkeys(LANES, LaneStats(0, 0, 0.0))
            assert self.expected <= set(self.answers)

    @invariant()
    def the_queue_is_no_more_than_what_is_expected(self) -> None:
        lanes = self.port.stats().lanes
        missing = self.expected - set(self.answers)
        assert sum(lane.num_sequences for lane in lanes.values()) <= len(missing)
        assert sum(lane.num_tokens for lane in lanes.values()) <= sum(
            self.items[place][1].encoding.num_tokens for place in missing
        )
        assert all((lane.cost_s > 0) == (lane.num_sequences > 0) for lane in lanes.values())

    @invariant()
    def every_answer_is_the_right_one(self) -> None:
        for place, result in list(self.answers.items()):
            submission, item = self.items[place]
            self.check(place, submission, item.encoding.input_ids.tolist(), result)

    def check(self, place: _Place, submission: Submission, values: list[int], result: object) -> None:
        if isinstance(result, DeadlineExceededError):
            assert submission.deadline_s is not None
            assert submission.deadline_s <= time.monotonic()
        elif isinstance(result, NonFiniteOutputError):
            assert NAN in values
            assert RAISES not in values
        elif isinstance(result, BeiError):
            assert type(result) is EngineError
            assert RAISES in values or place in self.may_hang
        else:
            assert isinstance(result, dict)
            assert set(result) == submission.outputs
            assert not {RAISES, NAN} & set(values)
            if "token_ids" in result:
                np.testing.assert_array_equal(result["token_ids"], token_rows(ids(*values)))
            if "embedding" in result:
                assert result["embedding"][:2].tolist() == [len(values), values[0]]

    def teardown(self) -> None:
        """Close: everything that waits is answered first. Then nothing is left."""
        if not hasattr(self, "manager"):
            return
        for engine in self.engines:
            engine.go.release(10_000)
        self.close()
        self._often.stop()
        self._sooner.stop()
        assert self.expected <= set(self.answers)
        self.no_item_is_answered_twice_or_without_being_asked_and_no_batch_exceeds_the_limits()
        self.every_answer_is_the_right_one()
        assert self.manager._entries_of == {}
        assert self.manager._running == {}
        stats = self.port.stats()
        assert not stats.is_alive
        stats = self.manager.stats()
        assert stats.lanes == dict.fromkeys(LANES, LaneStats(0, 0, 0.0))
        assert not stats.is_busy

    def close(self) -> None:
        """Run and answer everything."""
        self.port.close()


TestPort = Port.TestCase
TestPort.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
