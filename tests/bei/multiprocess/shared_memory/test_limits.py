"""Limits that several front ends hold together: as one process would hold them, and never more."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.config.settings import ServeConfig
from bei.errors import OverloadedError, TooManyConnectionsError
from bei.metrics.registry import Metrics
from bei.multiprocess.shared_memory import limits as module
from bei.multiprocess.shared_memory.limits import SharedBucket, SharedLimits
from bei.port import LANES, Lane, PortStats
from bei.server.auth.rate_limit import Bucket
from bei.server.http import memory_budgets
from bei.server.http.connections import ConnectionCounts, Connections
from bei.server.http.memory_budgets import AnswerAccount, AnswerMemory, Body, BodyMemory
from bei.service.admission import NOTHING_ACCEPTED, Admission, AdmissionLimits, Demand, Ticket
from tests.bei.multiprocess.pages import Other, pages
from tests.bei.server.auth.test_rate_limit import Clock
from tests.bei.server.http.test_connections import Member
from tests.bei.service.test_admission import LinearCosts, stats_of


@pytest.fixture(scope="module", autouse=True)
def _front_ends_live() -> Iterator[None]:
    """However long they have not come by: no test has an event loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ALIVE_NS", 10**18)
        yield


@contextmanager
def front_ends(count: int) -> Iterator[list[SharedLimits]]:
    with pages(count) as (_, *fronts):
        yield [SharedLimits(front) for front in fronts]


# Admission

LIMIT = 100
_BULK_WAIT_S = 10.0


def admission(limits: SharedLimits | None = None, stats: PortStats | None = None) -> Admission:
    rules = AdmissionLimits(LIMIT, {"interactive": inf, "bulk": _BULK_WAIT_S}, 4, 100, 0.2)
    found = stats or stats_of()
    elsewhere = None if limits is None else limits.accepted(1)
    return Admission(rules, LinearCosts(), lambda: found, lambda: None, elsewhere)


def admitted(desk: Admission, tokens: int, lane: Lane, flow: int = 0) -> Ticket | str:
    try:
        return desk.admit(1, Demand(tokens, tokens / 100), lane, None, flow)
    except OverloadedError as error:
        return str(error).rsplit("retry", 1)[0]  # its time is a little random


def goes_on(ticket: Ticket, how: str, num_tokens: int) -> None:
    if how == "moves":
        ticket.moved(ticket.admitted, num_tokens)
    elif how == "is answered":
        ticket.answered(num_tokens)
    else:
        ticket.close()


_COMES = st.tuples(st.integers(0, 2), st.integers(1, LIMIT), st.sampled_from(LANES))
_GOES_ON = st.tuples(st.sampled_from(["moves", "is answered", "closes"]), st.integers(0, 20), st.integers(0, 120))


@settings(deadline=None)
@given(st.lists(st.one_of(_COMES, _GOES_ON), max_size=30))
def test_front_ends_that_admit_one_after_the_other_decide_as_one_process_does(steps: list[Any]) -> None:
    """Where they tell each other everything at once, and flows are each of one front end."""
    with pytest.MonkeyPatch.context() as patch, front_ends(3) as limits:
        patch.setattr("bei.service.admission._UNTOLD", 0.0)
        desks, alone = [admission(one) for one in limits], admission()
        tickets: list[tuple[Ticket, Ticket]] = []
        for first, number, third in steps:
            if isinstance(first, int):
                found, expected = (admitted(desk, number, third, flow=first) for desk in (desks[first], alone))
                if isinstance(found, Ticket) and isinstance(expected, Ticket):
                    tickets.append((found, expected))
                else:
                    assert found == expected
            elif tickets:
                for ticket in tickets[number % len(tickets)]:
                    goes_on(ticket, first, third)
            assert sum(desk.num_tokens for desk in desks) == alone.num_tokens
            assert {desk.num_open for desk in desks} == {alone.num_open}
            for lane in LANES:
                waits = [desk.wait_s(lane) for desk in desks]
                assert waits == pytest.approx([alone.wait_s(lane)] * 3, abs=1e-6)
        for pair in tickets:
            for ticket in pair:
                ticket.close()
        assert all(desk._others() == NOTHING_ACCEPTED for desk in desks)


