"""LaneQueues: due order, twins, lanes, removal, expiry, and sums that come back to nothing."""

from __future__ import annotations

from collections.abc import Set
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bei.core import Encoding
from bei.port import LANES, Lane, LaneStats
from bei.scheduler.next_batch import QueueKey
from bei.scheduler.queue import _FEW, PATIENCE_S, Entry, LaneQueues, Waiter
from tests.support.engines import ids

DENSE: frozenset[str] = frozenset({"embedding"})


def entry(
    *values: int, lane: Lane = "bulk", at_s: float = 0.0, deadline_s: float = inf, outputs: Set[str] = DENSE
) -> Entry:
    return Entry(Encoding(ids(*values)), Waiter(0, 0, deadline_s, outputs), lane, at_s, 0.25 * len(values))


def served(queues: LaneQueues, lane: Lane) -> list[list[int]]:
    """Everything in ``lane``, one by one, the most urgent first."""
    taken = []
    while queues.has(lane):
        urgent = queues.views()[lane].urgent
        (member,) = queues.cut({lane: [slice(urgent, urgent + 1)]})
        taken.append(member.encoding.input_ids.tolist())
    return taken


# Who is due first


def test_of_those_that_come_together_the_longest_is_served_first() -> None:
    queues = LaneQueues()
    queues.add([entry(1), entry(2, 2, 2), entry(3, 3)])
    assert served(queues, "bulk") == [[2, 2, 2], [3, 3], [1]]


def test_the_earliest_deadline_is_served_first() -> None:
    queues = LaneQueues()
    for value, deadline_s in ((1, 9.0), (2, 3.0), (3, 6.0)):
        queues.add([entry(value, deadline_s=deadline_s)])
    assert served(queues, "bulk") == [[2], [3], [1]]


@pytest.mark.parametrize("lane", LANES)
def test_work_without_a_deadline_is_due_when_its_lane_s_patience_ends(lane: Lane) -> None:
    queues = LaneQueues()
    patience_s = PATIENCE_S[lane]
    queues.add([entry(1, lane=lane)])
    queues.add([entry(2, lane=lane, deadline_s=patience_s - 0.1)])
    queues.add([entry(3, lane=lane, deadline_s=patience_s + 0.1)])
    assert served(queues, lane) == [[2], [1], [3]]


@given(st.lists(st.floats(0.01, 100), max_size=30), st.floats(0.01, 100))
def test_deadlines_that_keep_coming_do_not_starve_work_without_one(gaps_s: list[float], slack_s: float) -> None:
    """Whoever has waited longer than its lane's patience goes before every deadline that is still ahead."""
    queues = LaneQueues()
    queues.add([entry(1)])
    now_s = 0.0
    for index, gap_s in enumerate(gaps_s):
        now_s += gap_s
        queues.add([entry(2, index, at_s=now_s, deadline_s=now_s + slack_s)])
    order = served(queues, "bulk")
    before = order[: order.index([1])]
    dues = {index: sum(gaps_s[: index + 1]) + slack_s for index in range(len(gaps_s))}
    assert all(dues[index] <= PATIENCE_S["bulk"] for _, index in before)


# Twins


def test_an_equal_sequence_is_found_while_it_waits_and_not_after() -> None:
    queues = LaneQueues()
    one = entry(1, 2)
    queues.add([one])
    assert queues.twin(entry(1, 2).identity) is one
    assert queues.twin(entry(2, 1).identity) is None
    queues.cut({"bulk": [slice(0, 1)]})
    assert queues.twin(one.identity) is None
    queues.add([one])
    queues.remove([one])
    assert queues.twin(one.identity) is None


def test_whoever_joins_wants_its_own_outputs_and_the_entry_has_them_all() -> None:
    queues = LaneQueues()
    one = entry(1)
    queues.add([one])
    queues.join(one, Waiter(7, 3, inf, frozenset({"sparse"})), "bulk", 0.0)
    assert one.outputs == {"embedding", "sparse"}
    assert [waiter.outputs for waiter in one.waiters] == [DENSE, {"sparse"}]


def test_an_interactive_twin_takes_the_entry_along_to_its_lane() -> None:
    queues = LaneQueues()
    one, other = entry(1), entry(2, 2)
    queues.add([one, other])
    queues.join(one, Waiter(1, 0, inf, DENSE), "interactive", 5.0)
    assert one.lane == "interactive"
    assert one.due_s == 5.0 + PATIENCE_S["interactive"]
    assert queues.stats() == {"interactive": LaneStats(1, 1, 0.25), "bulk": LaneStats(1, 2, 0.5)}
    assert served(queues, "interactive") == [[1]]
    assert served(queues, "bulk") == [[2, 2]]


def test_a_bulk_twin_leaves_an_interactive_entry_where_it_is() -> None:
    queues = LaneQueues()
    one = entry(1, lane="interactive")
    queues.add([one])
    queues.join(one, Waiter(1, 0, inf, DENSE), "bulk", 0.0)
    assert one.lane == "interactive"
    assert queues.stats()["bulk"].num_sequences == 0


