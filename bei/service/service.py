"""One served model: admits requests, brings their inputs to the tokenizers and the engine port, and drains.

``infer`` runs on the event loop; threads of tokenizers and the engine port wake it once for all that a step completes.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TypeAlias

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.core import Encoding
from bei.errors import BeiError, DeadlineExceededError, EngineError, InvalidRequestError, ShuttingDownError
from bei.metrics.last_minute import RecentSteps
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import Answer, EnginePort, Item, Lane, OnAnswers, PortStats, Submission
from bei.scheduler.cost_model import CostModel
from bei.service.admission import Admission, Demand, Elsewhere, Ticket, admission_limits
from bei.service.call import InferenceResult, ModelInput, ModelRequest, PendingCall, Reduce, encoding_of_ids, is_large
from bei.service.canaries import ask_canaries
from bei.service.image_side import ImageSide
from bei.service.label_side import LabelSide
from bei.service.model_service import ModelFacts
from bei.service.pixel_port import PixelPort
from bei.service.readers import InputReaders, share_of
from bei.tokenizer.encoder import Input, TextEncoder
from bei.tokenizer.label_encoder import LabelText
from bei.tokenizer.pool import AnyInput, TokenizerPool, is_long, is_short
from bei.utils.threads import off_loop

# Once its canary has matched, readiness accepts an engine that has ended a step so lately, or that is in the middle of
# one, instead of computing the canary anew: probes then neither queue behind bulk work nor add to it.
_FRESH_S = 5.0
_CANARY_TIMEOUT_S = 10.0
# What an image of a decoder may take of what it was predicted to take, and where its steps were not measured.
_MOST_OF_PREDICTED = 20
_UNMEASURED_IMAGE_S = 120.0
# Most items of one submission: the port's lock is held meanwhile, and others ask for its state (25 ms for 2,560).
_MOST_ITEMS = 256

# Gets inputs as they are read, and what they were admitted with.
OnItems: TypeAlias = Callable[[list[Item], Demand], None]
# Opens the engine port of a service, which gets the answers.
OpenPort: TypeAlias = Callable[[OnAnswers, ModelMetrics], EnginePort]


class InferenceService(ModelFacts):
    """Answers requests for one artifact. Made and used on one event loop; ``close`` ends its threads. Who asks it
    holds it (``hold``): it then stays open even if another one takes its place.

    ``encoder``: None where it reads no texts, ``second``: no others. ``elsewhere``: what other processes have accepted.
    """

    def __init__(
        self,
        artifact: Artifact,
        encoder: TextEncoder | None,
        config: ServeConfig,
        metrics: Metrics,
        open_port: OpenPort,
        costs: CostModel,
        elsewhere: Elsewhere | None = None,
        second: ImageSide | LabelSide | None = None,
    ) -> None:
        manifest = artifact.manifest
        readers = InputReaders(manifest.name, encoder, second, manifest.max_seq_len, config.tokenizer_threads)
        super().__init__(manifest, readers, config)
        self.certificate = artifact.certificate
        self.signed = artifact.signed
        self.text_encoder = encoder
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._calls: dict[int, PendingCall] = {}
        self._ids = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._canary_matched = False
        self._num_holders = 0
        self._unheld = asyncio.Event()
        self._unheld.set()
        is_embedder = any(task.startswith("embed") for task in manifest.tasks)
        self._metrics = ModelMetrics(metrics, manifest.name, is_embedder=is_embedder)
        if isinstance(second, ImageSide):
            open_port = partial(PixelPort, open_port, second.turns)
        self._port = open_port(self._on_answers, self._metrics)
        self._admission = Admission(admission_limits(config), costs, self._port.stats, self._idle.set, elsewhere)
        self._metrics.watch_waits(self._admission.wait_s)

    @property
    def is_alive(self) -> bool:
        """True while every thread works, and no step has run for longer than any step may."""
        stats = self._port.stats()
        return self.can_tokenize and stats.is_alive and not stats.is_stalled

    @property
    def can_tokenize(self) -> bool:
        """True while every thread works that tokenizes, or decodes images."""
        return self._readers.is_alive

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
        flow: int = 0,
        whole: bool = False,
        num_around: int = 0,
        labels: Seq[LabelText] = (),
    ) -> Ticket:
        """Accept a request with these inputs (at least one), as a whole. Close the ticket when it is answered.

        ``deadline_s`` is on the monotonic clock. ``lane`` None: as its size says. ``flow``: its client's. ``whole``:
        its texts are only tokenized, and to their ends (``EncodingOptions.whole``), so they count with all of their
        length. ``num_around``: characters that the task reads with each text: of a prompt, a template, or labels.
        ``labels``: what the tower of labels reads beside them.
        Raises ShuttingDownError, OverloadedError, DeadlineExceededError, InvalidRequestError where it is larger than
        what may ever wait.
        """
        assert inputs, "a request of nothing would never be answered"
        demand = self._readers.demand(self._admission.demand, inputs, whole=whole, num_around=num_around)
        if labels:
            demand = demand.plus(self._readers.demand_of_labels(labels))
        return self._accepted(self._admission.admit(len(inputs), demand, lane, deadline_s, flow))

    def accept(
        self, inputs: Seq[ModelInput], *, lane: Lane | None = None, deadline_s: float | None = None, whole: bool = False
    ) -> Ticket:
        """As ``admit``, for callers in this process, which wait themselves: never refused for the work that waits.

        Raises ShuttingDownError.
        """
        assert inputs, "a request of nothing would never be answered"
        if self._draining:
            raise ShuttingDownError(f"{self.name} is draining.")
        demand = self._readers.demand(self._admission.demand, inputs, whole=whole)
        return self._accepted(self._admission.admit_anyway(len(inputs), demand, lane, deadline_s))

    def estimated_lengths(self, inputs: Seq[ModelInput], *, whole: bool = False) -> list[int]:
        """Tokens of each input; of texts a guess. ``whole``: texts are not cut to what the model takes."""
        return self._readers.estimated_lengths(inputs, whole=whole)

    async def infer(
        self, request: ModelRequest, *, ticket: Ticket, outputs: AbstractSet[str], reduce: Reduce | None = None
    ) -> InferenceResult:
        """Run the inputs of ``request`` (at least one). Rows have ``outputs`` and nothing else; without any the engine
        is not asked, and encodings are all that the answer has.

        ``reduce`` makes the answer's rows of the engine's as they come, in a thread of the port's or on the event loop:
        where rows are wide and little of them is wanted, they do not have to wait for each other in memory. It must be
        quick and not raise.
        A cancelled call takes back what is still queued. Raises InvalidRequestError, DeadlineExceededError,
        ShuttingDownError, EngineError.
        """
        call = PendingCall(next(self._ids), request, ticket, outputs, reduce)
        self._calls[call.request_id] = call
        inputs = request.inputs
        num_inputs, num_known = len(inputs), len(call.errors)
        if ticket.timing is not None:
            call.times = ticket.timing.of_call(num_inputs, ticket.accepted_s)
        num_failed = num_inputs - num_known
        try:
            if num_failed:  # not all inputs were refused before
                if num_inputs == 1 and ticket.lane == "interactive" and is_short(inputs[0], request.options):
                    self._start_inline(call, inputs[0])
                elif is_large(inputs):
                    await off_loop(self._start, call)
                else:
                    self._start(call)
                await self._done(call)
            num_failed = len(call.errors) - num_known
        finally:
            self._end(call)
            if not ticket.is_own:
                self._metrics.inferred(num_inputs - num_known - num_failed, num_failed)
        truncated = [index for index, encoding in enumerate(call.encodings) if encoding.truncated]
        if truncated:
            self._metrics.truncated(len(truncated))
        rows = [row for row in call.rows if row is not None]
        assert len(rows) + len(call.errors) == num_inputs, "a call is done when every input has its row, or its error"
        return InferenceResult(rows, call.encodings, truncated, call.errors)

    async def encode(self, request: ModelRequest, *, ticket: Ticket) -> list[Encoding]:
        """Tokenize the inputs of ``request`` (at least one), texts or pairs, in the tokenizers' threads. In a partial
        answer, an input that cannot be tokenized has an encoding without tokens. Raises as ``infer`` does.
        """
        call = PendingCall(next(self._ids), request, ticket)
        self._calls[call.request_id] = call

        def on_items(items: list[Item], demand: Demand) -> None:  # in a tokenizer's thread
            ticket.moved(demand, 0)
            for index, encoding in items:
                call.encodings[index] = encoding
            if any([call.record(index, {}) for index, _ in items]):
                self._wake([call])

        try:
            self._encode(
                call, {i: text for i, text in enumerate(call.request.inputs) if not isinstance(text, list)}, on_items
            )
            await self._done(call)
        finally:
            self._end(call)
            if ticket.timing is not None:
                ticket.timing.tokenized()
        return call.encodings

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
        with self._admission.admit_anyway() as ticket:
            ticket.is_own = True
            self._idle.clear()
            work = ask_canaries(self, self.certificate, self._readers.images, ticket)
            timeout_s = self._canary_timeout_s()
            try:
                check = await asyncio.wait_for(work, timeout_s)
            except asyncio.TimeoutError as error:
                raise EngineError(f"{self.name} did not answer its canary within {timeout_s:.0f} s.") from error
        self._canary_matched = False
        check()
        self._canary_matched = True

    def _canary_timeout_s(self) -> float:
        """Longer for an image that a decoder reads: a thousand tokens of billions of parameters."""
        images = self._readers.images
        if images is None or images.decoder_costs is None:
            return _CANARY_TIMEOUT_S
        if not images.decoder_costs.is_measured:
            return _UNMEASURED_IMAGE_S
        return max(_CANARY_TIMEOUT_S, _MOST_OF_PREDICTED * images.demand([images.canary]).seconds)

    def hold(self) -> None:
        """Keep the service open until ``let_go``."""
        self._num_holders += 1
        self._unheld.clear()

    def let_go(self) -> None:
        """Undo one ``hold``."""
        self._num_holders -= 1
        if not self._num_holders:
            self._unheld.set()

    async def wait_unheld(self) -> None:
        """Return when nobody holds the service. One that has been replaced may be closed then."""
        await self._unheld.wait()

    def begin_drain(self) -> None:
        """Refuse new work from now on; what is accepted will be answered."""
        self._draining = True
        self._admission.begin_drain()

    def abandon(self) -> None:
        """Answer everything that waits with ShuttingDownError; what is queued will not be run."""
        error = ShuttingDownError(
            "The server was stopped before it ran this request: send the request to another replica."
        )
        self._resolve([call for call in self._calls.values() if call.fail(error)])

    async def wait_drained(self) -> None:
        """Return when every accepted request is answered."""
        await self._idle.wait()

    def close(self) -> None:
        """Finish what is queued, end the threads, free the engine. Blocks; not for the event loop."""
        self._metrics.forget_waits(self._admission.wait_s)
        self._readers.close()
        self._port.close()

    # On the event loop.

    def _accepted(self, ticket: Ticket) -> Ticket:
        self._idle.clear()
        self._metrics.accepted(ticket.num_inputs)
        return ticket

    def _end(self, call: PendingCall) -> None:
        """Forget the call. If some inputs were not answered, cancel those that are queued."""
        del self._calls[call.request_id]
        if not call.is_done or call.error is not None:
            call.cancel()
            if call.times is not None:
                call.times.broken_off()
            self._port.cancel(call.request_id)
            call.ticket.close()  # a failed call ends its request, and none of its inputs will run

    async def _done(self, call: PendingCall) -> None:
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

    def _resolve(self, calls: list[PendingCall]) -> None:
        for call in calls:
            if not call.done.done():
                call.done.set_result(None)

    # In any thread.

    def _start(self, call: PendingCall) -> None:
        """Hand token ids to the engine, and texts to the tokenizers. In any thread."""
        given: list[Item] = []
        texts: dict[int, AnyInput] = {}
        refused = frozenset(call.errors)
        for index, value in enumerate(call.request.inputs):
            if index in refused:
                continue
            if not isinstance(value, list):
                texts[index] = value
                continue
            try:
                given.append(Item(index, encoding_of_ids(value, self.manifest)))
            except InvalidRequestError as error:
                self._fail_at(call, index, error)
                if call.is_done:
                    return
        if given:
            call.ticket.count_tokens(sum(item.encoding.num_tokens for item in given))
            for first in range(0, len(given), _MOST_ITEMS):
                part = given[first : first + _MOST_ITEMS]
                self._submit(call, part, self._admission.demand([encoding.num_tokens for _, encoding in part]))
        if texts:
            self._encode(call, texts, lambda items, demand: self._submit(call, items, demand))

    def _start_inline(self, call: PendingCall, value: Input) -> None:
        """Tokenize the only input of ``call`` in this thread, and hand it to the engine."""
        try:
            encoding = self._readers.encode_inline(value, call.request.options)
            call.ticket.count_tokens(encoding.num_tokens)
            self._submit(call, [Item(0, encoding)], self._demand_of(call, [value]))
        except BeiError as error:
            self._fail_at(call, 0, error)

    def _encode(self, call: PendingCall, inputs: dict[int, AnyInput], on_items: OnItems) -> None:
        """Tokenize texts and decode images, by their places in the call. ``on_items`` gets them in chunks, with the
        demand that they were admitted for, in a thread of the pool."""
        for pool, by_place in self._readers.by_pool(inputs):
            if isinstance(pool, TokenizerPool):
                self._encode_in(pool, call, by_place, on_items)
            else:
                for place in by_place:
                    self._fail_at(call, place, pool)

    def _encode_in(
        self, pool: TokenizerPool, call: PendingCall, by_place: Mapping[int, AnyInput], on_items: OnItems
    ) -> None:
        places, inputs = list(by_place), list(by_place.values())

        def on_encoded(start: int, encodings: list[Encoding]) -> None:
            call.ticket.count_tokens(sum(encoding.num_tokens for encoding in encodings))
            items = [Item(places[start + i], encoding) for i, encoding in enumerate(encodings)]
            on_items(items, self._demand_of(call, inputs[start : start + len(items)]))

        pool.submit(
            inputs,
            on_encoded,
            lambda index, error: self._fail_at(call, places[index], error),
            lambda: call.is_done,
            call.request.options,
            is_urgent=call.ticket.lane == "interactive" and not is_long(inputs, call.request.options),
            one_by_one=call.is_partial,
        )

    def _demand_of(self, call: PendingCall, inputs: Seq[AnyInput]) -> Demand:
        """The share of the ticket's estimate that these inputs account for. It is taken off the estimate now that their
        real token count is known."""
        if isinstance(inputs[0], LabelText):
            return self._readers.demand_of_labels(inputs)
        if self._readers.images is not None or len(inputs) == call.ticket.num_inputs:  # no image's header is read again
            return share_of(call.ticket.admitted, len(inputs) / call.ticket.num_inputs)
        options = call.request.options
        return self._readers.demand(self._admission.demand, inputs, whole=options.whole, num_around=options.num_around)

    def _submit(self, call: PendingCall, items: list[Item], admitted: Demand) -> None:
        """Hand tokenized inputs to the engine, or answer them here if the call wants no engine outputs.

        ``admitted``: the demand with which these inputs were admitted. In any thread.
        """
        if call.is_done:  # cancelled meanwhile
            return
        if adapter := call.request.adapter:
            items = [Item(place, encoding._replace(adapter=adapter)) for place, encoding in items]
        num_tokens = sum([encoding.num_tokens for _, encoding in items])
        for index, encoding in items:
            call.encodings[index] = encoding.without_pixels if encoding.image or encoding.images else encoding
        ticket = call.ticket
        ticket.moved(admitted, num_tokens if call.outputs else 0)
        if call.times is not None:
            call.times.submitted(items)
        if not ticket.is_own:
            self._metrics.tokenized(ticket.lane, len(items), time.monotonic() - ticket.accepted_s)
        if not call.outputs:
            self._answer_without_engine(call, items)
            return
        if items[0].encoding.spans is not None:  # engines do not read them
            items = [Item(index, encoding._replace(spans=None)) for index, encoding in items]
        about = ticket.deadline_s, ticket.flow, ticket.is_own  # canaries are computed anew
        self._port.submit(Submission(call.request_id, ticket.lane, call.outputs, items, *about))
        # The call may have ended meanwhile, and its cancel may have come before the submission.
        if call.request_id not in self._calls:
            self._port.cancel(call.request_id)

    def _answer_without_engine(self, call: PendingCall, items: list[Item]) -> None:
        for place, _ in items:
            if call.times is not None:
                call.times.answered(place, None)
            if call.record(place, {}):
                self._wake([call])
        if not call.ticket.is_own:
            self._metrics.input_answers(call.ticket.lane, len(items), time.monotonic() - call.ticket.accepted_s)

    def _fail_at(self, call: PendingCall, index: int, error: BeiError) -> None:
        if call.fail_at(index, error):
            self._wake([call])

    def _on_answers(self, answers: Seq[Answer]) -> None:
        """Record answers of the engine and wake complete calls. In a thread of the port's, or on the event loop."""
        done: list[PendingCall] = []
        answered: dict[PendingCall, tuple[int, int]] = {}
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
            elif call.record(index, result if call.reduce is None else call.reduce(result, call.encodings[index])):
                done.append(call)
        for call, (_, num_tokens) in answered.items():
            call.ticket.answered(num_tokens)
        if done:
            self._wake(done)
        now_s = time.monotonic()
        for call, (num_inputs, _) in answered.items():  # after the calls are woken: metrics must not delay them
            if not call.ticket.is_own:
                self._metrics.input_answers(call.ticket.lane, num_inputs, now_s - call.ticket.accepted_s)

    def _wake(self, calls: list[PendingCall]) -> None:
        """Resume the coroutines that wait for ``calls``. In any thread."""
        if threading.get_ident() == self._thread_id:
            self._resolve(calls)
        else:
            self._loop.call_soon_threadsafe(self._resolve, calls)
