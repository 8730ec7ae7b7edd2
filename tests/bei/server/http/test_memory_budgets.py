"""The account of unfinished bodies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import OverloadedError, RequestTimeoutError
from bei.server.http import memory_budgets as module
from bei.server.http.memory_budgets import Body, BodyMemory


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
    answered.end()
    lost.lose()
    assert answered.on_fail is lost.on_fail is None


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
