"""One served model: admission, calls and their answers, readiness, draining. ``bei.service.submission`` brings inputs to
the tokenizers and the engine port, ``bei.tasks`` turns the rows into results. No HTTP here.

``infer`` runs on the event loop; tokenizers and the engine port have threads of their own, and wake the loop once for
all requests that a step completes.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from typing import TypeAlias

import msgspec
import numpy as np

from bei.artifact import manifest as artifacts
from bei.artifact.certificate.canary import canary_row, deviation
from bei.config.settings import ServeConfig
from bei.core import Encoding, Row
from bei.errors import (
    BeiError,
    DeadlineExceededError,
    EngineError,
    ShuttingDownError,
)
from bei.metrics.last_minute import RecentSteps
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import Answer as PortAnswer
from bei.port import EnginePort, Item, Lane, OnAnswers, PortStats
from bei.scheduler.cost_model import CostModel
from bei.service.admission import Admission, AdmissionLimits, Demand, Elsewhere, Ticket
from bei.service.call import Call, Reduce
from bei.service.submission import Feeder, ModelInput
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions, Input, TextEncoder
from bei.tokenizer.pool import TokenizerPool
from bei.tokenizer.prompts import AskedPrompt, asked_prompt
from bei.utils.threads import off_loop

# Once its canary has matched, readiness accepts an engine that has ended a step so lately, or that is in the middle of
# one, instead of computing the canary anew: probes then neither queue behind bulk work nor add to it.
_FRESH_S = 5.0
_CANARY_TIMEOUT_S = 10.0

# With more token ids, or more inputs, a call begins off the event loop: these take a millisecond.
_MANY_IDS = 16_384
_MANY_INPUTS = 1_000

# Opens the engine port of a service, which gets the answers.
OpenPort: TypeAlias = Callable[[OnAnswers, ModelMetrics], EnginePort]


class Answer(msgspec.Struct, frozen=True):
    """What the engine gave, row i for input i, how the inputs were encoded, and which of them were cut.

    ``errors``, of a call that may be answered in part: what was wrong with inputs, by their places. They have no row
    (the rows of the others stand one after the other) and an encoding without tokens.
    """

    rows: list[Row]
    encodings: list[Encoding]
    truncated: list[int]
    errors: Mapping[int, BeiError]

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs, special tokens included."""
        return sum(encoding.num_tokens for encoding in self.encodings)

    @property
    def row_encodings(self) -> list[Encoding]:
        """Of each row, how its input was encoded."""
        if not self.errors:
            return self.encodings
        return [encoding for index, encoding in enumerate(self.encodings) if index not in self.errors]


