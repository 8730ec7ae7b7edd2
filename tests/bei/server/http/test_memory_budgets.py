"""The accounts of unfinished bodies and of answers under way."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import OverloadedError, RequestTimeoutError
from bei.server.http import memory_budgets as module
from bei.server.http.memory_budgets import AnswerAccount, AnswerMemory, Body, BodyMemory
from tests.support.engines import DEADLINE_S


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, to be set."""
    clock = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_one_body_may_fill_the_memory() -> None:
    memory = BodyMemory(10)
    body = Body(memory)
    body.add(10)
    assert memory.held == 10
    body.add(1)
    assert isinstance(body.error, OverloadedError)
    assert memory.held == 0


def test_among_young_bodies_the_one_that_asks_yields(now: list[float]) -> None:
    memory = BodyMemory(10)
    first, second = Body(memory), Body(memory)
    first.add(9)
    second.add(2)
    assert (first.error, memory.held) == (None, 9)
    assert isinstance(second.error, OverloadedError)


def test_the_slowest_of_the_older_bodies_yields_and_hears_of_it(now: list[float]) -> None:
    memory = BodyMemory(10)
    slow, fast = Body(memory), Body(memory)
    heard: list[str] = []
    slow.on_fail = lambda: heard.append("slow")
    slow.add(4)
    fast.add(5)
    now[0] += 2
    young = Body(memory)
    young.add(3)
    assert isinstance(slow.error, OverloadedError)
    assert (fast.error, young.error, heard, memory.held) == (None, None, ["slow"], 8)


def test_none_yields_where_that_would_not_be_enough(now: list[float]) -> None:
    memory = BodyMemory(10)
    slow, complete = Body(memory), Body(memory)
    slow.add(1)
    complete.add(8)
    complete.complete = True
    now[0] += 2
    young = Body(memory)
    young.add(3)
    assert (slow.error, complete.error, memory.held) == (None, None, 9)
    assert isinstance(young.error, OverloadedError)


def test_a_client_that_is_fast_enough_does_not_yield(now: list[float]) -> None:
    memory = BodyMemory(100_000_000)
    fast, slow = Body(memory), Body(memory)
    fast.add(50_000_000)
    slow.add(9_000_000)
    now[0] += 2
    Body(memory).add(50_000_000)
    assert fast.error is None
    assert isinstance(slow.error, OverloadedError)


def test_a_complete_body_does_not_yield(now: list[float]) -> None:
    memory = BodyMemory(10)
    complete = Body(memory)
    complete.add(9)
    complete.complete = True
    now[0] += 2
    Body(memory).add(2)
    assert complete.error is None


def test_what_was_released_does_not_count_and_cannot_fail_others() -> None:
    memory = BodyMemory(10)
    body = Body(memory)
    body.add(5)
    body.release()
    body.add(100)  # read and dropped
    body.release()
    assert (memory.held, body.size, body.error) == (0, 105, None)


def test_a_body_that_failed_gives_back_once() -> None:
    memory = BodyMemory(10)
    body, other = Body(memory), Body(memory)
    other.add(3)
    body.add(5)
    body.fail(RequestTimeoutError("late"))
    body.release()
    assert memory.held == 3


def test_a_released_body_that_fails_is_still_heard_of_and_only_once() -> None:
    body = Body(BodyMemory(10))
    heard: list[str] = []
    body.on_fail = lambda: heard.append("failed")
    body.release()
    body.fail(RequestTimeoutError("late"))
    body.fail(RequestTimeoutError("late"))
    assert heard == ["failed"]


def test_a_body_that_is_done_with_leads_to_nothing() -> None:
    answered, lost = Body(BodyMemory(10)), Body(BodyMemory(10))
    for body in (answered, lost):
        body.on_fail = lambda: None
        body.error = RequestTimeoutError("late")
    answered.end()
    lost.lose()
    assert answered.on_fail is lost.on_fail is None
    assert answered.error is lost.error is None


def test_what_decoding_adds_counts_until_it_is_released() -> None:
    memory = BodyMemory(100)
    first, second = Body(memory), Body(memory)
    first.add(10)
    first.grow(80)
    assert (memory.held, first.size, first.error) == (90, 10, None)
    second.add(5)
    second.grow(20)
    assert isinstance(second.error, OverloadedError)
    assert memory.held == 90
    first.grow(-60)
    assert memory.held == 30
    first.release()
    assert memory.held == 0


def test_who_is_refused_is_told_times_that_differ() -> None:
    errors = []
    for _ in range(20):
        body = Body(BodyMemory(1))
        body.add(2)
        assert isinstance(body.error, OverloadedError)
        errors.append(body.error.retry_after_s)
    assert len(set(errors)) > 1
    assert all(1 <= retry_s <= 1.2 for retry_s in errors)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 40)), max_size=60))