@settings(deadline=None)
@given(st.lists(st.one_of(_COMES, _GOES_ON), max_size=30))
def test_front_ends_believe_of_each_other_what_is_held_or_little_more(steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch, front_ends(2) as limits:
        patch.setattr("bei.service.admission._UNTOLD", 0.05)
        desk, other = map(admission, limits)
        tickets: list[Ticket] = []
        for first, number, third in steps:
            if isinstance(first, int):
                found = admitted(desk, number, third)
                tickets += [found] if isinstance(found, Ticket) else []
            elif tickets:
                goes_on(tickets[number % len(tickets)], first, third)
            believed = other._others()
            assert believed.num_open == other.num_open == desk.num_open
            assert 0 <= believed.num_tokens - desk.num_tokens <= 0.05 * LIMIT
            held_s = sum(desk._expected_s.values())
            assert -1e-6 <= sum(map(believed.expected_s, LANES)) - held_s <= 0.05 * _BULK_WAIT_S + 1e-6
        for ticket in tickets:
            ticket.close()
        assert other._others() == NOTHING_ACCEPTED


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 9), st.sampled_from(LANES)), max_size=10)
)
def test_front_ends_predict_no_shorter_wait_than_one_process_and_none_longer_than_for_everything(
    asked: list[tuple[int, int, int, Lane]],
) -> None:
    """Flows are each of one front end."""
    with front_ends(3) as limits:
        desks, alone = [admission(one) for one in limits], admission()
        tickets = []
        for front_end, flow, tokens, lane in asked:
            for desk in (desks[front_end], alone):
                ticket = admitted(desk, tokens, lane, 10 * front_end + flow)
                assert isinstance(ticket, Ticket) or tokens + sum(tokens for _, _, tokens, _ in asked) > LIMIT // 2
                tickets += [ticket] if isinstance(ticket, Ticket) else []
        for front_end, desk in enumerate(desks):
            for lane in LANES:
                of = (10 * front_end + 1, 0.03)
                found = desk._wait_s(lane, stats_of(), desk._others(), of)
                assert alone._wait_s(lane, stats_of(), alone._others(), of) <= found + 1e-6
                assert found <= desk.wait_s(lane) + 1e-6
        for ticket in tickets:
            ticket.close()


def test_front_ends_that_admit_at_once_never_hold_more_than_the_limit() -> None:
    held, most, lock, refused, together = 0, 0, threading.Lock(), 0, threading.Barrier(4)

    def work(limits: SharedLimits) -> None:
        nonlocal held, most, refused
        desk = admission(limits)
        together.wait()
        for _ in range(2000):
            try:
                ticket = desk.admit(1, Demand(40, 0.0), "bulk", None)
            except OverloadedError:
                refused += 1
                continue
            with lock:
                held += 40
                most = max(most, held)
            time.sleep(0)  # the others' turn
            with lock:
                held -= 40
            ticket.close()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with front_ends(4) as limits:
            threads = [threading.Thread(target=work, args=(one,)) for one in limits]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert refused > 0  # they have met
    assert 40 <= most <= LIMIT


def test_while_a_model_is_swapped_what_both_services_of_a_process_have_accepted_counts() -> None:
    with front_ends(2) as (first, second):
        former, new, other = admission(first), admission(first), admission(second)
        ticket = former.admit(1, Demand(60, 0.0), "bulk", None)
        for desk in (new, other):
            with pytest.raises(OverloadedError, match="About 60 tokens are waiting and the limit is 100"):
                desk.admit(1, Demand(60, 0.0), "bulk", None)
        new.admit(1, Demand(40, 0.0), "bulk", None).close()
        ticket.close()
        other.admit(1, Demand(LIMIT, 0.0), "bulk", None).close()


def test_what_a_front_end_held_that_was_killed_is_free_again() -> None:
    with pages(2) as (supervisor, *fronts):
        dead, alive = (admission(SharedLimits(front)) for front in fronts)
        dead.admit(1, Demand(LIMIT, 0.0), "bulk", None)
        with pytest.raises(OverloadedError):
            alive.admit(1, Demand(1, 0.0), "bulk", None)
        supervisor.clear(0)
        alive.admit(1, Demand(LIMIT, 0.0), "bulk", None)


