"""One call of a Model on its way: its inputs in windows, each with its answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Mapping, Sized
from contextlib import aclosing, closing
from functools import partial
from typing import Generic, TypeVar

from bei.errors import BeiError, EmptyInputError
from bei.offline.method import Answered, Job
from bei.offline.results import Report
from bei.offline.service_thread import Host
from bei.offline.windows import Cutter, Flow, Window, bounds
from bei.port import Lane

InputT = TypeVar("InputT")
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")


class ModelCall(Generic[InputT, PartT, ResultT]):
    """``job`` for all of ``inputs``, which are checked as they are read. ``report`` is filled on the way.

    ``lane`` None: as the size of each window says. ``count``: how many inputs there are; None: nobody knows yet.
    """

    def __init__(
        self,
        host: Host,
        job: Job[InputT, PartT, ResultT],
        inputs: Iterable[object] | AsyncIterable[object],
        report: Report | None,
        lane: Lane | None,
        window_inputs: int,
    ) -> None:
        self.job = job
        self.count = len(inputs) if isinstance(inputs, Sized) else None
        self._host = host
        self._inputs = inputs
        self._report = report
        self._lane = lane if job.lane is None else job.lane
        self._deadline_s = None if job.timeout_s is None else time.monotonic() + job.timeout_s
        # With a report an input that is wrong costs the others nothing, where the job knows what to do without it.
        self._stand_in = None if report is None else job.stand_in
        self._bounds = bounds(window_inputs, job.bytes_per_token)
        self._num_done = 0

    def check_list(self) -> None:
        """Raise the first error of a list's inputs, before anything is computed for the others."""
        if self._stand_in is None and isinstance(self._inputs, (list, tuple)):
            for index, value in enumerate(self._inputs):
                self.job.check(value, index)

    def check_any(self) -> None:
        """Raise EmptyInputError if there was no input."""
        if not self._num_done:
            raise EmptyInputError(f"{self.job.param} is empty: give at least one.", self.job.param)

    def answers(self) -> Generator[tuple[Window[InputT], Answered[PartT]], None, None]:
        """Each window with its answer, in order. Blocks. Raises what the job raises."""
        assert isinstance(self._inputs, Iterable)  # others are for event loops
        with closing(self._flow().answers(self._cutter().windows(self._inputs))) as found:
            for window, answered in found:
                self._note(window, answered)
                yield window, answered

    async def async_answers(self) -> AsyncGenerator[tuple[Window[InputT], Answered[PartT]], None]:
        """As ``answers``, on the caller's event loop."""
        async with aclosing(self._flow().async_answers(self._cutter().async_windows(_async(self._inputs)))) as found:
            async for window, answered in found:
                self._note(window, answered)
                yield window, answered

    def _cutter(self) -> Cutter[InputT]:
        lengths, model_inputs, whole = self._host.service.estimated_lengths, self.job.model_inputs, self.job.whole

        def num_tokens_of(value: InputT) -> int:
            return sum(lengths(model_inputs([value]), whole=whole))

        return Cutter(self.job.check, num_tokens_of, self._bounds, self._stand_in)

    def _flow(self) -> Flow[InputT, Answered[PartT]]:
        return Flow(lambda window: self._host.submit(partial(self._answer, window)), self._bounds)

    async def _answer(self, window: Window[InputT]) -> Answered[PartT]:
        """On the host's event loop."""
        wrong: Mapping[int, BeiError] | None = None if self._stand_in is None else window.errors
        inputs = self.job.model_inputs(window.inputs)
        service, whole = self._host.service, self.job.whole
        with service.accept(inputs, lane=self._lane, deadline_s=self._deadline_s, whole=whole) as ticket:
            return await self.job.run(window.inputs, ticket, wrong)

    def _note(self, window: Window[InputT], answered: Answered[PartT]) -> None:
        self._num_done += len(window.inputs)
        if self._report is None:
            return
        self._report.num_inputs += len(window.inputs)
        self._report.num_tokens += answered.num_tokens
        self._report.truncated += [window.start + place for place in answered.truncated]
        self._report.errors |= {window.start + place: error for place, error in answered.errors.items()}


async def _async(inputs: Iterable[object] | AsyncIterable[object]) -> AsyncIterator[object]:
    if isinstance(inputs, AsyncIterable):
        async for value in inputs:
            yield value
    else:
        for value in inputs:
            yield value
