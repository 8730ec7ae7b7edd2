"""Back-pressure: a call submits its inputs in windows, and bounds what is in flight.

The memory of a call, beside its inputs and its result, does not grow with the number of inputs, and its caller waits
where a server would refuse. Several windows are in flight, so the engine can choose from a full queue.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from bei.errors import BeiError
from bei.offline.input_checks import Check

InputT = TypeVar("InputT")
AnswerT = TypeVar("AnswerT")

# Inputs of a window. A step of an engine holds tens of sequences; a call of the service costs 0.2 ms.
WINDOW = 256
# In flight of a call: inputs, tokens, and bytes of images, or of results that grow with tokens. The engine picks
# sequences of similar lengths from the queue: with 128 waiting texts it loses 4 % against all of them
# (docs/decisions.md, "Batches are cut late"), with thousands nothing measurable.
_MOST_INPUTS = 16 * WINDOW
_MOST_TOKENS = 1 << 20
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Bounds:
    """The most inputs and tokens of a window, and (about) of all windows of a call in flight."""

    window_inputs: int
    window_tokens: int
    inputs: int
    tokens: int


# For inputs that are read together.
UNBOUNDED = Bounds(*(sys.maxsize,) * 4)


def bounds(window_inputs: int, bytes_per_token: int) -> Bounds:
    """The bounds of a call. ``bytes_per_token``: growth of its results with each token."""
    tokens = min(_MOST_TOKENS, _MOST_BYTES // bytes_per_token) if bytes_per_token else _MOST_TOKENS
    return Bounds(window_inputs, max(1, tokens // 16), max(_MOST_INPUTS, 4 * window_inputs), tokens)


def as_tokens(num_bytes: int) -> int:
    """As many tokens as an input counts that has so many bytes in memory while it waits."""
    return num_bytes * _MOST_TOKENS // _MOST_BYTES


@dataclass(frozen=True)
class InputWindow(Generic[InputT]):
    """Consecutive inputs of a call. ``start``: the number of inputs before it. ``errors`` of invalid inputs by their
    places in the window; a stand-in takes their place in ``inputs``."""

    start: int
    inputs: list[InputT]
    errors: dict[int, BeiError]
    num_tokens: int


class Cutter(Generic[InputT]):
    """Checks inputs and groups them into windows, in order.

    ``stand_in`` takes the place of an invalid input; None: ``add`` raises its error.
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

    def add(self, value: object) -> InputWindow[InputT] | None:
        """The window that is full with ``value``, None while there is room. Raises InvalidRequestError."""
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
        is_full = len(self._inputs) >= self._bounds.window_inputs or self._num_tokens >= self._bounds.window_tokens
        return self.rest() if is_full else None

    def rest(self) -> InputWindow[InputT] | None:
        """The last window, None if no input is left."""
        if not self._inputs:
            return None
        window = InputWindow(self._start, self._inputs, self._errors, self._num_tokens)
        self._start += len(self._inputs)
        self._inputs, self._errors, self._num_tokens = [], {}, 0
        return window


class InFlightWindows(Generic[InputT, AnswerT]):
    """The windows of a call that were submitted, oldest first, each with the future of its answer."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._windows: deque[tuple[InputWindow[InputT], Future[AnswerT]]] = deque()
        self._num_inputs = self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def oldest(self) -> Future[AnswerT]:
        """The answer to take next."""
        return self._windows[0][1]

    @property
    def is_due(self) -> bool:
        """True if the oldest answer is to be taken before more inputs are read."""
        is_full = self._num_inputs >= self._bounds.inputs or self._num_tokens >= self._bounds.tokens
        return bool(self._windows) and (is_full or self.oldest.done())

    def add(self, window: InputWindow[InputT], answer: Future[AnswerT]) -> None:
        """Append a window that was submitted."""
        self._windows.append((window, answer))
        self._num_inputs += len(window.inputs)
        self._num_tokens += window.num_tokens

    def take(self) -> InputWindow[InputT]:
        window, _ = self._windows.popleft()
        self._num_inputs -= len(window.inputs)
        self._num_tokens -= window.num_tokens
        return window

    def close(self) -> None:
        """Cancel what is left."""
        for _, future in self._windows:
            future.cancel()
        self._windows.clear()
