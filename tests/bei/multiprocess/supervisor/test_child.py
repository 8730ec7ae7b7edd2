"""Children that are real processes, and the two ends of their control sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from bei.errors import BeiError, ProcessDiedError
from bei.multiprocess.control.messages import Ask, Close, FromChild, Gathered, Offer, Reload
from bei.multiprocess.supervisor.child import Child, Place, how_ended
from tests.bei.multiprocess.chain import nothing_left
from tests.support.engines import DEADLINE_S

COMMAND = (sys.executable, "-m", "tests.bei.multiprocess.scripted")


class Ward:
    """A child, what it has said, and how often it has ended."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[FromChild] = asyncio.Queue()
        self.num_ends = 0
        self.child = Child(Place("front", 3), COMMAND, self._on_message, self._on_end)

    def _on_message(self, child: Child, message: FromChild) -> None:
        if not isinstance(message, Offer):
            self.said.put_nowait(message)

    def _on_end(self, child: Child) -> None:
        assert not child.is_alive
        self.num_ends += 1


def with_child(test: Callable[[Ward], Awaitable[None]]) -> None:
    async def run() -> None:
        ward = Ward()
        try:
            await test(ward)
        finally:
            ward.child.kill()
            await ward.child.wait()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


def test_calls_are_answered_with_what_was_done_the_childs_error_or_its_death() -> None:
    async def test(ward: Ward) -> None:
        child = ward.child
        with pipe() as (reading, writing):
            await child.call(Reload(), [writing, writing])
            assert os.read(reading, 100) == b"front-3 front-3 "
        with pytest.raises(BeiError, match="It is refused") as raised:
            await child.call(Close("refuse"))
        assert raised.value.code == "config_invalid"
        with pytest.raises(ProcessDiedError, match="The process front-3 was ended by SIGKILL"):
            await child.call(Close("die"))
        assert await child.wait() == -signal.SIGKILL
        assert ward.num_ends == 1
        with pytest.raises(ProcessDiedError):
            await child.call(Reload())
        assert await child.ask("name") is None

    with_child(test)


def test_what_a_process_says_before_it_ends_is_heard() -> None:
    async def test(ward: Ward) -> None:
        with pytest.raises(BeiError, match="Last words"):
            await ward.child.call(Close("fail and die"))
        assert how_ended(await ward.child.wait()) == "ended with exit code 3"

    with_child(test)


def test_questions_go_both_ways_and_an_answer_that_fails_is_none() -> None:
    async def test(ward: Ward) -> None:
        child = ward.child
        await child.call(Close("offer"))
        assert child.offers == {"name", "nothing"}
        assert await child.ask("name") == b"front-3"
        assert child.answers == {"name": b"front-3"}
        assert await child.ask("nothing") is None
        asking = asyncio.ensure_future(child.call(Close("ask")))
        ask = await ward.said.get()
        assert isinstance(ask, Ask)
        child.tell(Gathered(ask.id, {"front-1": b"x"}, ("manager",)))
        with pytest.raises(BeiError, match=r"\{'front-1': b'x'\} \('manager',\)"):
            await asking

    with_child(test)


def test_a_child_is_not_asked_for_what_it_does_not_offer_yet() -> None:
    async def test(ward: Ward) -> None:
        psutil.Process(ward.child.pid).suspend()
        assert await ward.child.ask("name") is None

    with_child(test)


def test_one_that_does_not_stop_is_killed_and_one_that_does_is_not() -> None:
    async def test(ward: Ward) -> None:
        await ward.child.stop(DEADLINE_S)
        assert await ward.child.wait() == 0

    async def test_deaf(ward: Ward) -> None:
        await ward.child.call(Reload())
        psutil.Process(ward.child.pid).suspend()
        await ward.child.stop(0.1)
        assert await ward.child.wait() == -signal.SIGKILL

    with_child(test)
    with_child(test_deaf)


def test_no_descriptor_is_left_of_a_child() -> None:
    async def test(ward: Ward) -> None:
        await ward.child.call(Reload())

    with_child(test)
    with nothing_left():
        with_child(test)
