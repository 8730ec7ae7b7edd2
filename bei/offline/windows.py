"""Back-pressure: the inputs of a call go to the service a window at a time, and only so many are under way at once.

So what a call holds, beside its inputs and its result, does not grow with their number, and its caller waits where a
server would refuse. While a window is answered the next ones are queued already, and the engine has a choice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from bei.errors import BeiError
from bei.offline.input_checks import Check

InputT = TypeVar("InputT")
AnswerT = TypeVar("AnswerT")

# Inputs of a window. Steps of an engine hold tens of sequences; a call of the service costs 0.2 ms beside them.
WINDOW = 256
# Of a call under way: inputs, their tokens, and bytes of answers that grow with tokens. The engine chooses sequences of
# like lengths from what waits: from 128 texts it loses 4 % against all of them (docs/decisions.md, "Batches are cut
# late"), from thousands nothing that could be measured.
_MOST_INPUTS = 16 * WINDOW
_MOST_TOKENS = 1 << 20
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Bounds:
    """Of one call: the most inputs and tokens of a window, and (about) of all windows under way."""

    window_inputs: int
    window_tokens: int
    inputs: int
    tokens: int


def bounds(window_inputs: int, bytes_per_token: int) -> Bounds:
    """``bytes_per_token``: what the answers grow by with every token."""
    tokens = min(_MOST_TOKENS, _MOST_BYTES // bytes_per_token) if bytes_per_token else _MOST_TOKENS
    return Bounds(window_inputs, max(1, tokens // 16), max(_MOST_INPUTS, 4 * window_inputs), tokens)


@dataclass(frozen=True)
class Window(Generic[InputT]):
    """Inputs of a call, one after the other. ``start``: how many came before them. ``errors``: what is wrong with
    some, by their places in the window; something else stands there."""

    start: int
    inputs: list[InputT]
    errors: dict[int, BeiError]
    num_tokens: int


class Cutter(Generic[InputT]):
    """Checks inputs and groups them into windows, in order.

    ``stand_in`` takes the place of an input that is wrong; None: that is an error of the call.
    """

    def __init__(
        self, check: Check[InputT], num_tokens_of: Callable[[InputT], int], bounds: Bounds, stand_in: InputT | None
    ) -> None:
        self._check = check
        self._num_tokens_of = num_tokens_of
        self._bounds = bounds
        self._stand_in = stand_in
        self._start = 0
        self._inputs: list[InputT] = []
        self._errors: dict[int, BeiError] = {}
        self._num_tokens = 0

    def windows(self, inputs: Iterable[object]) -> Iterator[Window[InputT]]:
        """Those of ``inputs``. Raises InvalidRequestError, and what ``inputs`` raises."""
        for value in inputs:
            if self._add(value):
                yield self._cut()
        if self._inputs:
            yield self._cut()

    async def async_windows(self, inputs: AsyncIterable[object]) -> AsyncIterator[Window[InputT]]:
        """As ``windows``."""
        async for value in inputs:
            if self._add(value):
                yield self._cut()
        if self._inputs:
            yield self._cut()

    def _add(self, value: object) -> bool:
        """Whether the window is full with it."""
        place = len(self._inputs)
        try:
            checked = self._check(value, self._start + place)
        except BeiError as error:
            if self._stand_in is None:
                raise
            self._errors[place] = error
            checked = self._stand_in
        self._inputs.append(checked)
        self._num_tokens += self._num_tokens_of(checked)
        return len(self._inputs) >= self._bounds.window_inputs or self._num_tokens >= self._bounds.window_tokens

    def _cut(self) -> Window[InputT]:
        window = Window(self._start, self._inputs, self._errors, self._num_tokens)
        self._start += len(self._inputs)
        self._inputs, self._errors, self._num_tokens = [], {}, 0
        return window


class Flow(Generic[InputT, AnswerT]):
    """The windows of one call that are under way, the oldest first. ``submit`` gives a window to the service."""

    def __init__(self, submit: Callable[[Window[InputT]], Future[AnswerT]], bounds: Bounds) -> None:
        self._submit = submit
        self._bounds = bounds
        self._under_way: deque[tuple[Window[InputT], Future[AnswerT]]] = deque()
        self._num_inputs = self._num_tokens = 0

    def answers(self, windows: Iterator[Window[InputT]]) -> Generator[tuple[Window[InputT], AnswerT], None, None]:
        """Each of ``windows`` with its answer, in order. Blocks until there is one; the next window is read when there
        is room for it. The first error ends the call; what is still under way then, or when nobody wants more, is
        cancelled."""
        try:
            for window in windows:
                self._add(window)
                while self._is_due:
                    answer = self._oldest.result()
                    yield self._take(), answer
            while self._under_way:
                answer = self._oldest.result()
                yield self._take(), answer
        finally:
            self._cancel()

    async def async_answers(
        self, windows: AsyncIterator[Window[InputT]]
    ) -> AsyncGenerator[tuple[Window[InputT], AnswerT], None]:
        """As ``answers``, on the caller's event loop."""
        try:
            async for window in windows:
                self._add(window)
                while self._is_due:
                    answer = await asyncio.wrap_future(self._oldest)
                    yield self._take(), answer
            while self._under_way:
                answer = await asyncio.wrap_future(self._oldest)
                yield self._take(), answer
        finally:
            self._cancel()

    @property
    def _is_due(self) -> bool:
        """Whether the oldest answer is to be taken before another window is read."""
        is_full = self._num_inputs >= self._bounds.inputs or self._num_tokens >= self._bounds.tokens
        return bool(self._under_way) and (is_full or self._oldest.done())

    @property
    def _oldest(self) -> Future[AnswerT]:
        return self._under_way[0][1]

    def _add(self, window: Window[InputT]) -> None:
        self._under_way.append((window, self._submit(window)))
        self._num_inputs += len(window.inputs)
        self._num_tokens += window.num_tokens

    def _take(self) -> Window[InputT]:
        window, _ = self._under_way.popleft()
        self._num_inputs -= len(window.inputs)
        self._num_tokens -= window.num_tokens
        return window

    def _cancel(self) -> None:
        for _, future in self._under_way:
            future.cancel()
        self._under_way.clear()
