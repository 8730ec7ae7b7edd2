"""Flows in a lane: each gets as much as another that waits, nobody waits forever, and one alone is served as ever."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.core import Encoding, Limits
from bei.port import LANES, Lane
from bei.scheduler import scheduler as module
from bei.scheduler.queue import Entry, Waiter
from bei.scheduler.scheduler import Cut, Scheduler, SchedulingRules
from tests.support.engines import ids

LIMITS = Limits(max_num_tokens=256, max_batch_size=32, max_seq_len=64)
TOKEN_S = 0.001
STEP_S = 0.256
LONGEST_S = 0.064


class LinearCosts:
    """A millisecond a token. The largest efficient step has 256 tokens."""

    tile = 1

    def seconds(self, num_tokens: int, batch_size: int, longest: int) -> float:
        return TOKEN_S * num_tokens

    def efficient_tokens(self, length: int) -> int:
        return 128

    def largest_efficient_tokens(self, length: int) -> int:
        return 256


class Coming(NamedTuple):
    """Sequences of one flow, all of one length."""

    flow: int
    length: int
    number: int
    lane: Lane = "bulk"
    deadline_s: float = inf


class Desk:
    """A scheduler and its clock."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(LIMITS, LinearCosts(), SchedulingRules(step_cap_s=0.1))
        self.queues = self.scheduler.queues
        self.now_s = 0.0
        self._numbers = count()

    def add(self, coming: Coming) -> list[Entry]:
        flow, length, number, lane, deadline_s = coming
        entries = []
        for _ in range(number):
            name = next(self._numbers)
            encoding = Encoding(ids(name, *[0] * (length - 1)))
            waiter = Waiter(name, 0, self.now_s + deadline_s, frozenset(), flow)
            entries.append(Entry(encoding, waiter, lane, self.now_s, TOKEN_S * length))
        self.queues.add(entries)
        return entries

    def cut(self) -> Cut:
        cut = self.scheduler.cut(self.now_s, lambda: True)
        self.now_s += cut.predicted_s
        return cut

    def waiting(self, lane: Lane) -> list[Entry]:
        return list(self.queues._lanes[lane].entries.values())


def flow_of(entry: Entry) -> int:
    return entry.waiters[0].flow


_COMING = st.tuples(st.integers(1, 4), st.integers(1, 64), st.integers(1, 60), st.sampled_from(LANES)).map(
    lambda values: Coming(*values)
)
_STEPS = st.lists(st.lists(_COMING, max_size=3), min_size=1, max_size=40)


@settings(deadline=None, max_examples=200)
@given(_STEPS)
def test_two_flows_that_wait_are_served_alike_but_for_two_steps_and_two_sequences(steps: list[list[Coming]]) -> None:
    """Over any time in which both wait in a lane with more than a full step."""
    desk, most = Desk(), 2 * (STEP_S + LONGEST_S) + 1e-9
    ahead: dict[tuple[Lane, int, int], list[float]] = {}
    while steps or len(desk.queues):
        for coming in steps.pop(0) if steps else []:
            desk.add(coming)
        waiting = {lane: desk.waiting(lane) for lane in LANES}
        members = desk.cut().entries
        for lane in LANES:
            is_full = sum(entry.cost_s for entry in waiting[lane]) > STEP_S
            flows = {flow_of(entry) for entry in waiting[lane]} if is_full else set()
            served = dict.fromkeys(range(1, 5), 0.0)
            for entry in members:
                served[flow_of(entry)] += entry.cost_s if entry.lane == lane else 0.0
            for one in range(1, 5):
                for other in range(1, one):
                    if {one, other} <= flows:
                        found = ahead.setdefault((lane, one, other), [0.0])
                        found.append(found[-1] + served[one] - served[other])
                        assert max(found) - min(found) <= most
                    else:
                        ahead.pop((lane, one, other), None)


@settings(deadline=None, max_examples=200)
@given(_STEPS)
def test_whenever_anything_waits_a_step_runs_and_everything_runs_once(steps: list[list[Coming]]) -> None:
    desk = Desk()
    given_, run = [], []
    while steps or len(desk.queues):
        for coming in steps.pop(0) if steps else []:
            given_ += desk.add(coming)
        is_idle = not len(desk.queues)
        members = desk.cut().entries
        assert bool(members) is not is_idle
        run += members
    assert sorted(map(id, run)) == sorted(map(id, given_))
    assert all(stats == (0, 0, 0.0) for stats in desk.queues.stats().values())


