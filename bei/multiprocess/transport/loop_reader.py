"""A channel that an event loop reads: an answer wakes the loop, and no thread before it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from bei.multiprocess.transport.channel import Channel, Frame

# The loop has requests to serve. A message with more bytes is left to the thread (answers to some sixty inputs), and so
# is what still waits after so long.
_MAX_HEADER_SIZE = 1 << 11
_MAX_TURN_S = 0.001


class LoopReader:
    """Lets ``loop`` handle the small frames of ``channel``. All others are for the thread that calls ``run``.

    Loop and thread take turns, so frames are handled in order, and never two at a time: the loop reads while ``run``
    blocks, the thread reads when it has returned.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, channel: Channel[Any], handle: Callable[[Frame[Any]], None]
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._handle = handle
        # A descriptor that only the loop closes: it must not name another file while the loop still watches it.
        self._watched = channel.watched()
        self._lock = threading.Lock()  # held while the loop reads
        self._is_reading = False
        self._is_stopped = False
        self._is_threads_turn = threading.Event()
        self._error: Exception | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the loop reads nothing any more."""
        return self._is_stopped

    def run(self) -> None:
        """Let the loop read until there is something for a thread: a large frame, much work, the end; or ``stop``.

        Raises what ``handle`` has raised on the loop, and msgspec.DecodeError.
        """
        self._is_threads_turn.clear()
        if self._is_stopped:
            return
        self._is_reading = True
        try:
            self._loop.call_soon_threadsafe(self._watch)
        except RuntimeError:  # the loop is closed
            self._is_stopped = True
        else:
            self._is_threads_turn.wait()
        with self._lock:
            self._is_reading = False
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """``run`` returns, and the loop reads nothing more. In any thread, whether the loop runs or not."""
        self._is_stopped = True
        self._is_threads_turn.set()

    def end(self) -> None:
        """Free what the loop has of the channel. In the thread that has called ``run``, instead of the next call."""
        self._is_stopped = True
        try:
            self._loop.call_soon_threadsafe(self._forget)
        except RuntimeError:  # the loop is closed, and watches nothing
            self._watched.close()

    # On the loop.

    def _watch(self) -> None:
        with self._lock:
            if self._is_reading:
                self._loop.add_reader(self._watched, self._on_readable)

    def _forget(self) -> None:
        self._loop.remove_reader(self._watched)
        self._watched.close()

    def _on_readable(self) -> None:
        with self._lock:
            if self._is_reading and not self._is_stopped and self._read():
                return
            self._is_reading = False
            self._loop.remove_reader(self._watched)
        self._is_threads_turn.set()

    def _read(self) -> bool:
        """Handle what has come; False where the thread is to go on."""
        try:
            if not self._channel.fill():
                return False
            until_s = time.monotonic() + _MAX_TURN_S
            while (frame := self._channel.buffered(_MAX_HEADER_SIZE)) is not None:
                self._handle(frame)
                del frame
                if time.monotonic() > until_s:
                    return False
            return not self._channel.is_next_large(_MAX_HEADER_SIZE)
        except Exception as error:  # for the thread, which knows what to do about it
            self._error = error
            return False