# Rates


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 3.0), st.floats(0.1, 30.0)), min_size=1, max_size=40),
    st.floats(0.1, 20.0),
)
def test_one_bucket_in_several_processes_is_as_one_in_one(steps: list[tuple[int, float, float]], rate: float) -> None:
    with pages(3) as (_, *fronts):
        clock = Clock()
        alone = Bucket(rate, clock)
        shared = [SharedBucket(rate, page, page.word_of_bucket("a", "requests"), clock) for page in fronts]
        for front, pause_s, amount in steps:
            clock.now_s += pause_s
            assert shared[front].ask(amount) == alone.ask(amount)


def test_a_reload_makes_no_new_allowance_and_fills_at_the_new_rate() -> None:
    with pages(2) as (_, *fronts):
        clock = Clock()

        def bucket(front: int, rate: float) -> SharedBucket:
            page = fronts[front]
            return SharedBucket(rate, page, page.word_of_bucket("a", "requests"), clock)

        old = [bucket(front, 10.0) for front in range(2)]
        assert [old[number % 2].ask(1.0) for number in range(7)] == [0.0] * 7
        new = bucket(0, 20.0)
        new.go_on_from(old[0])
        assert [new.ask(1.0) for _ in range(4)] == pytest.approx([0.0, 0.0, 0.0, 0.05])
        assert old[1].ask(1.0) == pytest.approx(0.1)  # a process that has not read the keys yet
        clock.now_s += 0.05
        assert new.ask(1.0) == 0.0


TAKES = """
import time
from bei.multiprocess.shared_memory.limits import SharedLimits

bucket = SharedLimits(page).bucket("a", "requests", 200.0)
say("ready")
wait()
say(time.monotonic())
taken = 0
while taken < 150:
    if bucket.ask(1.0) == 0:
        taken += 1
        say("x")
say(time.monotonic())
"""


def test_processes_that_share_a_rate_never_exceed_it_though_one_is_killed() -> None:
    with (
        pages(3) as (_, first, *_),
        Other(first, TAKES, 0) as one,
        Other(first, TAKES, 1) as other,
        Other(first, TAKES, 2) as victim,
    ):
        processes = (one, other, victim)
        for process in processes:
            assert process.hear() == "ready"
        for process in processes:
            process.go_on()
        began_s = [float(process.hear()) for process in processes]
        heard = victim.hear()
        victim.kill()
        assert victim.process.stdout is not None
        taken = heard.count("x") + victim.process.stdout.read().count("x")
        ended_s: list[float] = []
        for process in (one, other):
            while (line := process.hear()) == "x":
                taken += 1
            ended_s.append(float(line))
    assert taken >= 2 * 150  # they get on with each other
    assert taken <= 200 + 200 * (max(ended_s) - min(began_s))


def test_where_a_process_that_does_not_run_has_the_bucket_nothing_is_let_in() -> None:
    with pages(1) as (_, front):
        word = front.word_of_bucket("a", "requests")
        bucket = SharedBucket(5.0, front, word)
        with Other(front, f"page.lock({word})\nsay('')\nwait()\n") as other:
            other.hear()
            assert bucket.ask(1.0) == module._BUSY_S
        assert bucket.ask(1.0) == 0.0


# Memory


def test_answers_of_all_front_ends_are_held_to_one_limit() -> None:
    with front_ends(2) as limits:
        memories = [AnswerMemory(100, one.answers) for one in limits]
        first, second = map(AnswerAccount, memories)
        first.grow(70, may_exceed=False)
        with pytest.raises(OverloadedError, match="take about 70 bytes, and this one 40, more than 100 together"):
            second.grow(40, may_exceed=False)
        second.grow(30, may_exceed=False)
        second.grow(70, may_exceed=True)
        first.release()
        third = AnswerAccount(memories[0])
        third.grow(30, may_exceed=False)
        assert (third.held, second.held) == (30, 70)


def test_slow_clients_of_another_front_end_yield_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budgets, "_GRACE_S", -1.0)
    with front_ends(2) as limits:
        memories = [AnswerMemory(100, one.answers) for one in limits]
        slow, new = map(AnswerAccount, memories)
        slow.grow(90, may_exceed=False)
        slow.waits(lambda: None)
        with pytest.raises(OverloadedError):
            new.grow(20, may_exceed=False)
        assert slow.held == 90
        memories[0].yield_to_others()
        assert isinstance(slow.error, OverloadedError)
        new.grow(20, may_exceed=False)


