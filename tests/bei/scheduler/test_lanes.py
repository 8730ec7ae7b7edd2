"""BatchManager: lanes, deadlines, outputs and sharing, with an engine that waits for the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence, Set
from math import inf

import numpy as np
import pytest

from bei.core import Encoding, Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from bei.errors import DeadlineExceededError, ShuttingDownError
from bei.port import LANES, UNIT_EMBEDDING, Lane, LaneStats
from bei.scheduler import device_gate as gates
from bei.scheduler import queue
from bei.scheduler import scheduler as scheduling
from bei.scheduler.device_gate import DeviceGate
from bei.scheduler.lane_shares import ServedShares
from bei.scheduler.queue import Entry, Waiter
from tests.bei.scheduler.conftest import MakeFront
from tests.bei.scheduler.front import LIMITS, Front, fake_rows, metric, rows_of, wait_until
from tests.support.engines import GatedEngine, TokenEngine, ids, sequences_of

NOTHING = dict.fromkeys(LANES, LaneStats(0, 0, 0.0))


class AskedEngine(GatedEngine):
    """A gated TokenEngine that computes what it is asked for, and remembers what that was."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._tokens = TokenEngine(limits)
        self.info = self._tokens.info
        self.asked: list[Set[str] | None] = []

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        self.asked.append(outputs)
        super().run(batch)
        return {name: rows for name, rows in self._tokens.run(batch).items() if outputs is None or name in outputs}


# Lanes


def test_interactive_work_overtakes_bulk_work(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine, bulk_share=0.0)
    requests = [front.submit([1])]
    engine.wait_entered()
    requests.append(front.submit(*([10 + i] * 16 for i in range(8))))
    requests.append(front.submit([2], lane="interactive"))
    engine.open()
    front.wait(*requests)
    assert [2] in sequences_of(engine.batches[1])


class EqualSteps(ServedShares):
    """As if each step took a second, and nothing were forgotten."""

    def add(self, now_s: float, seconds: float, entries: Sequence[Entry]) -> None:
        super().add(0.0, 1.0, entries)

    def recent_s(self, now_s: float) -> Mapping[Lane, float]:
        return super().recent_s(0.0)


@pytest.mark.parametrize(("share", "num_bulk"), [(0.25, 10), (0.5, 20)])
def test_bulk_work_gets_its_share_under_an_endless_stream_of_interactive_work(
    make_front: MakeFront, share: float, num_bulk: int
) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine, bulk_share=share, step_cap_s=1e-9)  # nothing rides along
    front.manager._scheduler.served = EqualSteps()
    front.submit([1], lane="interactive")
    engine.wait_entered()
    bulk = front.submit(*([1000 + i] * 16 for i in range(60)))
    for index in range(40):
        for number in range(8):  # more than a step holds
            front.submit([8 * index + number] * 16, lane="interactive")
        engine.let_one_through()
        engine.wait_entered()
    front.cancel(bulk)
    is_bulk = [sequences_of(batch)[0][0] >= 1000 for batch in engine.batches[1:]]
    assert abs(sum(is_bulk) - num_bulk) <= 1
    assert not any(all(is_bulk[start : start + 3]) for start in range(len(is_bulk)))


def test_steps_of_bulk_work_are_capped_while_interactive_work_may_come(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_EXPECTED_S", 3600.0)
    engine = GatedEngine(Limits(1024, 64, 16))
    front = make_front(engine, step_cap_s=1e-9)
    first = front.submit([1])
    engine.wait_entered()
    requests = [front.submit(*([10 + i] * 16 for i in range(6)))]
    engine.let_one_through()
    engine.wait_entered()
    assert engine.batches[-1].batch_size == 6  # nobody is in a hurry
    requests.append(front.submit(*([20 + i] * 16 for i in range(6))))
    requests.append(front.submit([2], lane="interactive"))
    engine.open()
    front.wait(first, *requests)
    assert [batch.batch_size for batch in engine.batches[2:]] == [1] * 7


# Deadlines


def test_the_earliest_deadline_of_a_lane_goes_first(make_front: MakeFront) -> None:
    engine = GatedEngine(Limits(16, 1, 16))
    front = make_front(engine)
    requests = [front.submit([1])]
    engine.wait_entered()
    for value, in_s in ((2, None), (3, 900.0), (4, 20.0), (5, 10.0)):  # the third waits no longer than the second
        requests.append(front.submit([value], in_s=in_s))
    engine.open()
    front.wait(*requests)
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[5]], [[4]], [[2]], [[3]]]


