"""Runs methods on a service thread, for callers in threads and on event loops: inputs to one result, or to chunks."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sized,
)
from contextlib import AbstractContextManager, aclosing, closing
from functools import partial
from typing import Generic, TypeVar

from bei.errors import EmptyInputError, InvalidRequestError
from bei.image.source import ImageInput, MixedInput
from bei.offline.input_checks import several
from bei.offline.method import Method, WindowResult
from bei.offline.progress import reporting
from bei.offline.results import Chunk
from bei.offline.service_thread import ServiceThread
from bei.offline.windows import UNBOUNDED, Cutter, InFlightWindows, InputWindow, as_tokens, bounds
from bei.port import Lane
from bei.service.adapted import adapted
from bei.service.call import ModelInput
from bei.service.service import InferenceService
from bei.tokenizer.adapters import adapter_called
from bei.utils.threads import off_loop

InputT = TypeVar("InputT", bound="ModelInput | MixedInput")
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")

# On an event loop longer lists are checked in a thread: this many take 0.2 ms.
_MANY_INPUTS = 1_000


class Runner:
    """Runs a Model's methods. The service thread stops when the runner is garbage-collected.

    ``interactive_inputs``: the longest list that may be interactive by default. ``adapter``: the name of the one that
    reads all inputs; ConfigError where the model has none of this name.
    """

    def __init__(self, thread: ServiceThread, interactive_inputs: int, adapter: str | None = None) -> None:
        self.thread = thread
        self._interactive_inputs = interactive_inputs
        # stop does not wait: garbage is collected in any thread. At exit ``service_thread`` closes all of them.
        weakref.finalize(self, thread.stop).atexit = False
        self._adapter = 0 if adapter is None else adapter_called(thread.service.manifest, adapter)

    @property
    def service(self) -> InferenceService:
        """To read facts from. Raises ForkedProcessError."""
        service = self.thread.service
        return adapted(service, self._adapter) if self._adapter else service

    def gather(self, method: Method[InputT, PartT, ResultT], inputs: object) -> ResultT:
        """The result of all ``inputs``; one text is a list of one. Blocks."""
        call = self._call(method, inputs)
        call.check_list()
        collector = method.collector(call.count)
        with closing(call.chunks()) as chunks:
            for chunk in chunks:
                collector.add(chunk.results)
        call.check_any()
        return collector.result()

    async def async_gather(self, method: Method[InputT, PartT, ResultT], inputs: object) -> ResultT:
        """As ``gather``, on the caller's event loop."""
        call = self._call(method, inputs)
        if (call.count or 0) > _MANY_INPUTS:
            await off_loop(call.check_list)
        else:
            call.check_list()
        collector = method.collector(call.count)
        async with aclosing(call.async_chunks()) as chunks:
            async for chunk in chunks:
                collector.add(chunk.results)
        call.check_any()
        return collector.result()

    def chunks(
        self, method: Method[InputT, PartT, ResultT], inputs: Iterable[object], size: int
    ) -> Iterator[Chunk[InputT, PartT]]:
        """``inputs`` in chunks of ``size``, or fewer where they are large, with their results: each when it is computed
        and the next input was read, or all are. Blocks."""
        return self._stream(method, several(inputs), size).chunks()

    def async_chunks(
        self, method: Method[InputT, PartT, ResultT], inputs: Iterable[object] | AsyncIterable[object], size: int
    ) -> AsyncIterator[Chunk[InputT, PartT]]:
        """As ``chunks``, on the caller's event loop."""
        given = inputs if isinstance(inputs, AsyncIterable) else several(inputs)
        return self._stream(method, given, size).async_chunks()

    def _call(self, method: Method[InputT, PartT, ResultT], inputs: object) -> _RunningCall[InputT, PartT, ResultT]:
        given = several(inputs, method.param)
        is_short = isinstance(given, Sized) and len(given) <= self._interactive_inputs
        return _RunningCall(self, method, given, None if is_short else "bulk", method.window_inputs)

    def _stream(
        self, method: Method[InputT, PartT, ResultT], inputs: Iterable[object] | AsyncIterable[object], size: int
    ) -> _RunningCall[InputT, PartT, ResultT]:
        if not isinstance(size, int) or size < 1:
            raise InvalidRequestError(f"chunk_size must be at least 1, not {size!r}.", "chunk_size")
        return _RunningCall(self, method, inputs, "bulk", size)


