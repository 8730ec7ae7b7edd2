"""Times of a request: tokenization of its inputs, their wait for a step, the step itself.

Measured only if the answer, the access log or a trace reports it. All times are seconds of ``time.monotonic()``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import NamedTuple

from bei.metrics.request_stages import (
    PARSE,
    QUEUE,
    RECEIVE,
    RENDER,
    TOKENIZATION,
    InputStep,
    Stage,
    ends_of_steps,
    stages_of,
)
from bei.port import Item, StepTimes


class StageSeconds(NamedTuple):
    """Seconds from the request's acceptance to the engine port, from there to the step's begin, and to its end."""

    tokenization_s: float
    queue_s: float
    inference_s: float


class CallTimes:
    """Sums over the inputs of one call of the service, whose tokenization began at ``begun_s``.

    ``submitted`` is called in any thread, before the input's answer; ``answered`` in threads of the port, one call at a
    time, before the call is done; the sums are read afterwards. ``steps``: those that answered inputs.
    ``broken_off_s``: when the call ended without all answers.
    """

    def __init__(self, num_inputs: int, begun_s: float) -> None:
        self.num_answered = 0
        self.num_submitted = 0
        self.steps: list[InputStep] = []
        self.tokenized_s = begun_s
        self.broken_off_s: float | None = None
        self._last_step: StepTimes | None = None
        self._begun_s = begun_s
        self._submitted_s = [begun_s] * num_inputs
        self._num_tokens: list[int] = []  # of each chunk
        self._tokenization_s = self._queue_s = self._inference_s = 0.0

    def submitted(self, items: Seq[Item]) -> None:
        """Note that ``items`` are tokenized and enter the port now."""
        now_s = time.monotonic()
        for item in items:
            self._submitted_s[item.place] = now_s
        self.tokenized_s = now_s
        self.num_submitted += len(items)
        self._num_tokens.append(sum([item.encoding.num_tokens for item in items]))

    def answered(self, place: int, step: StepTimes | None) -> None:
        """Note that ``step`` answered input ``place``; None: the answer came from the cache.

        For an input that joined a running step of an equal input, only the rest of the step counts.
        """
        self.num_answered += 1
        submitted_s = self._submitted_s[place]
        self._tokenization_s += submitted_s - self._begun_s
        if step is not None:
            started_s = max(submitted_s, step.started_s)
            self._queue_s += started_s - submitted_s
            self._inference_s += max(0.0, step.ended_s - started_s)
            if step is not self._last_step:  # answers of a step come together
                self._last_step = step
                self.steps.append(InputStep(submitted_s, started_s, step.ended_s))
            elif submitted_s < self.steps[-1].submitted_s:
                self.steps[-1] = InputStep(submitted_s, started_s, step.ended_s)

    def broken_off(self) -> None:
        """Note that the call ends now, whatever is still pending."""
        self.broken_off_s = time.monotonic()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all inputs, special tokens included."""
        return sum(self._num_tokens)

    @property
    def sums(self) -> StageSeconds:
        """Sums over all answered inputs."""
        return StageSeconds(self._tokenization_s, self._queue_s, self._inference_s)


class Timing:
    """The times of one request, which began at ``begun_s``, by default now. ``target``: of the engine that ran it.

    ``reads_body``: the request uses a model, so its time has stages. ``accepted_s``: when it was first admitted.
    ``answered_s``: when its answer began.
    """

    def __init__(self, begun_s: float | None = None) -> None:
        self.begun_s = time.monotonic() if begun_s is None else begun_s
        self.num_characters = 0
        self.target = ""
        self.reads_body = False
        self.accepted_s: float | None = None
        self.answered_s: float | None = None
        self._received_s: float | None = None
        self._parsed_s = self.begun_s
        self._tokenized_s = self.begun_s
        self._calls: list[CallTimes] = []

    def received(self) -> None:
        """The body has arrived."""
        self._received_s = time.monotonic()

    def parsed(self) -> None:
        """The body was parsed."""
        self._parsed_s = time.monotonic()

    def admitted(self, inputs: Seq[object], target: str, accepted_s: float) -> None:
        """The request was accepted with ``inputs``: texts, pairs, token ids, each of which counts as a character, as in
        TEI, and images, which have none."""
        self.target = target
        if self.accepted_s is None:
            self.accepted_s = accepted_s
        self.num_characters += sum(
            [
                len(value) if isinstance(value, str | list) else sum(map(len, value)) if isinstance(value, tuple) else 0
                for value in inputs
            ]
        )

    def of_call(self, num_inputs: int, begun_s: float) -> CallTimes:
        """The times of another call, whose inputs have waited for their tokenization since ``begun_s``."""
        self._calls.append(CallTimes(num_inputs, begun_s))
        return self._calls[-1]

    def tokenized(self) -> None:
        """A call that only tokenizes has ended."""
        self._tokenized_s = time.monotonic()

    def answers(self) -> None:
        """The answer begins."""
        self.answered_s = time.monotonic()

    @property
    def total_s(self) -> float:
        """Seconds since the body was parsed."""
        return time.monotonic() - self._parsed_s

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all inputs, special tokens included."""
        return sum([call.num_tokens for call in self._calls])

    def means(self) -> StageSeconds:
        """Means over the answered inputs of all calls, which must be done; 0 without any."""
        num_answered = max(1, sum([call.num_answered for call in self._calls]))
        totals = (
            sum(sums) for sums in zip(StageSeconds(0.0, 0.0, 0.0), *(call.sums for call in self._calls), strict=True)
        )
        return StageSeconds(*(total / num_answered for total in totals))

    @cached_property
    def stages(self) -> list[Stage]:
        """Stages until the answer began, or until now; none for a request that uses no model.

        All calls must be done.
        """
        ended_s = time.monotonic() if self.answered_s is None else self.answered_s
        return stages_of(self.begun_s, self._ends(ended_s), ended_s)

    def _ends(self, ended_s: float) -> Iterator[tuple[str, float]]:
        if self.reads_body:
            yield RECEIVE, ended_s if self._received_s is None else self._received_s
        if self._received_s is not None:
            yield PARSE, ended_s if self.accepted_s is None else self.accepted_s
        if self.accepted_s is not None:
            yield from self._ends_of_calls(self.accepted_s)
            yield RENDER, ended_s

    def _ends_of_calls(self, accepted_s: float) -> Iterator[tuple[str, float]]:
        # Copies: an abandoned call may still receive answers.
        yield from ends_of_steps([step for call in self._calls for step in tuple(call.steps)], accepted_s)
        yield TOKENIZATION, max([self._tokenized_s, *(call.tokenized_s for call in self._calls)])
        for call in self._calls:
            if call.broken_off_s is not None:
                waits = call.num_answered < call.num_submitted
                if waits or not call.num_submitted:
                    yield QUEUE if waits else TOKENIZATION, call.broken_off_s
