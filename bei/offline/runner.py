"""Runs jobs on a host, for threads and for event loops: lists to one result, streams to chunks."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from contextlib import aclosing, closing
from typing import TypeVar

from bei.errors import InvalidRequestError, MalformedRequestError
from bei.offline.method import Job
from bei.offline.progress import Progress, reporting
from bei.offline.results import Chunk, Report
from bei.offline.running_call import ModelCall
from bei.offline.service_thread import Host
from bei.service.service import InferenceService
from bei.utils.threads import off_loop

InputT = TypeVar("InputT")
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")

# A list with more inputs is checked in a thread, where its caller is an event loop: so many take 0.2 ms.
_MANY_INPUTS = 1_000


class Caller:
    """Whatever the methods of a Model do. When nobody holds it any more, its host stops by itself.

    ``interactive_inputs``: a list of at most so many inputs may be interactive without saying so.
    """

    def __init__(self, host: Host, interactive_inputs: int) -> None:
        self.host = host
        self._interactive_inputs = interactive_inputs
        # Not waited for, as the garbage collector comes in any thread. At the interpreter's exit all hosts are closed.
        weakref.finalize(self, host.stop).atexit = False

    @property
    def service(self) -> InferenceService:
        """For its facts. Raises ForkedProcessError."""
        return self.host.service

    def gathered(
        self, job: Job[InputT, PartT, ResultT], inputs: Iterable[object], report: Report | None, progress: Progress
    ) -> ResultT:
        """The result of all ``inputs``; one text is a list of one. Blocks."""
        call = self._call(job, inputs, report)
        call.check_list()
        collector = job.collector(call.count)
        with reporting(progress, call.count, job.name) as advance, closing(call.answers()) as found:
            for window, answered in found:
                collector.add(answered.part)
                advance(len(window.inputs))
        call.check_any()
        return collector.result()

    async def async_gathered(
        self, job: Job[InputT, PartT, ResultT], inputs: Iterable[object], report: Report | None, progress: Progress
    ) -> ResultT:
        """As ``gathered``, on the caller's event loop."""
        call = self._call(job, inputs, report)
        if (call.count or 0) > _MANY_INPUTS:
            await off_loop(call.check_list)
        else:
            call.check_list()
        collector = job.collector(call.count)
        with reporting(progress, call.count, job.name) as advance:
            async with aclosing(call.async_answers()) as found:
                async for window, answered in found:
                    collector.add(answered.part)
                    advance(len(window.inputs))
        call.check_any()
        return collector.result()

    def chunks(
        self,
        job: Job[InputT, PartT, ResultT],
        inputs: Iterable[object],
        size: int,
        report: Report | None,
        progress: Progress,
    ) -> Iterator[Chunk[InputT, PartT]]:
        """``inputs`` in chunks of ``size``, with their results, each as soon as it is there. Blocks."""
        return self._chunks(self._stream(job, _iterable(inputs), size, report), progress)

    def async_chunks(
        self,
        job: Job[InputT, PartT, ResultT],
        inputs: Iterable[object] | AsyncIterable[object],
        size: int,
        report: Report | None,
        progress: Progress,
    ) -> AsyncIterator[Chunk[InputT, PartT]]:
        """As ``chunks``, on the caller's event loop."""
        given = inputs if isinstance(inputs, AsyncIterable) else _iterable(inputs)
        return self._async_chunks(self._stream(job, given, size, report), progress)

    def _chunks(self, call: ModelCall[InputT, PartT, ResultT], progress: Progress) -> Iterator[Chunk[InputT, PartT]]:
        with reporting(progress, call.count, call.job.name) as advance, closing(call.answers()) as found:
            for window, answered in found:
                advance(len(window.inputs))
                yield Chunk(window.start, window.inputs, answered.part)

    async def _async_chunks(
        self, call: ModelCall[InputT, PartT, ResultT], progress: Progress
    ) -> AsyncIterator[Chunk[InputT, PartT]]:
        with reporting(progress, call.count, call.job.name) as advance:
            async with aclosing(call.async_answers()) as found:
                async for window, answered in found:
                    advance(len(window.inputs))
                    yield Chunk(window.start, window.inputs, answered.part)

    def _call(
        self, job: Job[InputT, PartT, ResultT], inputs: Iterable[object], report: Report | None
    ) -> ModelCall[InputT, PartT, ResultT]:
        given = _iterable(inputs)
        is_short = isinstance(given, Sized) and len(given) <= self._interactive_inputs
        return ModelCall(self.host, job, given, report, None if is_short else "bulk", job.window_inputs)

    def _stream(
        self,
        job: Job[InputT, PartT, ResultT],
        inputs: Iterable[object] | AsyncIterable[object],
        size: int,
        report: Report | None,
    ) -> ModelCall[InputT, PartT, ResultT]:
        if not isinstance(size, int) or size < 1:
            raise InvalidRequestError(f"chunk_size must be at least 1, not {size!r}.", "chunk_size")
        return ModelCall(self.host, job, inputs, report, "bulk", size)


def _iterable(inputs: object) -> Iterable[object]:
    if isinstance(inputs, str):
        return [inputs]
    if not isinstance(inputs, Iterable):
        kind = type(inputs).__name__
        raise MalformedRequestError(
            f"inputs has the type {kind}, and must be a text, or texts in a list or an iterator."
        )
    return inputs