def test_bodies_of_all_front_ends_are_held_to_one_limit_and_slow_ones_elsewhere_yield(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_budgets, "_GRACE_S", 100.0)
    with front_ends(2) as limits:
        first, second = (BodyMemory(100, one.bodies) for one in limits)
        slow, slower, young = Body(first), Body(first), Body(first)
        for body, size in ((slow, 50), (slower, 30), (young, 10)):
            body.add(size)
        slow.started_s -= 1000
        slower.started_s -= 1000
        new = Body(second)
        new.add(20)
        assert isinstance(new.error, OverloadedError)
        assert (first.held, second.held, slower.error) == (90, 0, None)
        first.yield_to_others()
        assert isinstance(slower.error, OverloadedError)
        assert (slow.error, young.error, first.held) == (None, None, 60)
        first.yield_to_others()  # one for one
        assert (slow.error, first.held) == (None, 60)
        another = Body(second)
        another.add(40)
        assert another.error is None
        second.yield_to_others()
        assert another.error is None


# Connections


def connections(limits: SharedLimits, most: int) -> Connections:
    found = Connections(ServeConfig(max_connections=most), Metrics(), 1000, None, limits.front_ends, limits.bodies)
    found.listening(1)
    return found


def test_connections_of_all_front_ends_are_held_to_one_limit() -> None:
    with front_ends(2) as limits:
        first, second = (connections(one, 3) for one in limits)
        members = [Member() for _ in range(5)]
        for member in members[:2]:
            first.add(member)
            first.set_busy(member)
        second.add(members[2])
        second.set_busy(members[2])
        second.add(members[3])
        assert isinstance(members[3].error, TooManyConnectionsError)
        assert str(members[3].error).startswith("All 3 connections")
        second.set_lingering(members[3])
        first.discard(members[0])
        second.add(members[4])
        assert members[4].error is None


@settings(deadline=None)
@given(st.lists(st.integers(-3, 2), max_size=60))
def test_connections_come_to_the_front_end_that_has_the_fewest(steps: list[int]) -> None:
    """At least 0: a client comes, and front ends look at the queue beginning with this one; else one goes there."""
    with front_ends(3) as limits:
        fronts = [connections(one, 1000) for one in limits]
        members: list[list[Member]] = [[] for _ in fronts]
        has_gone = False
        for step in steps:
            if step >= 0:
                order = [*range(step, 3), *range(step)]
                taker = next(index for index in order if not fronts[index].is_left_to_others())
                assert len(members[taker]) == min(map(len, members))
                members[taker].append(Member())
                fronts[taker].add(members[taker][-1])
            elif members[-step - 1]:
                fronts[-step - 1].discard(members[-step - 1].pop())
                has_gone = True
        assert has_gone or max(map(len, members)) - min(map(len, members)) <= 1


def test_nothing_is_left_to_a_front_end_that_does_not_accept_or_does_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    with front_ends(2) as limits:
        first, second = (connections(one, 1000) for one in limits)
        first.add(Member())
        assert first.is_left_to_others()
        second.listening(-1)
        assert not first.is_left_to_others()
        second.listening(1)
        assert first.is_left_to_others()
        monkeypatch.setattr(module, "_ALIVE_NS", 0)  # it has not come by lately
        assert not first.is_left_to_others()


def test_connections_that_were_accepted_and_are_not_made_yet_count_for_the_shares_alone() -> None:
    with front_ends(2) as limits:
        first, second = (connections(one, 1) for one in limits)
        first.coming(1)
        assert first.is_left_to_others()
        assert not second.is_left_to_others()
        member = Member()
        first.add(member)  # made, and not yet known to be
        assert member.error is None
        first.coming(-1)
        assert limits[1].front_ends.accepting() == [ConnectionCounts(1, 0, 1)]


def test_where_there_are_as_many_as_may_be_the_next_one_is_for_who_can_close_an_idle_one() -> None:
    with front_ends(3) as limits:
        fronts = [connections(one, 4) for one in limits]
        members = [Member() for _ in range(4)]
        for front, member in zip((fronts[0], fronts[1], fronts[1], fronts[1]), members, strict=True):
            front.add(member)
            front.set_busy(member)
        assert not any(front.is_left_to_others() for front in fronts)  # one of them has to refuse it
        fronts[1].set_idle(members[2])
        fronts[1]._tell()  # as at the next tick
        assert [front.is_left_to_others() for front in fronts] == [True, False, True]