def test_what_has_expired_never_reaches_the_engine(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    late, in_time = front.submit([2], [3], in_s=0.0), front.submit([4], in_s=1000.0)
    engine.open()
    front.wait(first, late, in_time)
    assert isinstance(late.error, DeadlineExceededError)
    assert late.rows == [None, None]
    assert rows_of(in_time) == fake_rows([[4]])
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[4]]]
    assert metric(front, "bei_sequences_expired_total") == 2


def test_what_has_expired_behind_more_urgent_work_does_not_ride_along(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work without a deadline that has waited long is due before a deadline that has passed since."""
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    monkeypatch.setattr(queue, "PATIENCE_S", {"bulk": -1000.0})
    patient = front.submit([2])
    monkeypatch.undo()
    late = front.submit([3], in_s=0.0)
    engine.open()
    front.wait(first, patient, late)
    assert isinstance(late.error, DeadlineExceededError)
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[2]]]


def test_an_equal_sequence_without_a_deadline_is_answered_although_its_twin_has_expired(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    late, patient = front.submit([2], in_s=0.0), front.submit([2])
    engine.open()
    front.wait(first, late, patient)
    assert rows_of(patient) == fake_rows([[2]])
    assert late.num_answers == 1


# Outputs


def test_a_step_computes_what_its_sequences_ask_for_and_each_gets_its_own(make_front: MakeFront) -> None:
    engine = AskedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1], outputs={UNIT_EMBEDDING})
    engine.wait_entered()
    dense, tokens = front.submit([2], outputs={"embedding"}), front.submit([3], outputs={"token_ids"})
    engine.open()
    front.wait(first, dense, tokens)
    assert engine.asked == [{"embedding"}, {"embedding", "token_ids"}]
    found = [{name for row in request.rows if row for name in row} for request in (first, dense, tokens)]
    assert found == [{UNIT_EMBEDDING}, {"embedding"}, {"token_ids"}]


def test_equal_sequences_share_a_computation_and_each_gets_the_outputs_it_asked_for(make_front: MakeFront) -> None:
    engine = AskedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    twins = [front.submit([2], outputs=outputs) for outputs in ({"embedding"}, {"token_ids"})]
    engine.open()
    front.wait(first, *twins)
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[2]]]
    assert [set(twin.rows[0] or ()) for twin in twins] == [{"embedding"}, {"token_ids"}]


def test_a_sequence_on_the_engine_is_shared_only_by_who_asks_for_no_more(make_front: MakeFront) -> None:
    engine = AskedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1], outputs={"embedding"})
    engine.wait_entered()
    same, more = front.submit([1], outputs={"embedding"}), front.submit([1], outputs={"embedding", "token_ids"})
    assert front.num_waiting() == 1
    engine.open()
    front.wait(first, same, more)
    assert len(engine.batches) == 2
    assert set(more.rows[0] or ()) == {"embedding", "token_ids"}
    assert metric(front, "bei_sequences_shared_total", **{"from": "flight"}) == 1


# The cache


def test_what_was_computed_once_is_not_computed_again(make_front: MakeFront) -> None:
    engine = FakeEngine(LIMITS)
    front = make_front(engine, cache_bytes=1_000_000)
    for _ in range(3):
        request = front.submit([1, 2], [3])
        front.wait(request)
        assert rows_of(request) == fake_rows([[1, 2], [3]])
    assert sum(batch.batch_size for batch in engine.batches) == 2
    assert metric(front, "bei_sequences_shared_total", **{"from": "cache"}) == 4
    assert front.manager.stats().lanes == NOTHING


def test_without_a_cache_everything_is_computed_again(make_front: MakeFront) -> None:
    engine = FakeEngine(LIMITS)
    front = make_front(engine)
    for _ in range(2):
        front.wait(front.submit([1]))
    assert len(engine.batches) == 2


def test_hits_are_answered_even_if_the_manager_is_closed_in_the_same_moment() -> None:
    front = Front(FakeEngine(LIMITS), cache_bytes=1_000_000)
    front.wait(front.submit([1]))
    counted = front.manager._metrics.shared

    def shared(in_flight: int, cached: int) -> None:
        counted(in_flight=in_flight, cached=cached)
        front.manager.close()  # another thread might do it just now

    front.manager._metrics.shared = shared  # type: ignore[method-assign]
    hit = front.submit([1])
    assert hit.num_answers == 1


# Cancelling


def test_a_request_may_be_cancelled_at_any_moment(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    running = front.submit([1], [2])
    engine.wait_entered()
    queued = front.submit([3], lane="interactive")
    twin, kept = front.submit([1]), front.submit([5])
    for request in (queued, running, twin):
        front.cancel(request)
        front.cancel(request)  # once more: nothing happens
    assert front.num_waiting("interactive") == 0
    assert front.num_waiting() == 1
    engine.open()
    front.wait(kept)
    front.cancel(kept)  # answered already
    assert [request.num_answers for request in (running, queued, twin)] == [0, 0, 0]
    after = front.submit([6])
    front.wait(after)
    assert front.manager._entries_of == {}
    assert front.manager._running == {}
    assert front.manager.stats().lanes == NOTHING


# The state that is told


def test_the_state_follows_what_waits_and_runs(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    idle = front.manager.stats()
    assert (idle.lanes, idle.is_busy, idle.running_s, idle.last_step_s) == (NOTHING, False, 0.0, -inf)
    before_s = time.monotonic()
    requests = [front.submit([1])]
    engine.wait_entered()
    requests += [front.submit([2, 2], [3]), front.submit([4], lane="interactive")]
    stats = front.manager.stats()
    assert stats.is_busy
    assert {lane: lane_stats[:2] for lane, lane_stats in stats.lanes.items()} == {
        "interactive": (1, 1),
        "bulk": (2, 3),
    }
    assert all(lane_stats.cost_s > 0 for lane_stats in stats.lanes.values())
    engine.open()
    front.wait(*requests)
    wait_until(lambda: not front.manager.stats().is_busy, "idle")
    done = front.manager.stats()
    assert done.lanes == NOTHING
    assert before_s <= done.last_step_s <= time.monotonic()


def test_the_state_has_the_share_of_recent_time_in_which_interactive_work_ran(make_front: MakeFront) -> None:
    front = make_front(FakeEngine(LIMITS, num_streams=2))
    assert front.manager.stats().interactive_share == 0.0
    entry = Entry(Encoding(ids(1)), Waiter(0, 0, inf, frozenset()), "interactive", 0.0, 0.0)
    front.manager._scheduler.served.add(time.monotonic() + 3600.0, 2.0, [entry])  # nothing is forgotten meanwhile
    assert front.manager.stats().interactive_share == 0.5


def test_the_gauges_are_those_of_the_queue_and_nothing_after_the_end(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    front.submit([1])
    engine.wait_entered()
    front.submit([2, 2], [3])
    assert metric(front, "bei_queue_tokens", lane="bulk") == 3
    assert metric(front, "bei_queue_sequences", lane="bulk") == 2
    engine.open()
    front.close()
    assert metric(front, "bei_queue_tokens", lane="bulk") == 0


def test_steps_that_failed_do_not_teach_the_cost_model(make_front: MakeFront) -> None:
    class Failing(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            raise RuntimeError

    front = make_front(Failing(LIMITS))
    costs = front.manager._costs
    before = costs.seconds(16, 1, 16)
    front.wait(*(front.submit([index]) for index in range(20)))
    assert costs.seconds(16, 1, 16) == before
    good = make_front(FakeEngine(LIMITS))
    good.wait(good.submit([1]))
    wait_until(lambda: good.manager._costs.seconds(16, 1, 16) != before, "it has learned")


# Two models on one device


def test_models_that_share_a_device_run_one_step_at_a_time(make_front: MakeFront) -> None:
    gate = DeviceGate()
    engines = [GatedEngine(LIMITS), GatedEngine(LIMITS)]
    fronts = [make_front(engine, gate=gate) for engine in engines]
    first = fronts[0].submit([1])
    engines[0].wait_entered()
    assert [front.manager.stats().slowdown for front in fronts] == [1.0, 2.0]
    second = fronts[1].submit([2])
    wait_until(lambda: len(gate._waiting) == 1, "it stands in line")
    assert engines[1].batches == []
    assert [front.manager.stats().slowdown for front in fronts] == [2.0, 2.0]
    for engine in engines:
        engine.open()
    fronts[0].wait(first)
    fronts[1].wait(second)


def test_interactive_work_of_one_model_caps_the_steps_of_another_s_bulk_work(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_EXPECTED_S", 3600.0)
    gate = DeviceGate()
    limits = Limits(1024, 64, 16)
    bulk_engine, other_engine = GatedEngine(limits), FakeEngine(limits)
    bulk = make_front(bulk_engine, gate=gate, step_cap_s=1e-9)
    other = make_front(other_engine, gate=gate)
    request = bulk.submit([1])
    bulk_engine.wait_entered()
    rest = bulk.submit(*([10 + i] * 16 for i in range(4)))
    single = other.submit([2], lane="interactive")
    wait_until(lambda: len(gate._waiting) == 1, "it stands in line")
    bulk_engine.open()
    bulk.wait(request, rest)
    other.wait(single)
    assert [batch.batch_size for batch in bulk_engine.batches] == [1] * 5


def test_the_cap_of_a_model_s_steps_follows_the_short_texts_that_another_one_expects(
    make_front: MakeFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "_REMEASURE_EVERY_S", 0.0)
    gate = DeviceGate()
    images = make_front(FakeEngine(Limits(8192, 256, 64)), gate=gate).manager
    alone_s = images.stats().step_cap_s
    texts = gate.join(1, lambda: True, lambda: 1e-3 * alone_s)
    beside_s = images.stats().step_cap_s
    texts.leave()
    assert images.stats().step_cap_s == alone_s > 2 * beside_s


def test_a_model_is_closed_while_another_one_has_the_device(make_front: MakeFront) -> None:
    gate = DeviceGate()
    engine = GatedEngine(LIMITS)
    front = make_front(engine, gate=gate)
    running = front.submit([1])
    engine.wait_entered()
    idle = Front(FakeEngine(LIMITS), gate=gate)
    idle.close()
    with pytest.raises(ShuttingDownError):
        idle.submit([1])
    engine.open()
    front.wait(running)


def test_many_clients_in_both_lanes_over_two_models_get_their_own_answers(make_front: MakeFront) -> None:
    gate = DeviceGate()
    fronts = [make_front(FakeEngine(LIMITS, num_streams), gate=gate) for num_streams in (1, 2)]
    failures: list[BaseException] = []

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        front = fronts[number % 2]
        try:
            for _ in range(30):
                inputs = [rng.integers(0, 50, rng.integers(1, 16)).tolist() for _ in range(rng.integers(1, 6))]
                request = front.submit(*inputs, lane=LANES[int(rng.integers(2))])
                if rng.random() < 0.2:
                    front.cancel(request)
                    continue
                front.wait(request)
                assert rows_of(request) == fake_rows(inputs)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for front in fronts:
        wait_until(lambda front=front: not front.manager.stats().is_busy, "idle")  # type: ignore[misc]
        assert front.manager.stats().lanes == NOTHING
        assert front.manager._entries_of == {}
