"""Where the time of a request went: its inputs' tokenization, their wait for a step, the step itself.

Measured only for requests whose answers say it. All times are seconds of ``time.monotonic()``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import NamedTuple

from bei.port import Item, StepTimes


class Seconds(NamedTuple):
    """From the request's acceptance until an input is with the engine port, until its step begins, until it ends."""

    tokenization_s: float
    queue_s: float
    inference_s: float


class CallTimes:
    """Sums over the inputs of one call of the service, whose tokenization began at ``begun_s``.

    ``submitted`` is called in any thread, before the input's answer; ``answered`` in the thread of the port that
    delivers answers, before the call is done; the sums are read when it is.
    """

    def __init__(self, num_inputs: int, begun_s: float) -> None:
        self.num_answered = 0
        self._begun_s = begun_s
        self._submitted_s = [begun_s] * num_inputs
        self._num_tokens: list[int] = []  # of each chunk
        self._tokenization_s = self._queue_s = self._inference_s = 0.0

    def submitted(self, items: Seq[Item]) -> None:
        """``items`` are tokenized and go to the port now."""
        now_s = time.monotonic()
        for item in items:
            self._submitted_s[item.place] = now_s
        self._num_tokens.append(sum([item.encoding.num_tokens for item in items]))

    def answered(self, place: int, step: StepTimes | None) -> None:
        """Input ``place`` was answered by ``step``; None: without one, from the cache.

        Of a step that already ran for an equal input, only what was left of it counts.
        """
        self.num_answered += 1
        submitted_s = self._submitted_s[place]
        self._tokenization_s += submitted_s - self._begun_s
        if step is not None:
            started_s = max(submitted_s, step.started_s)
            self._queue_s += started_s - submitted_s
            self._inference_s += max(0.0, step.ended_s - started_s)

    @property
    def num_tokens(self) -> int:
        """Of all inputs, special tokens included."""
        return sum(self._num_tokens)

    @property
    def sums(self) -> Seconds:
        """Of all inputs that were answered."""
        return Seconds(self._tokenization_s, self._queue_s, self._inference_s)


class Timing:
    """The calls of one request, which began when this was made. ``target``: of the engine that ran them."""

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.num_characters = 0
        self.target = ""
        self._calls: list[CallTimes] = []

    def admitted(self, inputs: Seq[str | tuple[str, str] | list[int]], target: str) -> None:
        """The request was accepted with ``inputs``; of token ids each counts as a character, as TEI counts them."""
        self.target = target
        self.num_characters += sum(
            [len(value[0]) + len(value[1]) if isinstance(value, tuple) else len(value) for value in inputs]
        )

    def of_call(self, num_inputs: int, begun_s: float) -> CallTimes:
        """Times of another call, whose inputs have waited for their tokenization since ``begun_s``."""
        self._calls.append(CallTimes(num_inputs, begun_s))
        return self._calls[-1]

    @property
    def total_s(self) -> float:
        """Since the request began."""
        return time.monotonic() - self.begun_s

    @property
    def num_tokens(self) -> int:
        """Of all inputs, special tokens included."""
        return sum([call.num_tokens for call in self._calls])

    def means(self) -> Seconds:
        """Over the inputs that were answered, of all calls, which are done; 0 where none was."""
        num_answered = max(1, sum([call.num_answered for call in self._calls]))
        totals = (sum(sums) for sums in zip(Seconds(0.0, 0.0, 0.0), *(call.sums for call in self._calls), strict=True))
        return Seconds(*(total / num_answered for total in totals))
