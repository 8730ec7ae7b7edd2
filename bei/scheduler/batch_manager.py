"""The batch manager: the engine port of one process. Queues in front of an engine, and the threads around it.

In-flight batching for models of one pass: sequences join at every step, up to the moment the engine is free to take the
next batch. No timers: an idle engine starts at once with what there is. Nothing is cut ahead: cutting takes little, and
whatever arrives meanwhile makes the batch better (docs/decisions.md, "Batches are cut late"). Knows no text, no HTTP.

Threads: one an engine stream, which cuts and runs batches; one that delivers answers, but the few of a small step that
nothing waits behind, which the engine's thread delivers itself; one that watches for steps that do not end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from math import inf

from bei.core import Engine, Row
from bei.errors import BeiError, DeadlineExceededError, EngineDeadError, EngineError, ShuttingDownError
from bei.metrics.registry import ModelMetrics
from bei.port import Answer, Item, OnAnswers, PortStats, StepTimes, Submission
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate, Turn
from bei.scheduler.execution import Answers, Done, Step, Worker, known, left_s, longest_s, part_of, run_isolating
from bei.scheduler.queue import Entry, Identity, Waiter
from bei.scheduler.row_cache import RowCache
from bei.scheduler.scheduler import Scheduler, SchedulingRules
from bei.utils.threads import started

log = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.25
# After so many engines that hung without a step in between that ended, no other is tried.
_MOST_RESTARTS = 3

# The answers of so small a step are delivered in the engine's thread, if nothing waits for it: that takes less than to
# wake another thread, so work that comes meanwhile waits no longer (docs/decisions.md, "The hot route").
_MOST_DELIVERED_AT_ONCE = 4


class BatchManager:
    """Feeds one engine; implements ``EnginePort``.

    ``on_answers`` is called in the delivery thread or an engine's, never in two at once. ``gate`` is shared by all
    engines of a device. ``reload`` makes another engine where one hangs; without it that is the end. What was given up
    is closed by its last thread, if that returns.
    """

    def __init__(
        self,
        engine: Engine,
        on_answers: OnAnswers,
        costs: CostModel,
        metrics: ModelMetrics,
        *,
        rules: SchedulingRules | None = None,
        gate: DeviceGate | None = None,
        reload: Callable[[], Engine] | None = None,
    ) -> None:
        self._engine = engine
        self._limits = engine.info.limits
        self._on_answers = on_answers
        self._costs = costs
        self._metrics = metrics
        self._rules = rules or SchedulingRules()
        self._reload = reload
        self._lock = threading.Lock()
        self._wakes = threading.Condition(self._lock)
        gate, info = gate or DeviceGate(), engine.info
        shares, shortest_s = info.shares_prefixes, gate.shortest_step_s
        self._scheduler = own = Scheduler(self._limits, costs, self._rules, shortest_s, shares_prefixes=shares)
        self._queues = own.queues
        self._gate = gate.join(info.num_streams, own.has_interactive, own.short_step_s, uses_cores=info.uses_cores)
        self._running: dict[Identity, Entry] = {}  # until their answers are delivered
        self._entries_of: dict[int, set[Entry]] = {}  # by request
        self._cache = RowCache(self._rules.cache_bytes) if self._rules.cache_bytes else None
        self._last_step_s, self._num_hangs, self._is_stalled = -inf, 0, False
        self._death: str | None = None
        self._closing = False
        self._finished: queue.SimpleQueue[Done | list[Answer] | None] = queue.SimpleQueue()
        self._delivering = threading.Lock()
        self._stop_watching = threading.Event()
        self._workers: list[Worker] = []
        self._delivery = started(self._deliver_all, "bei-delivery")
        self._watchdog = started(self._watch, "bei-watchdog")
        with self._lock:
            self._start_workers(engine)
        metrics.watch(self.stats, self._limits)

    # The port.

    def submit(self, submission: Submission) -> None:
        """Enqueue. Raises ShuttingDownError after ``close``, EngineDeadError when the engine is dead."""
        now_s = time.monotonic()
        if submission.lane == "interactive":
            self._gate.note_interactive()
        at_once: list[Answer] = []
        num_cached = 0
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)
            if self._closing:
                raise ShuttingDownError("The server is shutting down: send the request to another replica.")
            fresh: dict[Identity, Entry] = {}
            cache = None if submission.is_fresh else self._cache
            for item in submission.items:
                entry = self._entry(submission, item, now_s)
                if cache is not None and (row := cache.get(entry.identity, entry.outputs)) is not None:
                    num_cached += 1
                    at_once.append(Answer(submission.request_id, item.place, row))
                    continue
                joined = self._joined(entry, fresh, now_s)
                if submission.is_probe and joined is entry:
                    del fresh[entry.identity]
                    at_once.append(Answer(submission.request_id, item.place, {}))
                    continue
                self._entries_of.setdefault(submission.request_id, set()).add(joined)
            if fresh:
                self._queues.add(fresh.values())
                self._wakes.notify(len(fresh))
            if at_once:  # under the lock: ``close`` ends the delivery behind whatever was accepted
                self._finished.put(at_once)
        num_shared = len(submission.items) - len(fresh) - len(at_once)
        if num_shared or num_cached:
            self._metrics.shared(in_flight=num_shared, cached=num_cached)

    def cancel(self, request_id: int) -> None:
        """Forget the request; entries that nobody else waits for leave the queue."""
        with self._lock:
            entries = self._entries_of.pop(request_id, None)
            if not entries:
                return
            for entry in entries:
                entry.drop(request_id)
            self._queues.remove(
                [entry for entry in entries if not entry.waiters and self._queues.twin(entry.identity) is entry]
            )

    def stats(self) -> PortStats:
        now_s = time.monotonic()
        with self._lock:
            steps = [worker.step for worker in self._workers if worker.step is not None]
            num_streams = self._engine.info.num_streams
            return PortStats(
                lanes=self._queues.stats(),
                num_running=sum([len(step.entries) for step in steps]),
                running_s=left_s(steps, now_s),
                slowdown=self._gate.gate.num_busy(self._gate) / num_streams,
                interactive_share=self._scheduler.served.interactive_share(now_s, num_streams),
                is_alive=self._death is None and not self._closing and self._delivery.is_alive(),
                is_stalled=self._is_stalled,
                is_busy=bool(steps) or bool(len(self._queues)),
                last_step_s=self._last_step_s,
                step_cap_s=self._scheduler.cap_s(now_s),
                overtaking=self._scheduler.overtaking,
                device=self._engine.info.device,
                num_streams=num_streams,
                unshared=self._engine.info.unshared,
            )

    def close(self) -> None:
        """Run what is queued, deliver it, end the threads, free the engine. One that hangs is given up, as always."""
        with self._lock:
            self._closing = True
            self._wakes.notify_all()
        while (thread := self._unfinished()) is not None:
            thread.join(_WATCH_EVERY_S)
        self._stop_watching.set()
        self._watchdog.join()
        self._finished.put(None)
        self._delivery.join()
        self._metrics.forget(self.stats)
        self._gate.leave()
        self._cache = None  # large, and what refers to this manager may be in a cycle that nobody collects
        self._reload = None  # it holds the artifact's files open
        if not self._is_stalled:  # an engine that was given up may still be inside its step
            self._engine.close()

    # Under the lock.

    def _entry(self, submission: Submission, item: Item, now_s: float) -> Entry:
        deadline_s = inf if submission.deadline_s is None else submission.deadline_s
        waiter = Waiter(submission.request_id, item.place, deadline_s, submission.outputs, submission.flow)
        cost_s = self._costs.sequence_seconds(item.encoding.num_tokens)
        return Entry(item.encoding, waiter, submission.lane, now_s, cost_s)

    def _joined(self, entry: Entry, fresh: dict[Identity, Entry], now_s: float) -> Entry:
        """The entry that will be run for ``entry``: itself (then it is in ``fresh``), or an equal one in flight."""
        (waiter,) = entry.waiters
        if (twin := fresh.get(entry.identity)) is not None:
            twin.add(waiter)
            return twin
        if (twin := self._queues.twin(entry.identity)) is not None:
            self._queues.join(twin, waiter, entry.lane, now_s)
            return twin
        twin = self._running.get(entry.identity)
        if twin is not None and entry.outputs <= twin.outputs:
            twin.add(waiter)
            return twin
        fresh[entry.identity] = entry
        return entry

    def _start_workers(self, engine: Engine) -> None:
        workers: list[Worker] = []
        for index in range(engine.info.num_streams):
            worker = Worker(engine, workers)
            workers.append(worker)
            self._workers.append(worker)
            worker.thread = started(partial(self._work, worker), f"bei-engine-{index}")

    def _cut(self, turn: Turn) -> Step | None:
        """The next step; None if nothing waits."""
        now_s = time.monotonic()
        cut = self._scheduler.cut(now_s, self._gate.gate.expects_interactive)
        if cut.expired:
            self._answer_expired(cut.expired, now_s)
        if not cut.entries:
            return None
        for entry in cut.entries:
            self._running[entry.identity] = entry
        return Step(cut.entries, cut.predicted_s, turn, cut.num_shared)

    def _answer_expired(self, expired: list[Entry], now_s: float) -> None:
        self._metrics.expired(len(expired))
        errors = [DeadlineExceededError.after(now_s - entry.arrived_s) for entry in expired]
        self._finished.put(Done(expired, known(errors)))

    # The engine's threads: decide, act, record.

    def _work(self, worker: Worker) -> None:
        try:
            while (step := self._take(worker)) is not None:
                note = partial(self._note_failure, step)
                shares = step.num_shared > 0
                answers = run_isolating(worker.engine, step.entries, note, worker.is_wanted, shares=shares)
                self._record(worker, step, answers)
                del step, answers, note  # while this waits for the next ones, their memory is to be free
        except BaseException as error:  # a bug of ours, or of the engine's library: whoever waits must hear of it
            log.exception("an engine thread has died")
            with self._lock:
                if worker.is_retired:  # its work is with another engine
                    return
                step, worker.step = worker.step, None
            if step is not None:
                step.turn.end(0.0)
            died = f"The engine's thread has died ({type(error).__name__}): restart the server."
            self._die(str(error) if isinstance(error, EngineDeadError) else died)
        finally:
            self._leave(worker)

    def _note_failure(self, step: Step, kind: str) -> None:
        step.has_failed = True
        self._metrics.batch_failed(kind)

    def _leave(self, worker: Worker) -> None:
        """The last thread of an engine that was given up closes it: nobody is inside any more."""
        with self._lock:
            worker.has_ended = True
            if not (worker.is_retired and all(other.has_ended for other in worker.others)):
                return
        try:
            worker.engine.close()
        except Exception:  # a border: what hung may have left anything behind, and another engine is at work
            log.exception("an engine that was given up could not be closed")

    def _take(self, worker: Worker) -> Step | None:
        """The next step, waiting for one if need be; None when this worker has nothing more to do."""
        while True:
            with self._lock:
                while not (len(self._queues) or self._closing or worker.is_retired or self._death):
                    self._wakes.wait()
                if worker.is_retired or self._death or not len(self._queues):
                    return None
            turn = self._gate.turn()
            try:
                with self._lock:
                    worker.step = step = None if worker.is_retired or self._death else self._cut(turn)
            except BaseException:  # raised again: the other models must not wait for a turn that nobody has
                turn.end(0.0)
                raise
            if step is not None:
                return step
            turn.end(0.0)

    def _record(self, worker: Worker, step: Step, answers: Answers) -> None:
        ended_s = time.monotonic()
        seconds = ended_s - step.started_s
        step.turn.end(seconds)
        with self._lock:
            if worker.is_retired:
                return
            worker.step = None
            self._num_hangs = 0
            self._last_step_s = ended_s
            self._scheduler.served.add(ended_s, seconds, step.entries)
            is_idle = not len(self._queues)
        done = Done(step.entries, answers, (step, seconds))
        is_quick = is_idle and len(step.entries) <= _MOST_DELIVERED_AT_ONCE and self._finished.empty()
        if is_quick and self._delivering.acquire(blocking=False):
            try:
                self._deliver(done)
            finally:
                self._delivering.release()
        else:
            self._finished.put(done)

    # The delivery thread, and an engine's that has nothing else to do.

    def _deliver_all(self) -> None:
        try:
            self._deliver_each()
        except BaseException as error:  # a bug: whoever waits must hear of it
            log.exception("the delivery thread has failed")
            self._die(f"Answers cannot be delivered ({type(error).__name__}): restart the server.")
            self._deliver_each()  # what was done before, and the errors; a second failure ends the thread

    def _deliver_each(self) -> None:
        while (done := self._finished.get()) is not None:
            with self._delivering:
                self._deliver(done)
            del done  # as above

    def _deliver(self, done: Done | list[Answer]) -> None:
        answers = self._answers_of(done) if isinstance(done, Done) else done
        if answers:
            try:
                self._on_answers(answers)
            except Exception:  # a border: one front's bug must not cost others their answers
                log.exception("answers could not be handed over")
        if isinstance(done, Done) and done.step is not None:
            try:
                self._account(done, *done.step)
            except Exception:  # a border: without this thread nobody would get an answer any more
                log.exception("a step could not be counted")

    def _answers_of(self, done: Done) -> list[Answer]:
        try:
            return self._settled(done)
        except Exception:  # a border: whoever waits must hear of it, and others get their answers
            log.exception("the answers to %d sequences could not be made", len(done.entries))
            error = EngineError("The answer could not be made; the server's log says why.")
            return self._settled(done._replace(answers=known([error] * len(done.entries))))

    def _settled(self, done: Done) -> list[Answer]:
        """The answers to everybody who waits for the entries of ``done``, which are forgotten when all are made."""
        answers = done.answers()
        times = None
        if done.step is not None:
            step, seconds = done.step
            times = StepTimes(step.started_s, step.started_s + seconds)
        with self._lock:
            settled = [
                Answer(waiter.request_id, waiter.place, part_of(answer, waiter.outputs), times)
                for entry, answer in zip(done.entries, answers, strict=True)
                for waiter in entry.waiters
            ]
            for entry, answer in zip(done.entries, answers, strict=True):
                if self._running.get(entry.identity) is entry:
                    del self._running[entry.identity]
                if self._cache is not None and not isinstance(answer, BeiError):
                    self._keep(self._cache, entry.identity, answer)
                for waiter in entry.waiters:
                    others = self._entries_of.get(waiter.request_id)
                    if others is not None:
                        others.discard(entry)
                        if not others:
                            del self._entries_of[waiter.request_id]
                entry.waiters = []
        return settled

    def _keep(self, cache: RowCache, identity: Identity, row: Row) -> None:
        try:
            cache.put(identity, row)
        except Exception:  # a border: a cache that fails must not cost anybody an answer
            log.exception("an answer could not be cached")

    def _account(self, done: Done, step: Step, seconds: float) -> None:
        """Correct the costs by a step that has run, and count it: while the engine runs the next one."""
        lengths = [entry.num_tokens for entry in done.entries]
        tokens, longest = sum(lengths), max(lengths)
        if not step.has_failed:  # such a step was run several times
            self._costs.observe(tokens - step.num_shared, len(lengths), longest, seconds)
        waits = [(entry.lane, step.started_s - entry.arrived_s) for entry in done.entries]
        self._metrics.batch(
            lengths, num_shared=step.num_shared, engine_s=seconds, predicted_s=step.predicted_s, waits=waits
        )

    # The watchdog's thread.

    def _watch(self) -> None:
        """Look for steps that do not end. Counts the time it is awake itself: a stopped process is no hung engine."""
        try:
            while not self._stop_watching.wait(_WATCH_EVERY_S):
                steps = self._given_up()
                if steps:
                    self._replace_engine(steps)
        except BaseException as error:  # whoever waits for an engine that hangs must hear that nobody replaces it
            log.exception("the watchdog has died")
            self._die(f"The engine's watchdog has died ({type(error).__name__}): restart the server.")

    def _given_up(self) -> list[Step]:
        """If a step is taken to hang, give up its engine, with all steps that run on it, which are returned.

        Steps on other streams are given up too: what keeps one from ending may keep them, and no thread of the former
        engine is left to be watched. All in one moment, so that each step either ends or is given up.
        """
        with self._lock:
            steps = [worker.step for worker in self._workers if worker.step is not None]
            for step in steps:
                step.is_overdue = self._is_overdue(step)
            if not any(step.is_overdue for step in steps):
                return []
            self._is_stalled = True
            self._num_hangs += 1
            for worker in self._workers:
                worker.is_retired = True
                worker.step = None
            self._workers = []
            self._wakes.notify_all()
            return steps

    def _is_overdue(self, step: Step) -> bool:
        step.watched_s += _WATCH_EVERY_S
        return step.watched_s > longest_s(step.predicted_s, self._rules.hang_timeout_s)

    def _replace_engine(self, steps: Seq[Step]) -> None:
        """Run what ``steps`` had once more on another engine, unless it was in a step that hung for the second time.

        A dead engine, whose work has been answered, is given up alone: ``close`` must not wait for it.
        """
        entries = [entry for step in steps for entry in step.entries]
        is_last = self._reload is None or self._death is not None
        if is_last:
            log.error("a step of %d sequences does not end: the engine is given up", len(entries))
        else:
            log.error(
                "a step does not end: the engine is replaced, and what it ran, %d sequences, run again", len(entries)
            )
        self._metrics.engine_restarted()
        for step in steps:
            step.turn.end(step.watched_s)
        hung = [entry for step in steps if step.is_overdue for entry in step.entries]
        lost = [entry for entry in hung if entry.num_hangs]
        self._finished.put(Done(lost, known([EngineError("The engine hangs on this input.")] * len(lost))))
        engine = None if is_last or self._num_hangs > _MOST_RESTARTS else self._loaded()
        if engine is None:
            self._die("The engine hangs and could not be replaced: restart the server.")
            return
        with self._lock:
            for entry in hung:
                entry.num_hangs += 1
            for entry in entries:
                if entry.num_hangs <= 1:
                    self._replay(entry)
            self._engine = engine
            self._is_stalled = False
            self._start_workers(engine)

    def _replay(self, entry: Entry) -> None:
        """Under the lock: queue ``entry`` once more."""
        if self._running.get(entry.identity) is entry:
            del self._running[entry.identity]
        twin = self._queues.twin(entry.identity)  # there may be one that wants other outputs
        if twin is None:
            self._queues.add([entry] if entry.waiters else [])
            return
        for waiter in entry.waiters:
            self._queues.join(twin, waiter, entry.lane, time.monotonic())
            self._entries_of[waiter.request_id].discard(entry)
            self._entries_of[waiter.request_id].add(twin)
        twin.num_hangs = max(twin.num_hangs, entry.num_hangs)
        entry.waiters = []

    def _loaded(self) -> Engine | None:
        """Another engine; None where there is no way to get one."""
        try:
            return None if self._reload is None else self._reload()
        except BaseException:  # a border: whatever keeps the engine from loading, whoever waits must hear of it
            log.exception("the engine could not be loaded again")
            return None

    def _die(self, message: str) -> None:
        """Fail what waits and refuse what comes."""
        with self._lock:
            self._death = self._death or message
            self._queues.clear()
            doomed = list(frozenset[Entry]().union(*self._entries_of.values()))
            self._finished.put(Done(doomed, known([EngineDeadError(self._death)] * len(doomed))))
            self._wakes.notify_all()

    def _unfinished(self) -> threading.Thread | None:
        """A thread that ``close`` has to wait for; the watchdog while it replaces the engine."""
        with self._lock:
            if self._is_stalled and self._death is None:
                return self._watchdog
            return next((worker.thread for worker in self._workers if worker.thread.is_alive()), None)