@settings(deadline=None, max_examples=200)
@given(_STEPS, st.randoms(use_true_random=False))
def test_what_is_removed_or_expires_does_not_run_and_the_rest_does(steps: list[list[Coming]], random: object) -> None:
    desk = Desk()
    given_, run, gone = [], [], []
    while steps or len(desk.queues):
        for coming in steps.pop(0) if steps else []:
            given_ += desk.add(coming._replace(deadline_s=0.3 * coming.flow))
            doomed = [entry for entry in desk.waiting(coming.lane) if entry.num_tokens % 5 == 0][::2]
            desk.queues.remove(doomed)
            gone += doomed
        began_s = desk.now_s
        cut = desk.cut()
        assert all(entry.deadline_s > began_s for entry in cut.entries)
        assert all(entry.deadline_s <= began_s for entry in cut.expired)
        run += cut.entries
        gone += cut.expired
    assert sorted(map(id, run + gone)) == sorted(map(id, given_))


def played(steps: Sequence[Sequence[Coming]]) -> list[list[bytes]]:
    """The steps' members, in order."""
    desk, found, rest = Desk(), [], list(steps)
    while rest or len(desk.queues):
        for coming in rest.pop(0) if rest else []:
            desk.add(coming)
        found.append([entry.encoding.input_ids.tobytes() for entry in desk.cut().entries])
    return found


@settings(deadline=None, max_examples=100)
@given(_STEPS)
def test_one_flow_runs_in_the_steps_in_which_it_ran_before_there_were_flows(steps: list[list[Coming]]) -> None:
    alone = [[coming._replace(flow=7) for coming in together] for together in steps]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "full_step_s", lambda costs, limits: inf)  # then nobody asks for flows
        expected = played(steps)
    assert played(alone) == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 16), st.integers(1, 4))))
def test_flows_that_wait_with_less_than_a_step_run_in_the_steps_in_which_they_ran_before(
    steps: list[tuple[int, int, int]],
) -> None:
    few = [[Coming(*values)] for values in steps]  # at most 64 ms come with a step, and a step takes 100 or all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "full_step_s", lambda costs, limits: inf)
        expected = played(few)
    assert played(few) == expected


@pytest.mark.parametrize("lane", LANES)
def test_a_text_beside_one_flow_s_long_queue_is_in_the_next_step(lane: Lane) -> None:
    desk = Desk()
    desk.add(Coming(1, 40, 500, lane))
    for _ in range(10):
        desk.cut()
        (text,) = desk.add(Coming(2, 45, 1, lane))
        assert text in desk.cut().entries


def test_a_text_that_another_flow_s_long_queue_has_too_is_in_the_next_step_and_in_no_other() -> None:
    desk = Desk()
    entries = desk.add(Coming(1, 40, 500))
    desk.cut()
    last = entries[-1]
    assert desk.queues.twin(last.identity) is last
    desk.queues.join(last, Waiter(9, 0, inf, frozenset(), 2), "bulk", desk.now_s)
    assert last in desk.cut().entries
    rest = []
    while len(desk.queues):
        rest += desk.cut().entries
    assert last not in rest


def test_a_flow_is_served_however_many_others_come_later() -> None:
    """Each of the others sends one text and comes no more; the engine cannot keep up with them."""
    desk, others = Desk(), count(2)
    mine = desk.add(Coming(1, 60, 10))
    left, num_steps = {id(entry) for entry in mine}, 0
    for _ in range(200):
        desk.add(Coming(next(others), 16, 1))
    while left:
        members = desk.cut().entries
        left -= {id(entry) for entry in members}
        for entry in members:
            if flow_of(entry) != 1:
                desk.add(Coming(next(others), 16, 1))
        num_steps += 1
        assert num_steps * 128 < 2 * 201 * 10 * 60  # its share is one of 201


def test_a_flow_that_came_back_is_no_better_off_than_one_that_stayed() -> None:
    """It sends its next texts when the last are answered, as a client with a window does."""
    desk, served = Desk(), {1: 0.0, 2: 0.0}
    desk.add(Coming(1, 32, 3000))
    desk.add(Coming(2, 32, 8))
    for _ in range(200):
        members = desk.cut().entries
        for entry in members:
            served[flow_of(entry)] += entry.cost_s
        if all(flow_of(entry) != 2 for entry in desk.waiting("bulk")):
            desk.add(Coming(2, 32, 8))
    assert served[2] - served[1] <= 2 * (STEP_S + LONGEST_S)
