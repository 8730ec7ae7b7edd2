"""Runs the lines of a batch: so many at once as keep an engine busy, in memory that does not grow with the input.

Results are written in the order of the input, so that how far it is answered is one number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice
from typing import TypeAlias

import orjson

from bei.errors import EngineDeadError
from bei.server.batches.answer_files import AnswerFiles, LineResult, answered, unanswered
from bei.server.batches.in_process import LineAnswer
from bei.server.batches.lines import RequestLine
from bei.server.http.errors import status_of

# Asks a route for one line.
Ask: TypeAlias = Callable[[RequestLine], Awaitable[LineAnswer]]

# Lines that are asked at the same time, and the bytes of their bodies: of lines with one short text each enough for the
# largest steps of an engine, of lines with thousands of texts a few.
_MOST_LINES = 256
_MOST_BODY_BYTES = 4_000_000
# Results that wait for an earlier line: then no other line is begun.
_MOST_WAITING_LINES = 1024
_MOST_WAITING_BYTES = 64_000_000

# Lines that are read from the file at a time, off the event loop.
_READ_AHEAD = 64

# After a refusal lines are asked again one after the other, so far apart.
_APART_S = 0.02

_UNAVAILABLE = status_of(EngineDeadError(""))
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)


class LineRunner:
    """Answers lines with ``ask`` and writes the results to ``files``. Of one event loop.

    ``on_progress`` is called, on the event loop, after results were written. ``is_numbered``: errors of lines that are
    no requests have the number of the line.
    """

    def __init__(
        self,
        ask: Ask,
        files: AnswerFiles,
        on_progress: Callable[[], object] = lambda: None,
        *,
        is_numbered: bool = False,
    ) -> None:
        self._ask = ask
        self._files = files
        self._on_progress = on_progress
        self._is_numbered = is_numbered
        self._is_stopping = asyncio.Event()
        self._moved = asyncio.Event()
        self._under_way: deque[asyncio.Task[LineResult | None]] = deque()  # in the order of the input
        self._num_asked = 0
        self._asked_bytes = 0
        self._waiting_bytes = 0
        self._ask_again_s = 0.0
        self._refused = asyncio.Lock()  # whoever holds it is asked again next

    def stop(self) -> None:
        """Begin no other line; those that wait to be asked again are left out."""
        self._is_stopping.set()
        self._moved.set()

    async def run(self, lines: Iterator[RequestLine]) -> bool:
        """LineAnswer ``lines``. True: all of them. False: it was stopped, or the server is shutting down.

        Raises EngineDeadError where no route answers any more, DiskFullError, OSError. Whatever it ends with, what was
        written is committed.
        """
        read = _ReadAhead(lines)
        is_whole = True
        try:
            while is_whole and not (self._is_stopping.is_set() and not self._under_way):
                self._moved.clear()
                while self._has_room and (line := await read.next()) is not None:
                    self._begin(line)
                if not self._under_way:
                    break
                is_whole = await self._write_finished()
                if is_whole and self._under_way and not self._under_way[0].done():
                    await self._moved.wait()
            return is_whole and not self._under_way and await read.next() is None
        finally:
            self.stop()
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)
            await asyncio.to_thread(self._files.commit)

    @property
    def _has_room(self) -> bool:
        if self._is_stopping.is_set() or self._refused.locked() or time.monotonic() < self._ask_again_s:
            return False
        return (
            self._num_asked < _MOST_LINES
            and self._asked_bytes < _MOST_BODY_BYTES
            and len(self._under_way) < _MOST_WAITING_LINES
            and self._waiting_bytes < _MOST_WAITING_BYTES
        )

    def _begin(self, line: RequestLine) -> None:
        self._num_asked += 1
        self._asked_bytes += len(line.body)
        self._under_way.append(asyncio.ensure_future(self._result(line)))

    async def _result(self, line: RequestLine) -> LineResult | None:
        """None: it has none, as the runner is stopping."""
        try:
            if line.problem is not None:
                result = unanswered(line, line.problem, is_numbered=self._is_numbered)
            else:
                answer = await self._answer(line)
                if answer is None:
                    return None
                result = answered(line, answer)
            self._waiting_bytes += len(result.content)
            return result
        finally:
            self._num_asked -= 1
            self._asked_bytes -= len(line.body)
            self._moved.set()

    async def _answer(self, line: RequestLine) -> LineAnswer | None:
        """The answer, once it is no refusal. Raises EngineDeadError."""
        waits = iter(_WAITS_S)
        while True:
            answer = await self._ask(line)
            if answer.retry_after_s:
                self._ask_again_s = max(self._ask_again_s, time.monotonic() + answer.retry_after_s)
                if not await self._is_turn():
                    return None
            elif answer.status == _UNAVAILABLE:
                if await self._stops_within(next(waits, None) or self._give_up(answer)):
                    return None
            else:
                return answer

    async def _is_turn(self) -> bool:
        """Wait until a refused line may be asked again; False: the runner is stopping. New lines wait meanwhile."""
        try:
            async with self._refused:
                while (wait_s := self._ask_again_s - time.monotonic()) > 0:
                    if await self._stops_within(wait_s):
                        return False
                return not await self._stops_within(_APART_S)
        finally:
            self._moved.set()

    async def _stops_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._is_stopping.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    def _give_up(self, answer: LineAnswer) -> float:
        raise EngineDeadError(f"The lines are not answered any more: {_message_of(answer)}")

    async def _write_finished(self) -> bool:
        """Write the results up to the first line that has none. False: a line was left out, so those behind it are."""
        results: list[LineResult] = []
        is_whole = True
        while is_whole and self._under_way and self._under_way[0].done():
            if results and self._under_way[0].exception() is not None:
                break  # raised when those before it are written
            result = self._under_way.popleft().result()
            is_whole = result is not None
            if result is not None:
                results.append(result)
        if results:
            await asyncio.to_thread(self._files.append, results)
            self._waiting_bytes -= sum(len(result.content) for result in results)
            self._on_progress()
        return is_whole


class _ReadAhead:
    """Reads ``lines`` off the event loop, some at a time."""

    def __init__(self, lines: Iterator[RequestLine]) -> None:
        self._lines = lines
        self._read: deque[RequestLine] = deque()

    async def next(self) -> RequestLine | None:
        """The next line; None: there is none."""
        if not self._read:
            self._read += await asyncio.to_thread(_some, self._lines)
        return self._read.popleft() if self._read else None


def _some(lines: Iterable[RequestLine]) -> list[RequestLine]:
    return [*islice(lines, _READ_AHEAD)]


def _message_of(answer: LineAnswer) -> str:
    try:
        return str(orjson.loads(answer.body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return answer.body[:200].decode("utf-8", "replace")