class InferenceService:
    """Answers requests for one artifact. Made and used on one event loop; ``close`` ends its threads.

    ``elsewhere``: what other processes have accepted of the model, where there are any.
    """

    def __init__(
        self,
        artifact: artifacts.Artifact,
        encoder: TextEncoder,
        config: ServeConfig,
        metrics: Metrics,
        open_port: OpenPort,
        costs: CostModel,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.manifest = artifact.manifest
        self.certificate = artifact.certificate
        self.signed = artifact.signed
        self.encoder = encoder
        self.untrained_dimensions = config.untrained_dimensions
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._calls: dict[int, Call] = {}
        self._ids = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._num_holders = 0
        self._unheld = asyncio.Event()
        self._unheld.set()
        self._canary_matched = False
        is_embedder = any(task.startswith("embed") for task in self.manifest.tasks)
        self._metrics = ModelMetrics(metrics, self.manifest.name, is_embedder=is_embedder)
        self._tokenizers = TokenizerPool(encoder, config.tokenizer_threads)
        self._port = open_port(self._on_answers, self._metrics)
        self._admission = Admission(admission_limits(config), costs, self._port.stats, self._on_idle, elsewhere)
        self._feeder = Feeder(
            self.manifest,
            self._tokenizers,
            self._port,
            self._admission,
            self._metrics,
            self._calls.__contains__,
            self._wake,
        )
        self._metrics.watch_waits(self._admission.wait_s)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.manifest.name

    @cached_property
    def unsaid_prompt(self) -> AskedPrompt:
        """Of requests that do not say what their texts are. Raises InvalidRequestError where they have to."""
        return asked_prompt(self.manifest)

    @property
    def is_alive(self) -> bool:
        """Whether answers still come: every thread works, and no step has run for longer than any step may."""
        stats = self._port.stats()
        return self.can_tokenize and stats.is_alive and not stats.is_stalled

    @property
    def can_tokenize(self) -> bool:
        """Whether every tokenizer's thread works."""
        return self._tokenizers.is_alive

    @property
    def port_stats(self) -> PortStats:
        """The state of the engine and its queue now."""
        return self._port.stats()

    @property
    def recent(self) -> RecentSteps:
        """The engine's steps of the last minute."""
        return self._metrics.recent

    @property
    def num_open(self) -> int:
        """Requests that are admitted and not answered yet, by all processes."""
        return self._admission.num_open

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their step."""
        return sum(lane.num_sequences for lane in self._port.stats().lanes.values())

    def admit(
        self,
        inputs: Seq[ModelInput],
        *,
        lane: Lane | None = None,
        deadline_s: float | None = None,
        whole: bool = False,
    ) -> Ticket:
        """Accept a request with these inputs (at least one), as a whole. Close the ticket when it is answered.

        ``deadline_s`` is on the monotonic clock. ``lane`` None: as its size says. ``whole``: its texts are only
        tokenized, and to their ends (``EncodingOptions.whole``), so they count with all of their length. Raises
        ShuttingDownError, OverloadedError, DeadlineExceededError, InvalidRequestError where it is larger than what may
        ever wait.
        """
        assert inputs, "a request of nothing would never be answered"
        demand = self._admission.demand(self._feeder.estimated_lengths(inputs, whole=whole))
        return self._accepted(self._admission.admit(len(inputs), demand, lane, deadline_s))

    def accept(
        self,
        inputs: Seq[ModelInput],
        *,
        lane: Lane | None = None,
        deadline_s: float | None = None,
        whole: bool = False,
    ) -> Ticket:
        """As ``admit``, for callers in this process: never refused, however much waits, as they wait themselves.

        Raises ShuttingDownError.
        """
        assert inputs, "a request of nothing would never be answered"
        if self._draining:
            raise ShuttingDownError(f"{self.name} is draining.")
        demand = self._admission.demand(self._feeder.estimated_lengths(inputs, whole=whole))
        return self._accepted(self._admission.admit_anyway(len(inputs), demand, lane, deadline_s))

    def estimated_lengths(self, inputs: Seq[ModelInput], *, whole: bool = False) -> list[int]:
        """As ``Feeder.estimated_lengths``."""
        return self._feeder.estimated_lengths(inputs, whole=whole)

    async def infer(
        self,
        inputs: Seq[ModelInput],
        *,
        ticket: Ticket,
        outputs: AbstractSet[str],
        options: EncodingOptions = AS_CONFIGURED,
        reduce: Reduce | None = None,
        in_part: bool = False,
    ) -> Answer:
        """Run inputs (at least one) through the model. Rows have ``outputs`` and nothing else; without any the engine
        is not asked, and encodings are all that the answer has.

        ``in_part``: an input that is wrong, or that the engine fails on, costs the others nothing; see ``Answer``.

        ``reduce`` makes the answer's rows of the engine's as they come, in a thread of the port's or on the event loop:
        where rows are wide and little of them is wanted, they do not have to wait for each other in memory. It must be
        quick and not raise.
        ``options`` are of texts and pairs; token ids are run exactly as given. A cancelled call takes back what is
        still queued. Raises InvalidRequestError, DeadlineExceededError, ShuttingDownError, EngineError.
        """
        num_ids = sum([len(value) for value in inputs if isinstance(value, list)])
        call = self._begin(len(inputs), ticket, reduce, in_part=in_part)
        if ticket.timing is not None:
            call.times = ticket.timing.of_call(len(inputs), ticket.accepted_s)
        start = partial(self._feeder.start, call, inputs, options, frozenset(outputs))
        num_failed = len(inputs)
        try:
            if len(inputs) > _MANY_INPUTS or num_ids > _MANY_IDS:
                await off_loop(start)
            else:
                start()
            await self._done(call)
            num_failed = len(call.errors)
        finally:
            self._end(call)
            if not ticket.is_own:
                self._metrics.inferred(len(inputs) - num_failed, num_failed)
        truncated = [index for index, encoding in enumerate(call.encodings) if encoding.truncated]
        if truncated:
            self._metrics.truncated(len(truncated))
        rows = [row for row in call.rows if row is not None]
        assert len(rows) + len(call.errors) == len(inputs), "a call is done when every input has its row, or its error"
        return Answer(rows, call.encodings, truncated, call.errors)

    async def encode(
        self,
        inputs: Seq[Input],
        *,
        ticket: Ticket,
        options: EncodingOptions = AS_CONFIGURED,
        in_part: bool = False,
    ) -> list[Encoding]:
        """Tokenize only (at least one input), in the tokenizers' threads. Raises as ``infer`` does.

        ``in_part``: an input that cannot be tokenized has an encoding without tokens.
        """
        call = self._begin(len(inputs), ticket, in_part=in_part)

        def on_items(items: list[Item], demand: Demand) -> None:  # in a tokenizer's thread
            ticket.moved(demand, 0)
            for index, encoding in items:
                call.encodings[index] = encoding
            if any([call.record(index, {}) for index, _ in items]):
                self._wake([call])

        try:
            self._feeder.tokenize(call, dict(enumerate(inputs)), options, on_items)
            await self._done(call)
        finally:
            self._end(call)
            if ticket.timing is not None:
                ticket.timing.tokenized()
        return call.encodings

    def hold(self) -> None:
        """Somebody has found this service, and may ask it until ``let_go``, though another has taken its place."""
        self._num_holders += 1
        self._unheld.clear()

    def let_go(self) -> None:
        """The opposite of ``hold``, as often."""
        self._num_holders -= 1
        if not self._num_holders:
            self._unheld.set()

    async def wait_unheld(self) -> None:
        """Return when nobody holds it. One that nobody can find any more may be closed then."""
        await self._unheld.wait()

    async def check_ready(self) -> None:
        """Return if the whole path answers, and answers what it did at build time. Raises BeiError if not."""
        self.hold()
        try:
            await self._check_ready()
        finally:
            self.let_go()

    async def _check_ready(self) -> None:
        if self._draining:
            raise ShuttingDownError(f"{self.name} is draining.")
        stats = self._port.stats()
        if stats.is_stalled:
            raise EngineError(f"The engine of {self.name} hangs.")
        if not self.is_alive:
            raise EngineError(f"A thread of {self.name} has died: restart the server.")
        if self._canary_matched and (stats.is_busy or time.monotonic() - stats.last_step_s < _FRESH_S):
            return
        output = self.certificate.canary_output
        with self._admission.admit_anyway() as ticket:
            ticket.is_own = True
            self._idle.clear()
            work = self.infer([self.certificate.canary_text], ticket=ticket, outputs={output})
            try:
                answer = await asyncio.wait_for(work, _CANARY_TIMEOUT_S)
            except asyncio.TimeoutError as error:
                raise EngineError(f"{self.name} did not answer its canary within {_CANARY_TIMEOUT_S:.0f} s.") from error
        expected = np.array(self.certificate.canary_row, np.float64)
        found = deviation(canary_row(answer.rows[0][output], output), expected, output)
        self._canary_matched = found is None
        if found is not None:
            raise EngineError(
                f"{self.name} answers its canary with {found} it had at build time: "
                "this machine computes something else. Build the artifact again here."
            )

    def begin_drain(self) -> None:
        """Refuse new work from now on; what is accepted will be answered."""
        self._draining = True
        self._admission.begin_drain()

    def abandon(self) -> None:
        """Answer everything that waits with ShuttingDownError; what is queued will not be run."""
        error = ShuttingDownError("The server was stopped before it came to this: send the request to another replica.")
        self._resolve([call for call in self._calls.values() if call.fail(error)])

    async def wait_drained(self) -> None:
        """Return when nothing accepted is unanswered."""
        await self._idle.wait()

    def close(self) -> None:
        """Finish what is queued, end the threads, free the engine. Blocks; not for the event loop."""
        self._tokenizers.close()
        self._port.close()

    # On the event loop.

    def _accepted(self, ticket: Ticket) -> Ticket:
        self._idle.clear()
        self._metrics.accepted(ticket.num_inputs)
        return ticket

    def _begin(self, num_inputs: int, ticket: Ticket, reduce: Reduce | None = None, *, in_part: bool = False) -> Call:
        call = Call(next(self._ids), num_inputs, ticket, reduce, in_part=in_part)
        self._calls[call.request_id] = call
        return call

    def _end(self, call: Call) -> None:
        """Forget the call. If it was not answered in full, take back what is queued."""
        del self._calls[call.request_id]
        if not call.is_done or call.error is not None:
            call.cancel()
            if call.times is not None:
                call.times.broken_off()
            self._port.cancel(call.request_id)
            call.ticket.close()  # the request ends with its call, and what waits costs nobody anything any more

    async def _done(self, call: Call) -> None:
        deadline_s = call.ticket.deadline_s
        if deadline_s is None:
            await call.done
        else:
            try:
                await asyncio.wait_for(call.done, max(0.0, deadline_s - time.monotonic()))
            except asyncio.TimeoutError:
                waited_s = time.monotonic() - call.ticket.accepted_s
                raise DeadlineExceededError.after(waited_s) from None
        if call.error is not None:
            raise call.error

    def _resolve(self, calls: list[Call]) -> None:
        for call in calls:
            if not call.done.done():
                call.done.set_result(None)

    def _on_idle(self) -> None:
        self._idle.set()

    # In any thread.

    def _on_answers(self, answers: Seq[PortAnswer]) -> None:
        """In a thread of the port's, or on the event loop."""
        done: list[Call] = []
        answered: dict[Call, tuple[int, int]] = {}
        for request_id, index, result, step in answers:
            call = self._calls.get(request_id)
            if call is None:  # cancelled meanwhile
                continue
            num_inputs, num_tokens = answered.get(call, (0, 0))
            answered[call] = num_inputs + 1, num_tokens + call.encodings[index].num_tokens
            if call.times is not None:
                call.times.answered(index, step)
            if isinstance(result, BeiError):
                if call.fail_at(index, result):
                    self._port.cancel(request_id)
                    done.append(call)
            elif call.record(index, result if call.reduce is None else call.reduce(result)):
                done.append(call)
        for call, (_, num_tokens) in answered.items():
            call.ticket.answered(num_tokens)
        if done:
            self._wake(done)
        now_s = time.monotonic()
        for call, (num_inputs, _) in answered.items():  # behind the answers
            if not call.ticket.is_own:
                self._metrics.input_answers(call.ticket.lane, num_inputs, now_s - call.ticket.accepted_s)

    def _wake(self, calls: list[Call]) -> None:
        """Let the callers go on; in any thread."""
        if threading.get_ident() == self._thread_id:
            self._resolve(calls)
        else:
            self._loop.call_soon_threadsafe(self._resolve, calls)


def admission_limits(config: ServeConfig) -> AdmissionLimits:
    """As ``config`` says."""
    return AdmissionLimits(
        max_queue_tokens=config.max_queue_tokens,
        max_wait_s={"interactive": config.interactive_max_wait, "bulk": config.bulk_max_wait},
        interactive_inputs=config.interactive_inputs,
        interactive_tokens=config.interactive_tokens,
        bulk_share=config.bulk_share,
    )