def test_the_memory_holds_what_its_bodies_hold_and_never_more_than_its_limit(steps: list[tuple[int, int]]) -> None:
    memory = BodyMemory(100)
    alive: dict[int, Body] = {}
    for name, size in steps:
        if size < 0:
            alive.pop(name, Body(memory)).release()
        else:
            alive.setdefault(name, Body(memory)).add(size)
            alive = {key: body for key, body in alive.items() if body.error is None}
        assert memory.held == sum(body.size for body in alive.values()) <= 100


# Answers


def answer(memory: AnswerMemory, size: int) -> AnswerAccount:
    made = AnswerAccount(memory)
    made.grow(size, may_exceed=False)
    return made


def test_the_answer_that_is_taken_slowest_yields(now: list[float]) -> None:
    memory = AnswerMemory(100)
    slow, slower, computed = answer(memory, 40), answer(memory, 30), answer(memory, 30)
    heard: list[str] = []
    for taken, one, name in ((20, slow, "slow"), (4, slower, "slower")):
        one.waits(lambda: None)
        now[0] += 2
        one.goes_on(taken)
        one.waits(lambda name=name: heard.append(name))  # type: ignore[misc]
    young = answer(memory, 25)
    assert heard == ["slower"]
    assert isinstance(slower.error, OverloadedError)
    assert (slow.error, computed.error, memory.held) == (None, None, 95)
    for one in (slow, slower, computed, young):
        one.release()
    assert memory.held == 0


def test_an_answer_whose_client_is_not_waited_for_does_not_yield(now: list[float]) -> None:
    """It is computed, or its next piece is rendered."""
    memory = AnswerMemory(100)
    one = answer(memory, 90)
    one.waits(lambda: None)
    now[0] += 2
    one.goes_on(1)
    with pytest.raises(OverloadedError, match="take about 90 bytes, and this one 20, more than 100 together"):
        answer(memory, 20)
    assert (one.error, memory.held) == (None, 90)


def test_what_the_server_takes_for_itself_makes_no_client_slow(now: list[float]) -> None:
    memory = AnswerMemory(100)
    one = answer(memory, 90)
    one.waits(lambda: None)
    one.goes_on(1)
    now[0] += 100
    one.waits(lambda: None)
    now[0] += 0.5
    with pytest.raises(OverloadedError):
        answer(memory, 20)


def test_an_accepted_answer_may_exceed_and_makes_nobody_yield(now: list[float]) -> None:
    memory = AnswerMemory(100)
    slow, grown = answer(memory, 90), answer(memory, 10)
    slow.waits(lambda: None)
    now[0] += 2
    grown.grow(50, may_exceed=True)
    assert (slow.error, memory.held) == (None, 140)
    answer(memory, 10)
    assert isinstance(slow.error, OverloadedError)
    assert memory.held == 60


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 40), st.booleans()), max_size=60))
def test_answers_hold_what_is_under_way_and_never_more_than_their_limit(steps: list[tuple[int, int, bool]]) -> None:
    memory = AnswerMemory(100)
    alive: dict[int, AnswerAccount] = {}
    sent: set[AnswerAccount] = set()  # they grow no more
    for name, size, waits in steps:
        one = alive.setdefault(name, AnswerAccount(memory))
        if size < 0:
            alive.pop(name).release()
        elif one not in sent:
            with suppress(OverloadedError):
                one.grow(size, may_exceed=False)
            if waits:
                sent.add(one)
                one.waits(lambda: None)
                one._waits_since_s -= 10
        assert memory.held == sum(one.held for one in alive.values()) <= 100


def test_a_released_answer_holds_nothing_more() -> None:
    memory = AnswerMemory(100)
    one = answer(memory, 40)
    one.release()
    one.grow(60, may_exceed=True)  # by a thread that is late
    assert (one.held, memory.held) == (0, 0)


def test_threads_that_grow_an_answer_while_it_is_released_leave_nothing() -> None:
    memory = AnswerMemory(1000)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(200):
                one = AnswerAccount(memory)
                growing = [pool.submit(one.grow, size, may_exceed=True) for size in range(1, 9)]
                one.release()
                wait(growing)
    finally:
        sys.setswitchinterval(before)
    assert memory.held == 0


def test_answers_that_come_while_slow_ones_are_looked_for_wait_for_that() -> None:
    refused = SimpleNamespace(refused=lambda: 1, tell=lambda held: None, others=lambda: 0, refuse=lambda: None)
    memory = AnswerMemory(100, refused)

    class Looked(AnswerAccount):
        def slow_rate(self, now_s: float) -> float | None:
            thread.start()
            thread.join(0.05)
            return super().slow_rate(now_s)

    thread = threading.Thread(target=lambda: answer(memory, 1))
    Looked(memory).grow(1, may_exceed=True)
    memory.yield_to_others()
    thread.join(DEADLINE_S)
    assert memory.held == 2
