"""Which sequences run together (``next_batch``, a pure function) and the threads that make it so (``BatchManager``).

In-flight batching for models of one pass: sequences join at every step, up to the moment an engine is free to take the
next batch. No timers: an idle engine starts at once with what there is. Knows no text and no HTTP.

One thread per engine stream only cuts and runs batches. One thread delivers the answers. Nothing is cut ahead: cutting
takes 20 us, and whatever arrives meanwhile makes the batch better (docs/decisions.md, "Batches are cut late").
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeAlias

from bei.core import Encoding, Engine, Limits, Outputs, PackedBatch, Row, finite_sequences
from bei.errors import BeiError, EngineError, NonFiniteOutputError, ShuttingDownError
from bei.metrics import ModelMetrics

log = logging.getLogger(__name__)

# The attention core runs on a padded view: a batch may have at most this many slots per token. Length-sorted batches
# stay far below; it keeps one long text from padding a hundred short ones.
MAX_SLOTS_PER_TOKEN = 2.0

# Weight of the newest batch in the running mean of seconds per sequence (Retry-After).
_SMOOTHING = 0.1

# Token ids, token types, and how many tokens are looked at.
_Identity: TypeAlias = "tuple[bytes, bytes | None, int | None]"


class QueueKey(NamedTuple):
    """A queued sequence as ``next_batch`` sees it. Ordered by length, then by arrival."""

    num_tokens: int
    arrival: int


def next_batch(queued: Seq[QueueKey], oldest: int, limits: Limits) -> slice:
    """The batch to run next: a window of ``queued`` (sorted) that contains position ``oldest``.

    It grows from the oldest sequence towards its neighbours in length, the nearer first, until a neighbour on either
    side would break a limit. So nothing starves (every batch takes the oldest sequence along), and lengths in a batch
    are alike, which keeps the padded part of the attention small. Sequences longer than ``max_num_tokens`` do not
    reach the queue. ``queued`` must not be empty.
    """
    low, high = oldest, oldest + 1
    tokens = queued[oldest].num_tokens

    def fits(candidate: int, longest: int) -> bool:
        total, size = tokens + candidate, high - low + 1
        return total <= limits.max_num_tokens and size * longest <= MAX_SLOTS_PER_TOKEN * total

    while high - low < limits.max_batch_size:
        longest = queued[high - 1].num_tokens
        left = queued[low - 1].num_tokens if low else None
        right = queued[high].num_tokens if high < len(queued) else None
        left_fits = left is not None and fits(left, longest)
        right_fits = right is not None and fits(right, right)
        if right_fits and right is not None and (not left_fits or left is None or right - longest <= longest - left):
            high, tokens = high + 1, tokens + right
        elif left_fits and left is not None:
            low, tokens = low - 1, tokens + left
        else:
            break
    return slice(low, high)


class Request:
    """Sequences that are answered together: rows in the order of the inputs, or one error.

    Every method is safe in any thread. Exactly one of ``record`` and ``fail`` returns True, once: then it is done.
    """

    def __init__(self, num_sequences: int) -> None:
        self.rows: list[Row | None] = [None] * num_sequences
        self.error: BeiError | None = None
        self._remaining = num_sequences
        self._done = False
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Answered, failed or cancelled: nothing more needs to be computed for it."""
        return self._done

    def record(self, index: int, row: Row) -> bool:
        """Store the answer to input ``index``; True if it was the last one."""
        with self._lock:
            if self._done:
                return False
            self.rows[index] = row
            self._remaining -= 1
            self._done = self._remaining == 0
            return self._done

    def fail(self, error: BeiError) -> bool:
        """Answer the whole request with ``error``; False if it was done already."""
        with self._lock:
            if self._done:
                return False
            self.error = error
            self._done = True
            return True

    def cancel(self) -> None:
        """The client left: what is queued will not be run."""
        with self._lock:
            self._done = True


