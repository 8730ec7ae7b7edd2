"""The account of unfinished bodies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import OverloadedError, RequestTimeoutError
from bei.server import bodies
from bei.server.bodies import Body, BodyMemory


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, to be set."""
    clock = [100.0]
    monkeypatch.setattr(bodies, "time", SimpleNamespace(monotonic=lambda: clock[0]))
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
