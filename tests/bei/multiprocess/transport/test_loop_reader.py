"""An event loop that reads a channel: small frames on the loop, all others in the thread, all of them in order."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from bei.multiprocess.transport import loop_reader
from bei.multiprocess.transport.channel import Channel, Frame
from bei.multiprocess.transport.loop_reader import LoopReader
from bei.multiprocess.transport.messages import Announce, Forget
from tests.bei.multiprocess.chain import LoopThread, nothing_left
from tests.bei.scheduler.front import wait_until
from tests.support.engines import DEADLINE_S

_decoder: Any = msgspec.msgpack.Decoder(Announce | Forget)


class Reading:
    """A channel, and a loop and a thread that read it, as a port's do."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sender: Channel[Any] = Channel(one, _decoder)
        self.channel: Channel[Any] = Channel(other, _decoder)
        self.handled: list[tuple[int, int | None]] = []  # the first number of each frame, and who has handled it
        self.takes_s = 0.0
        self.error: Exception | None = None
        self.reader = LoopReader(loop, self.channel, self._handle)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _handle(self, frame: Frame[Any]) -> None:
        number = frame.message.segments[0]
        if number < 0:
            raise LookupError(f"no frame {number}")
        if self.takes_s:
            time.sleep(self.takes_s)
        self.handled.append((number, threading.get_ident()))

    def _run(self) -> None:
        try:
            while True:
                while not self.reader.is_stopped and not self.channel.wait_readable(0.0):
                    self.reader.run()
                if (frame := self.channel.receive()) is None:
                    return
                self._handle(frame)
        except Exception as error:  # for the test, which looks at it
            self.error = error
        finally:
            self.reader.end()
            self.channel.end()

    def wait_handled(self, count: int) -> None:
        wait_until(lambda: len(self.handled) == count, "all frames are handled")

    def is_loops(self) -> None:
        """Return when it is the loop's turn."""
        wait_until(lambda: self.reader._is_reading, "the loop reads")


@contextmanager
def reading(thread: LoopThread) -> Iterator[Reading]:
    made = Reading(thread.loop)
    try:
        yield made
    finally:
        made.sender.end()
        made.thread.join(DEADLINE_S)
        assert not made.thread.is_alive()


def test_the_loop_handles_what_is_small_and_the_thread_what_is_large_in_order(loop_thread: LoopThread) -> None:
    with nothing_left(), reading(loop_thread) as one:
        one.is_loops()
        numbers = iter(range(1000))
        large: set[int] = set()
        for turn in range(20):
            for number in [next(numbers) for _ in range(turn % 3)]:
                one.sender.send(Forget([number]))
            number = next(numbers)
            large.add(number)
            if turn % 2:
                one.sender.send(Forget([number] * 10_000))
            else:
                one.sender.send(Forget([number]), [np.zeros(100_000, np.uint8)])
        total = next(numbers)
        one.wait_handled(total)
        one.is_loops()  # it is given back
        one.sender.send(Forget([total]))
        one.wait_handled(total + 1)
        assert [number for number, _ in one.handled] == list(range(total + 1))
        by = dict(one.handled)
        assert {by[number] for number in large} == {one.thread.ident}
        assert by[total] == loop_thread.ident


def test_what_takes_long_is_left_to_the_thread_and_the_loop_goes_on(loop_thread: LoopThread) -> None:
    """Each frame takes longer than a turn may: the loop handles one, and is free again."""
    with reading(loop_thread) as one:
        one.is_loops()
        one.takes_s = 2 * loop_reader._MAX_TURN_S
        with loop_thread.blocked():  # so that all of them have come when it looks
            for number in range(50):
                one.sender.send(Forget([number]))
        one.wait_handled(50)
        assert [number for number, _ in one.handled] == list(range(50))
        assert [by == loop_thread.ident for _, by in one.handled] == [True] + [False] * 49


@pytest.mark.parametrize("state", ["runs", "is blocked", "has stopped", "is closed"])
def test_a_reader_is_stopped_whatever_the_loop_does(loop_thread: LoopThread, state: str) -> None:
    with nothing_left(-1 if state == "is closed" else 0), reading(loop_thread) as one:
        one.is_loops()
        if state == "has stopped":
            loop_thread.stop()
        elif state == "is closed":
            loop_thread.close()
        if state == "is blocked":
            with loop_thread.blocked():
                one.reader.stop()
                one.sender.send(Forget([0]))
                one.wait_handled(1)
        else:
            one.reader.stop()
            one.sender.send(Forget([0]))
            one.wait_handled(1)
        assert one.handled == [(0, one.thread.ident)]
        if state == "has stopped":
            one.sender.end()
            one.thread.join(DEADLINE_S)
            loop_thread.close()


def test_what_fails_on_the_loop_is_raised_in_the_thread(loop_thread: LoopThread) -> None:
    with nothing_left():
        with reading(loop_thread) as one:
            one.is_loops()
            one.sender.send(Forget([-1]))
            one.thread.join(DEADLINE_S)
        assert isinstance(one.error, LookupError)
        with reading(loop_thread) as other:
            other.is_loops()
            other.sender.send(Forget(["no number"]))  # type: ignore[list-item]
            other.thread.join(DEADLINE_S)
        assert isinstance(other.error, msgspec.ValidationError)