class Sequence:
    """One tokenized input on its way through the engine, and everybody who waits for it.

    Identical inputs in the queue are one sequence with several waiters.
    """

    __slots__ = ("arrived_s", "encoding", "waiters")

    def __init__(self, encoding: Encoding, request: Request, index: int) -> None:
        self.encoding = encoding
        self.waiters = [(request, index)]
        self.arrived_s = time.monotonic()

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits."""
        return any(not request.is_done for request, _ in self.waiters)

    @property
    def identity(self) -> _Identity:
        """Equal for inputs that have the same answer."""
        encoding = self.encoding
        types = encoding.token_type_ids
        return encoding.input_ids.tobytes(), None if types is None else types.tobytes(), encoding.num_keys


class _Queue:
    """Waiting sequences, sorted by length and by arrival at once. Not safe in threads; the manager locks."""

    def __init__(self) -> None:
        self._sorted: list[QueueKey] = []
        self._by_arrival: dict[int, Sequence] = {}  # in order of arrival
        self._by_identity: dict[_Identity, Sequence] = {}
        self._next_arrival = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, sequences: Seq[Sequence]) -> None:
        """Enqueue; a sequence equal to a waiting one joins it.

        Of those that come together the longest counts as the oldest: long ones have the fewest neighbours in length,
        and are best run while there are most to choose from (docs/decisions.md, "Batches are cut late").
        """
        for sequence in sorted(sequences, key=lambda sequence: sequence.encoding.num_tokens, reverse=True):
            twin = self._by_identity.setdefault(sequence.identity, sequence)
            if twin is not sequence:
                twin.waiters += sequence.waiters
                continue
            insort(self._sorted, QueueKey(sequence.encoding.num_tokens, self._next_arrival))
            self._by_arrival[self._next_arrival] = sequence
            self._next_arrival += 1
            self.num_tokens += sequence.encoding.num_tokens

    def drop_unwanted(self) -> None:
        """Forget the sequences that nobody waits for any more."""
        wanted = {arrival: sequence for arrival, sequence in self._by_arrival.items() if sequence.is_wanted}
        self._by_arrival = wanted
        self._by_identity = {sequence.identity: sequence for sequence in wanted.values()}
        self._sorted = sorted(QueueKey(s.encoding.num_tokens, arrival) for arrival, s in wanted.items())
        self.num_tokens = sum(key.num_tokens for key in self._sorted)

    def cut(self, limits: Limits) -> list[Sequence]:
        """Remove the next batch."""
        arrival, oldest = next(iter(self._by_arrival.items()))
        position = bisect_left(self._sorted, QueueKey(oldest.encoding.num_tokens, arrival))
        window = next_batch(self._sorted, position, limits)
        keys = self._sorted[window]
        del self._sorted[window]
        members = [self._by_arrival.pop(key.arrival) for key in keys]
        for member in members:
            del self._by_identity[member.identity]
            self.num_tokens -= member.encoding.num_tokens
        return members


class _Step(NamedTuple):
    """A batch that has run: ``answers[i]`` is the row or the error of ``members[i]``. Times are monotonic seconds."""

    members: list[Sequence]
    answers: list[Row | BeiError]
    started_s: float
    ended_s: float


class BatchManager:
    """Feeds one engine. ``submit`` from any thread.

    ``rows_of`` cuts the engine's outputs into one row a sequence, for a whole batch at once, in the engine's thread.
    ``on_done`` gets finished requests, in a thread of its own.
    """

    def __init__(
        self,
        engine: Engine,
        rows_of: Callable[[Outputs, PackedBatch], Seq[Row]],
        on_done: Callable[[list[Request]], None],
        metrics: ModelMetrics,
    ) -> None:
        self._engine = engine
        self._rows_of = rows_of
        self._limits = engine.info.limits
        self._on_done = on_done
        self._metrics = metrics
        self._lock = threading.Lock()
        self._engine_wakes = threading.Condition(self._lock)
        self._queue = _Queue()
        self._finished: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._num_idle = 0
        self._num_cancelled = 0
        self._closing = False
        self.seconds_per_sequence = 0.0
        self._engine_threads = [
            threading.Thread(target=self._run_batches, name=f"bei-engine-{index}", daemon=True)
            for index in range(engine.info.num_streams)
        ]
        self._delivery_thread = threading.Thread(target=self._deliver_steps, name="bei-delivery", daemon=True)
        for thread in (*self._engine_threads, self._delivery_thread):
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether every thread still works."""
        return all(thread.is_alive() for thread in (*self._engine_threads, self._delivery_thread))

    @property
    def queue_length(self) -> int:
        """Sequences waiting, cancelled ones that were not dropped yet included."""
        return len(self._queue)

    def submit(self, sequences: Seq[Sequence]) -> None:
        """Enqueue ``sequences``. Raises ShuttingDownError after ``close``."""
        with self._lock:
            if self._closing:
                raise ShuttingDownError("The server is shutting down: send the request to another replica.")
            self._queue.add(sequences)
            self._metrics.queue(len(self._queue), self._queue.num_tokens)
            if self._num_idle:
                self._engine_wakes.notify(len(sequences))

    def cancelled(self, num_sequences: int) -> None:
        """So many submitted sequences are no longer wanted. Keeps the queue from filling with them.

        They are dropped once they could be half of the queue, so that each costs a constant share of the sweeps.
        """
        with self._lock:
            self._num_cancelled += num_sequences
            if self._num_cancelled > len(self._queue) // 2:
                self._num_cancelled = 0
                self._queue.drop_unwanted()
                self._metrics.queue(len(self._queue), self._queue.num_tokens)

    def close(self) -> None:
        """Run what is queued, deliver it, end the threads."""
        with self._lock:
            self._closing = True
            self._engine_wakes.notify_all()
        for thread in self._engine_threads:
            thread.join()
        self._finished.put(None)
        self._delivery_thread.join()

    # The engine's threads: decide, act, record.

    def _run_batches(self) -> None:
        while (members := self._take()) is not None:
            started_s = time.monotonic()
            answers = self._run_isolating(members)
            self._finished.put(_Step(members, answers, started_s, time.monotonic()))

    def _take(self) -> list[Sequence] | None:
        """The next batch, waiting for one if need be; None when the manager has closed and nothing is left."""
        with self._lock:
            while True:
                if len(self._queue):
                    members = self._queue.cut(self._limits)
                    self._metrics.queue(len(self._queue), self._queue.num_tokens)
                    wanted = [member for member in members if member.is_wanted]
                    if wanted:
                        return wanted
                    continue
                if self._closing:
                    return None
                self._num_idle += 1
                self._engine_wakes.wait()
                self._num_idle -= 1

    def _run_isolating(self, members: list[Sequence]) -> list[Row | BeiError]:
        """Run ``members``; if the engine fails, halve until the poisonous sequence is alone with its error."""
        try:
            batch = PackedBatch.from_encodings([member.encoding for member in members])
            outputs = self._engine.run(batch)
            finite = finite_sequences(outputs, batch, self._engine.info.per_token)
            rows = self._rows_of(outputs, batch)
            if len(rows) != len(members):
                raise EngineError(f"The engine answered {len(rows)} rows to {len(members)} sequences.")
        except Exception:  # a border: a batch's failure must reach its requests, whatever it is
            if len(members) > 1:
                half = len(members) // 2
                return self._run_isolating(members[:half]) + self._run_isolating(members[half:])
            log.exception("engine failed on one sequence of %d tokens", members[0].encoding.num_tokens)
            return [EngineError("The engine failed on this input; the server's log says why.")]
        return [
            row if is_finite else NonFiniteOutputError("The model's answer to this input is not a finite vector.")
            for row, is_finite in zip(rows, finite, strict=True)
        ]

    # The delivery thread.

    def _deliver_steps(self) -> None:
        while (step := self._finished.get()) is not None:
            self._deliver(step)
            self._observe(step)

    def _deliver(self, step: _Step) -> None:
        done = []
        for member, answer in zip(step.members, step.answers, strict=True):
            for request, index in member.waiters:
                is_last = request.fail(answer) if isinstance(answer, BeiError) else request.record(index, answer)
                if is_last:
                    done.append(request)
        if done:
            self._on_done(done)

    def _observe(self, step: _Step) -> None:
        spent = (step.ended_s - step.started_s) / len(step.members) / self._engine.info.num_streams
        previous = self.seconds_per_sequence
        self.seconds_per_sequence = spent if not previous else previous + _SMOOTHING * (spent - previous)
        self._metrics.batch(
            size=len(step.members),
            num_tokens=sum(member.encoding.num_tokens for member in step.members),
            engine_s=step.ended_s - step.started_s,
            waits_s=[step.started_s - member.arrived_s for member in step.members],
        )