class _RunningCall(Generic[InputT, PartT, ResultT]):
    """``method`` for all of ``inputs``, which are checked as they are read.

    ``lane``: unless the options name one; None: by the size of each window. ``count``: the number of inputs, None while
    it is not known.
    """

    def __init__(
        self,
        runner: Runner,
        method: Method[InputT, PartT, ResultT],
        inputs: Iterable[object] | AsyncIterable[object],
        lane: Lane | None,
        window_inputs: int,
    ) -> None:
        self.count = len(inputs) if isinstance(inputs, Sized) else None
        self._runner = runner  # a stream keeps the service thread alive
        self._service = runner.service
        self._method = method
        self._inputs = inputs
        options = method.options
        self._report = options.get("report")
        self._lane = options.get("lane") or lane
        timeout_s = options.get("timeout_s")
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        # With a report an invalid input fails alone, where the method has a stand-in for it.
        self._stand_in = None if self._report is None else method.stand_in
        limits = UNBOUNDED if method.is_one else bounds(window_inputs, method.bytes_per_token)
        lengths, tower = self._service.estimated_lengths, self._service.manifest.image_tower
        of_image = 0 if tower is None else tower.image_bytes

        def num_tokens_of(value: InputT) -> int:
            if isinstance(value, ImageInput | MixedInput):  # waits as it was given, and as the model reads it
                return as_tokens(value.held_bytes + of_image)
            return sum(lengths(method.model_inputs([value]), whole=method.whole))

        self._cutter = Cutter(method.check, num_tokens_of, limits, self._stand_in)
        self._in_flight: InFlightWindows[InputT, WindowResult[PartT]] = InFlightWindows(limits)
        self._num_done = 0

    def check_list(self) -> None:
        """Raise the first error of a list's inputs, before anything is computed for the others."""
        if self._stand_in is None and isinstance(self._inputs, (list, tuple)):
            for index, value in enumerate(self._inputs):
                self._method.check(value, index)

    def check_any(self) -> None:
        """Raise EmptyInputError if there was no input."""
        if not self._num_done:
            raise EmptyInputError(f"{self._method.param} is empty: give at least one.", self._method.param)

    def chunks(self) -> Generator[Chunk[InputT, PartT], None, None]:
        """Each window's results, in order; the next window is read when there is room for it. Blocks.

        The first error ends the call. What is in flight then, or when the generator is closed, is cancelled.
        """
        assert isinstance(self._inputs, Iterable)  # others are for event loops
        with self._reporting() as advance, closing(self._in_flight) as in_flight:
            for value in self._inputs:
                if window := self._cutter.add(value):
                    self._submit(window)
                while in_flight.is_due:
                    yield self._taken(in_flight.oldest.result(), advance)
            if window := self._cutter.rest():
                self._submit(window)
            while in_flight:
                yield self._taken(in_flight.oldest.result(), advance)

    async def async_chunks(self) -> AsyncGenerator[Chunk[InputT, PartT], None]:
        """As ``chunks``, on the caller's event loop."""
        with self._reporting() as advance, closing(self._in_flight) as in_flight:
            async for value in _async(self._inputs):
                if window := self._cutter.add(value):
                    self._submit(window)
                while in_flight.is_due:
                    yield self._taken(await asyncio.wrap_future(in_flight.oldest), advance)
            if window := self._cutter.rest():
                self._submit(window)
            while in_flight:
                yield self._taken(await asyncio.wrap_future(in_flight.oldest), advance)

    def _reporting(self) -> AbstractContextManager[Callable[[int], None]]:
        return reporting(self._method.options.get("progress", False), self.count, self._method.name)

    def _submit(self, window: InputWindow[InputT]) -> None:
        self._in_flight.add(window, self._runner.thread.submit(partial(self._run, window)))

    async def _run(self, window: InputWindow[InputT]) -> WindowResult[PartT]:
        """On the service's event loop."""
        errors = None if self._stand_in is None else window.errors
        method, inputs = self._method, self._method.model_inputs(window.inputs)
        with self._service.accept(inputs, lane=self._lane, deadline_s=self._deadline_s, whole=method.whole) as ticket:
            return await method.run(window.inputs, ticket, errors)

    def _taken(self, result: WindowResult[PartT], advance: Callable[[int], None]) -> Chunk[InputT, PartT]:
        """Remove the oldest window, whose ``result`` this is, and report on it."""
        window = self._in_flight.take()
        self._num_done += len(window.inputs)
        if self._report is not None:
            self._report.num_inputs += len(window.inputs)
            self._report.num_tokens += result.num_tokens
            self._report.truncated += [window.start + place for place in result.truncated]
            self._report.errors |= {window.start + place: error for place, error in result.errors.items()}
        advance(len(window.inputs))
        return Chunk(window.start, window.inputs, result.part)


async def _async(inputs: Iterable[object] | AsyncIterable[object]) -> AsyncIterator[object]:
    if isinstance(inputs, AsyncIterable):
        async for value in inputs:
            yield value
    else:
        for value in inputs:
            yield value
