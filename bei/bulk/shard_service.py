"""Answers whole shards, the same bytes for the same inputs in every run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor

from bei.bulk.steps import plan_steps
from bei.bulk.watchdog import watched
from bei.config.settings import ServeConfig
from bei.core import Encoding, Engine, Float32Array, Row
from bei.errors import BeiError, EngineError, InvalidRequestError, JobError
from bei.port import STATES, PortStats
from bei.scheduler.cost_model import CostModel
from bei.scheduler.execution import run_isolating
from bei.scheduler.queue import Entry, Waiter
from bei.service.admission import Admission, Ticket, admission_limits
from bei.service.call import (
    NOT_YET,
    InferenceResult,
    ModelRequest,
    PendingCall,
    Reduce,
    encoding_of_ids,
)
from bei.service.canaries import ask_canaries
from bei.service.loader import Loaded
from bei.service.model_service import ModelFacts
from bei.service.readers import InputReaders
from bei.tokenizer.pool import AnyInput, TokenizerPool
from bei.utils.scarce_resources import scarce_resource


class ShardService(ModelFacts):
    """A ``ModelService`` for requests that are shards. Made and used on one event loop; ``close`` ends its threads.

    All inputs of a request are tokenized before its steps are planned, and steps of two requests are never mixed: what
    runs together depends on the request alone. Steps wait for the engine in the order in which their requests were
    tokenized, so that it goes from one to the next without a pause; meanwhile a third one is tokenized. A step that
    takes too long is a matter for a ``Watchdog``.
    """

    def __init__(self, loaded: Loaded, config: ServeConfig) -> None:
        manifest, second = loaded.artifact.manifest, None if loaded.second is None else loaded.second.side
        readers = InputReaders(manifest.name, loaded.encoder, second, manifest.max_seq_len, config.tokenizer_threads)
        super().__init__(manifest, readers, config)
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._num_running = 0
        self._certificate = loaded.artifact.certificate
        self._costs = loaded.costs
        self._engine = loaded.engine
        self._second = loaded.second
        self._streams = ThreadPoolExecutor(self._engine.info.num_streams, "bei-engine")
        self._is_closing = threading.Event()
        self._admission = Admission(admission_limits(config), loaded.costs, _no_queue, lambda: None)

    @property
    def engine_s(self) -> float:
        """Seconds in which the engine had work."""
        return self._busy_s + (time.monotonic() - self._busy_since_s if self._num_running else 0.0)

    def ticket(self, num_inputs: int) -> Ticket:
        """Work of this process is never refused."""
        return self._admission.admit_anyway(num_inputs, lane="bulk")

    async def check_canary(self) -> None:
        """Raise EngineError unless the engine answers what it did at build time."""
        with self.ticket(1) as ticket:
            check = await ask_canaries(self, self._certificate, self._readers.images, ticket)
        check()

    async def infer(
        self, request: ModelRequest, *, ticket: Ticket, outputs: AbstractSet[str], reduce: Reduce | None = None
    ) -> InferenceResult:
        """As ``ModelService`` has it. Raises EngineDeadError where the engine answers no more."""
        call = await self._tokenized(request, ticket)
        rows: dict[int, Row] = {}
        if outputs:
            rows = await self._run(call, frozenset(outputs), reduce)
        else:
            rows = {place: {} for place in range(len(call.encodings)) if place not in call.errors}
        truncated = [place for place, encoding in enumerate(call.encodings) if encoding.truncated]
        return InferenceResult([rows[place] for place in sorted(rows)], call.encodings, truncated, call.errors)

    async def encode(self, request: ModelRequest, *, ticket: Ticket) -> list[Encoding]:
        """As ``ModelService`` has it. In a partial answer, an input that cannot be tokenized has an encoding without
        tokens."""
        return (await self._tokenized(request, ticket)).encodings

    def close(self) -> None:
        """End the running steps and the threads, free the engine. Blocks; not for the event loop."""
        self._is_closing.set()
        self._readers.close()
        self._streams.shutdown(cancel_futures=True)
        self._engine.close()
        if self._second is not None and self._second.engine is not self._engine:
            self._second.engine.close()

    async def _tokenized(self, request: ModelRequest, ticket: Ticket) -> PendingCall:
        """The call with the encodings of all inputs, or their errors. Raises InvalidRequestError."""
        call, loop = PendingCall(0, request, ticket), asyncio.get_running_loop()
        given: dict[int, AnyInput] = {}
        is_done = call.is_partial and len(call.errors) == len(request.inputs)

        def wake() -> None:
            if not call.done.done():
                call.done.set_result(None)

        def encode(pool: TokenizerPool, by_place: dict[int, AnyInput]) -> None:
            places = list(by_place)

            def on_encoded(start: int, encodings: list[Encoding]) -> None:  # in a thread of the pool
                for place, encoding in zip(places[start:], encodings, strict=False):
                    call.encodings[place] = encoding._replace(adapter=request.adapter)
                if any([call.record(place, {}) for place in places[start : start + len(encodings)]]):
                    loop.call_soon_threadsafe(wake)

            def on_failed(index: int, error: BeiError) -> None:
                if call.fail_at(places[index], error):
                    loop.call_soon_threadsafe(wake)

            inputs, is_cancelled = list(by_place.values()), lambda: call.is_done
            pool.submit(inputs, on_encoded, on_failed, is_cancelled, request.options, one_by_one=call.is_partial)

        for place, value in enumerate(request.inputs):
            if place in call.errors:
                continue
            if not isinstance(value, list):
                given[place] = value
                continue
            try:
                call.encodings[place] = encoding_of_ids(value, self.manifest)._replace(adapter=request.adapter)
                is_done |= call.record(place, {})
            except InvalidRequestError as error:
                is_done |= call.fail_at(place, error)
        for pool, by_place in () if is_done else self._readers.by_pool(given):
            if isinstance(pool, TokenizerPool):
                encode(pool, by_place)
            else:
                for place in by_place:
                    is_done |= call.fail_at(place, pool)
        if is_done:
            wake()
        try:
            await call.done
        finally:
            call.cancel()
        if call.error is not None:
            raise call.error
        return call

    async def _run(self, call: PendingCall, outputs: frozenset[str], reduce: Reduce | None) -> dict[int, Row]:
        """The row of each input without an error, by its place; equal sequences are computed once. All steps are handed
        over before anything is waited for."""
        encodings = {place: encoding for place, encoding in enumerate(call.encodings) if place not in call.errors}
        places_of: dict[Entry, list[int]] = {}
        entries: dict[object, Entry] = {}
        for place, encoding in encodings.items():
            entry = Entry(encoding._replace(spans=None), Waiter(0, place, float("inf"), outputs), "bulk", 0.0, 0.0)
            entry = entries.setdefault(entry.identity, entry)
            places_of.setdefault(entry, []).append(place)
        call.encodings[:] = [one.without_pixels if one.levels else one for one in call.encodings]
        of_engines: tuple[list[Entry], list[Entry]] = [], []
        for entry in places_of:
            of_engines[entry.encoding.is_for_second].append(entry)
        towers = [(self._engine, self._costs, of_engines[0])]
        if self._second is not None:
            towers.append((self._second.engine, self._second.side.costs, of_engines[1]))
        loop = asyncio.get_running_loop()
        steps: list[list[Entry]] = []
        running = []
        for engine, costs, alone in towers:
            for planned in plan_steps([entry.num_tokens for entry in alone], engine.info.limits):
                steps.append([alone[place] for place in planned])
                running.append(loop.run_in_executor(self._streams, self._step, engine, costs, steps[-1], reduce))
        rows: dict[int, Row] = {}
        if not self._num_running:
            self._busy_since_s = time.monotonic()
        self._num_running += 1
        try:
            for step, work in zip(steps, running, strict=True):
                for entry, answer in zip(step, await work, strict=True):
                    for own in places_of[entry]:
                        if isinstance(answer, BeiError):
                            self._failed(call, own, answer)
                        else:
                            rows[own] = answer
        finally:
            for work in running:
                work.cancel()
            self._num_running -= 1
            if not self._num_running:
                self._busy_s += time.monotonic() - self._busy_since_s
        return rows

    def _step(
        self, engine: Engine, costs: CostModel, entries: list[Entry], reduce: Reduce | None
    ) -> Seq[Row | BeiError]:
        """In a thread of the engine's. States that a decoder reads are computed for its step alone: an image's may have
        megabytes."""
        read = self._with_states(entries)
        good = [one for one in read if isinstance(one, Entry)]
        rows = iter(self._ran(engine, costs, good) if good else ())
        answers = [next(rows) if isinstance(one, Entry) else one for one in read]
        if reduce is None:
            return answers
        return [
            answer if isinstance(answer, BeiError) else reduce(answer, entry.encoding)
            for entry, answer in zip(entries, answers, strict=True)
        ]

    def _with_states(self, entries: list[Entry]) -> Seq[Entry | BeiError]:
        """``entries``, images that a decoder reads with their states, or the tower's errors."""
        with_images = [entry for entry in entries if entry.encoding.images]
        if not with_images:
            return entries
        assert self._second is not None, "an image tower has read them"
        engine, costs = self._second.engine, self._second.side.costs
        waiter = Waiter(0, 0, float("inf"), frozenset((STATES,)))
        # Equal images are computed once, and are known by their digests.
        asked: dict[bytes, Entry] = {}
        for one in (one for entry in with_images for one in entry.encoding.of_tower):
            made = Entry(one, waiter, "bulk", 0.0, 0.0)
            asked.setdefault(made.identity[0], made)
        digests, towers = [*asked], [*asked.values()]
        states: dict[bytes, Row | BeiError] = {}
        for planned in plan_steps([entry.num_tokens for entry in towers], engine.info.limits):
            answers = self._ran(engine, costs, [towers[at] for at in planned])
            states.update(zip([digests[at] for at in planned], answers, strict=True))
        return [_with_features(entry, states) for entry in entries]

    def _ran(self, engine: Engine, costs: CostModel, entries: Seq[Entry]) -> Seq[Row | BeiError]:
        """One step of ``engine``."""
        lengths = [entry.num_tokens for entry in entries]
        shape = sum(lengths), len(lengths), max(lengths)
        predicted_s = costs.seconds(*shape)
        failures: list[str] = []
        started = time.monotonic()
        what = (
            f"a step of {len(lengths):,} sequences with {sum(lengths):,} tokens, predicted to take {predicted_s:.1f} s"
        )
        with watched(f"The engine has been in {what},", predicted_s):
            answers = run_isolating(engine, entries, failures.append, self._is_wanted)()
        if not failures:  # such a step was run several times
            costs.observe(*shape, time.monotonic() - started)
        for answer in answers:
            if isinstance(answer, EngineError) and (lack := scarce_resource(answer)):
                raise JobError(f"{lack} The same command goes on with what is not done.")  # the row itself is good
        return answers

    def _is_wanted(self) -> bool:
        return not self._is_closing.is_set()

    def _failed(self, call: PendingCall, place: int, error: BeiError) -> None:
        if not call.is_partial:
            raise error
        call.errors[place] = error
        call.encodings[place] = NOT_YET


def _with_features(entry: Entry, states: Mapping[bytes, Row | BeiError]) -> Entry | BeiError:
    """``entry`` with the ``states`` of its images, by their digests, or the first error among them."""
    encoding = entry.encoding
    if not encoding.images:
        return entry
    rows: list[Float32Array] = []
    for image in encoding.images:
        found = states[image.patches.digest]
        if isinstance(found, BeiError):
            return found
        rows.append(found[STATES])
    return Entry(encoding.with_features(rows), entry.waiters[0], "bulk", 0.0, 0.0)


def _no_queue() -> PortStats:
    raise AssertionError("nothing is ever refused here, so nobody asks what waits")