def test_a_twin_in_a_hurry_moves_the_entry_up() -> None:
    queues = LaneQueues()
    first, second = entry(1, deadline_s=5.0), entry(2, deadline_s=9.0)
    queues.add([first])
    queues.add([second])
    queues.join(second, Waiter(1, 0, 2.0, DENSE), "bulk", 0.0)
    assert served(queues, "bulk") == [[2], [1]]


def test_a_twin_without_hurry_does_not_move_the_entry_back() -> None:
    queues = LaneQueues()
    first, second = entry(1, deadline_s=5.0), entry(2, deadline_s=9.0)
    queues.add([first])
    queues.add([second])
    queues.join(first, Waiter(1, 0, inf, DENSE), "bulk", 100.0)
    assert served(queues, "bulk") == [[1], [2]]


# Expiry


def test_what_has_expired_is_taken_out_the_rest_stays() -> None:
    queues = LaneQueues()
    late, in_time = entry(1, deadline_s=2.0), entry(2, deadline_s=5.0)
    queues.add([late, in_time, entry(3, lane="interactive", deadline_s=3.0), entry(4)])
    assert queues.expired(1.9) == []
    assert {e.encoding.input_ids[0] for e in queues.expired(3.0)} == {1, 3}
    assert queues.expired(3.0) == []
    assert len(queues) == 2


def test_an_entry_expires_when_nobody_waits_for_it_any_more() -> None:
    queues = LaneQueues()
    one = entry(1, deadline_s=2.0)
    queues.add([one])
    queues.join(one, Waiter(1, 0, 4.0, DENSE), "bulk", 0.0)
    assert queues.expired(3.0) == []
    assert queues.expired(4.0) == [one]


# Removal


@pytest.mark.parametrize("num_doomed", [1, _FEW, _FEW + 1, 4 * _FEW])
def test_removal_one_by_one_and_in_a_sweep_leaves_the_others_in_order(num_doomed: int) -> None:
    queues = LaneQueues()
    entries = [entry(*[index] * (1 + index % 7)) for index in range(5 * _FEW)]
    queues.add(entries)
    queues.remove(entries[:num_doomed])
    rest = entries[num_doomed:]
    queued = queues.views()["bulk"].queued
    assert list(queued) == sorted(e.key for e in rest)
    assert queues.stats()["bulk"].num_tokens == sum(e.num_tokens for e in rest)


def test_clearing_takes_everything_out_of_every_lane() -> None:
    queues = LaneQueues()
    entries = [entry(index, lane=lane) for index, lane in enumerate(LANES * 3)]
    queues.add(entries)
    assert set(queues.clear()) == set(entries)
    assert queues.stats() == dict.fromkeys(LANES, LaneStats(0, 0, 0.0))


class Queues(RuleBasedStateMachine):
    """Everything that can happen to the queues, beside a plain model of them."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = LaneQueues()
        self.model: list[Entry] = []
        self.now_s = 0.0

    @rule(
        values=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5),
        lane=st.sampled_from(LANES),
        in_s=st.one_of(st.just(inf), st.floats(0, 5)),
    )
    def submit(self, values: list[list[int]], lane: Lane, in_s: float) -> None:
        fresh = {}
        for given_ids in values:
            one = entry(*given_ids, lane=lane, at_s=self.now_s, deadline_s=self.now_s + in_s)
            twin = self.queues.twin(one.identity)
            assert (twin is not None) == any(other.identity == one.identity for other in self.model)
            if twin is not None:
                self.queues.join(twin, one.waiters[0], lane, self.now_s)
            else:
                fresh[one.identity] = one
        self.queues.add(fresh.values())
        self.model += fresh.values()

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def expire(self) -> None:
        for one in self.queues.expired(self.now_s):
            assert all(waiter.deadline_s <= self.now_s for waiter in one.waiters)
            self.model.remove(one)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        doomed = data.draw(st.lists(st.sampled_from(self.model), unique_by=id))
        self.queues.remove(doomed)
        self.model = [one for one in self.model if one not in doomed]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([one.lane for one in self.model]))
        view = self.queues.views()[lane]
        start = data.draw(st.integers(0, view.urgent))
        stop = data.draw(st.integers(view.urgent + 1, len(view.queued)))
        parts = [slice(start, stop)]
        if start:  # what fills the last tile
            place = data.draw(st.integers(0, start - 1))
            parts.append(slice(place, place + 1))
        for one in self.queues.cut({lane: parts}):
            self.model.remove(one)

    @invariant()
    def sums_are_those_of_what_waits(self) -> None:
        assert len(self.queues) == len(self.model)
        for lane, stats in self.queues.stats().items():
            members = [one for one in self.model if one.lane == lane]
            assert stats.num_sequences == len(members)
            assert stats.num_tokens == sum(one.num_tokens for one in members)
            assert stats.cost_s == pytest.approx(sum(one.cost_s for one in members))
            assert members or stats.cost_s == 0.0
            assert self.queues.has(lane) == bool(members)

    @invariant()
    def the_one_due_first_is_urgent(self) -> None:
        for lane, view in self.queues.views().items():
            members = {one.arrival: one for one in self.model if one.lane == lane}
            assert list(view.queued) == sorted(QueueKey(one.num_tokens, one.arrival) for one in members.values())
            if members:
                urgent = members[view.queued[view.urgent].arrival]
                assert (urgent.due_s, urgent.arrival) == min((one.due_s, one.arrival) for one in members.values())


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
