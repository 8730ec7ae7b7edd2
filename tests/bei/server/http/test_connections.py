"""The account of open connections, without sockets; with them it is in tests/e2e/test_connections.py."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bei.config.settings import ServeConfig
from bei.errors import BeiError, TooManyConnectionsError
from bei.metrics.registry import Metrics
from bei.server.http import connections as module
from bei.server.http.connections import MOST_LINGERING, Connections
from tests.support.engines import DEADLINE_S


class Member:
    """A connection that notes what is done to it, and says that it is gone when the test lets it."""

    def __init__(self) -> None:
        self.deadline_s = math.inf
        self.unsent_bytes = 0
        self.error: BeiError | None = None
        self.is_dropped = False
        self.expired: list[float] = []

    def expire(self, now_s: float) -> None:
        self.expired.append(now_s)
        self.on_expire()

    def on_expire(self) -> None:
        """For the test to replace."""

    def refuse(self, error: BeiError) -> None:
        self.error = error

    def drop(self) -> None:
        self.is_dropped = True


def connections(most: int) -> Connections:
    return Connections(ServeConfig(), Metrics(), most)


class Traffic(RuleBasedStateMachine):
    """Connections come, become busy and idle, and go, in any order."""

    @initialize(most=st.integers(1, 4))
    def start(self, most: int) -> None:
        self.most = most
        self.connections = connections(most)
        self.idle: list[Member] = []  # the one idle for longest first
        self.busy: list[Member] = []
        self.lingering: list[Member] = []

    @rule()
    def comes(self) -> None:
        member = Member()
        is_full = len(self.idle) + len(self.busy) >= self.most
        self.connections.add(member)
        if is_full and self.idle:
            assert self.idle.pop(0).is_dropped
        if is_full and len(self.busy) >= self.most:
            assert isinstance(member.error, TooManyConnectionsError)
            self.connections.set_lingering(member)  # as refuse does
            self.lingering.append(member)
        else:
            assert member.error is None
            self.idle.append(member)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def begins(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.idle))
        self.connections.set_busy(member)
        self.idle.remove(member)
        self.busy.append(member)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def is_answered(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.busy))
        self.connections.set_idle(member)
        self.busy.remove(member)
        self.idle.append(member)

    @precondition(lambda self: self.idle or self.busy or self.lingering)
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        members = data.draw(st.sampled_from([m for m in (self.idle, self.busy, self.lingering) if m]))
        member = data.draw(st.sampled_from(members))
        self.connections.discard(member)
        members.remove(member)

    @invariant()
    def nobody_with_a_request_under_way_is_closed(self) -> None:
        assert not any(member.is_dropped for member in (*self.busy, *self.idle))
        assert len(self.idle) + len(self.busy) <= self.most


TestTraffic = Traffic.TestCase


@pytest.mark.parametrize(("unsent", "dropped"), [([0, 0, 0], 0), ([9, 0, 0], 1), ([9, 9, 0], 2), ([9, 9, 9], 0)])
def test_an_idle_connection_with_unsent_answers_is_closed_only_where_all_have_some(
    unsent: list[int], dropped: int
) -> None:
    all_of_them, members = connections(len(unsent)), [Member() for _ in unsent]
    for member, size in zip(members, unsent, strict=True):
        all_of_them.add(member)
        member.unsent_bytes = size
    all_of_them.add(Member())
    assert [index for index, member in enumerate(members) if member.is_dropped] == [dropped]


def test_of_too_many_that_linger_the_oldest_is_closed() -> None:
    all_of_them, members = connections(1), [Member() for _ in range(MOST_LINGERING + 1)]
    for member in members:
        all_of_them.add(member)
        all_of_them.set_lingering(member)
    assert [member.is_dropped for member in members] == [True, *[False] * MOST_LINGERING]
    assert not any(member.error for member in members)  # those that linger take nobody's place


def test_the_clock_ends_what_is_past_its_deadline_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    late, early = Member(), Member()

    async def run() -> None:
        all_of_them, loop, over = connections(2), asyncio.get_running_loop(), asyncio.Event()
        late.on_expire = over.set  # type: ignore[method-assign]
        late.deadline_s, early.deadline_s = loop.time() - 1, loop.time() + 1000
        all_of_them.add(late)
        all_of_them.add(early)
        all_of_them.start_clock()
        await over.wait()
        all_of_them.stop_clock()
        count = len(late.expired)
        await asyncio.sleep(0.03)
        assert len(late.expired) == count

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert not early.expired


def test_the_clock_goes_on_behind_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("the budget is broken")

    async def run() -> None:
        all_of_them, loop, over = connections(1), asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda *_: over.set() if len(calls) == 3 else None)
        monkeypatch.setattr(all_of_them.bodies, "yield_to_others", fail)
        all_of_them.start_clock()
        await over.wait()
        all_of_them.stop_clock()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_a_loop_that_was_held_up_ends_nobody_before_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member()

    async def run() -> None:
        all_of_them, loop = connections(1), asyncio.get_running_loop()
        member.deadline_s = 0.0
        all_of_them.add(member)
        all_of_them._tick(loop, loop.time() - 10)
        assert not member.expired
        all_of_them.stop_clock()
        all_of_them._tick(loop, loop.time())
        assert member.expired
        all_of_them.stop_clock()

    asyncio.run(run())
