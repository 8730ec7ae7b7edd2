"""Simulates a run: a trace through front end, a policy's queue, and the streams of the devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from functools import partial
from heapq import heappop, heappush
from itertools import cycle
from math import inf

import numpy as np

from bei.cli.simulate.clock import SimulatedClock
from bei.cli.simulate.devices import SimulatedDevices
from bei.cli.simulate.http_time import HttpTime
from bei.cli.simulate.policies import Policy
from bei.cli.simulate.result import SimulatedAnswer, SimulatedStep, SimulationResult, figures
from bei.cli.simulate.trace import Trace, TraceRequest
from bei.core import Encoding
from bei.port import LANES, Lane
from bei.scheduler.queue import Entry, Waiter

_NO_HTTP_TIME = HttpTime()


def simulate(
    trace: Trace, devices: SimulatedDevices, policy: Policy, *, http_time: HttpTime = _NO_HTTP_TIME, warm_s: float = 0.0
) -> SimulationResult:
    """Run all of ``trace``; figures from ``warm_s`` on.

    Nothing is refused: under overload, queue and latencies grow. Raises ValueError if the trace ends before ``warm_s``.
    """
    run = SimulationRun(trace, devices, policy, http_time)
    run.play()
    end_s = trace.seconds or (trace.arrivals[-1].at_s if trace.arrivals else None) or run.clock.now_s
    return figures(run.answered, run.steps, devices.num_streams, (warm_s, end_s), run.num_cut)


class _OnItsWay:
    """A request with unanswered texts."""

    __slots__ = ("arrived_s", "num_left", "request")

    def __init__(self, request: TraceRequest, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.num_left = len(request.tokens)


class SimulationRun:
    """State and results of a run. As in the server, an idle stream takes queued texts at once."""

    def __init__(self, trace: Trace, devices: SimulatedDevices, policy: Policy, http_time: HttpTime) -> None:
        self.clock = SimulatedClock()
        self.answered: list[SimulatedAnswer] = []
        self.steps: list[SimulatedStep] = []
        self.num_cut = 0
        self._policy = policy
        self._http_time = http_time
        self._costs = devices.table.model()
        self._ratios = cycle(devices.ratios)
        self._max_seq_len = self._costs.limits.max_seq_len
        self._arrivals = iter(trace.arrivals)
        self._backfill = deque(trace.backfill)
        self._concurrency = trace.concurrency
        self._backfill_ends_s = inf if trace.seconds is None else trace.seconds
        self._idle = list(range(devices.num_streams))  # a heap
        self._owed_s = 0.0  # delay of the next steps by the front end's work on the engine's cores
        self._requests: dict[int, _OnItsWay] = {}
        self._num_requests = self._num_texts = 0

    def play(self) -> None:
        """Run until every request is answered."""
        self._await_arrival()
        for _ in range(min(self._concurrency, len(self._backfill))):
            self._next_of_backfill()
        self.clock.run()

    # Arrivals.

    def _await_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            assert request.at_s is not None
            self.clock.at(request.at_s, partial(self._arrive, request))

    def _arrive(self, request: TraceRequest) -> None:
        self._await_arrival()
        self._accept(request)

    def _next_of_backfill(self) -> None:
        if self._backfill and self.clock.now_s < self._backfill_ends_s:
            self._accept(self._backfill.popleft())

    def _accept(self, request: TraceRequest) -> None:
        now_s = self.clock.now_s
        number = self._num_requests
        self._num_requests += 1
        self._requests[number] = _OnItsWay(request, now_s)
        self._owed_s += self._http_time.engine_s(len(request.tokens))
        for after_s, texts in self._http_time.chunks(len(request.tokens)):
            self.clock.at(now_s + after_s, partial(self._enqueue, number, request, texts))

    def _enqueue(self, number: int, request: TraceRequest, texts: slice) -> None:
        now_s = self.clock.now_s
        entries = [self._entry(number, place, request, now_s) for place in range(texts.start, texts.stop)]
        self._policy.add(entries, now_s)
        while self._idle and self._start(self._idle[0]):
            heappop(self._idle)

    def _entry(self, number: int, place: int, request: TraceRequest, now_s: float) -> Entry:
        """A queue entry for a text, equal to no other. Texts beyond the limit are truncated, as in the server."""
        length = min(request.tokens[place], self._max_seq_len)
        self.num_cut += length < request.tokens[place]
        self._num_texts += 1
        ids = np.full(length, self._num_texts, np.int32)
        return Entry(Encoding(ids), Waiter(number, place, inf, frozenset()), request.lane, now_s, 0.0)

    # Steps.

    def _start(self, stream: int) -> bool:
        """Begin the next step on ``stream``; False if the queue is empty."""
        entries = self._policy.cut(self.clock.now_s)
        if not entries:
            return False
        lengths = [entry.num_tokens for entry in entries]
        seconds = next(self._ratios) * self._costs.seconds(sum(lengths), len(lengths), max(lengths)) + self._owed_s
        self._owed_s = 0.0
        started_s = self.clock.now_s
        self.clock.at(started_s + seconds, partial(self._end, stream, entries, started_s))
        return True

    def _end(self, stream: int, entries: list[Entry], started_s: float) -> None:
        """As in the server, the stream cuts its next step before answers are delivered."""
        now_s = self.clock.now_s
        self.steps.append(_step_of(stream, entries, started_s, now_s))
        self._policy.ran(entries, now_s - started_s, now_s)
        if not self._start(stream):
            heappush(self._idle, stream)
        for entry in entries:
            self._deliver(entry.waiters[0].request_id)

    def _deliver(self, number: int) -> None:
        on_its_way = self._requests[number]
        on_its_way.num_left -= 1
        if on_its_way.num_left:
            return
        del self._requests[number]
        request = on_its_way.request
        num_tokens = sum(min(length, self._max_seq_len) for length in request.tokens)
        self.answered.append(
            SimulatedAnswer(request.lane, on_its_way.arrived_s, self.clock.now_s, len(request.tokens), num_tokens)
        )
        if request.at_s is None:
            self._next_of_backfill()


def _step_of(stream: int, entries: Seq[Entry], started_s: float, ended_s: float) -> SimulatedStep:
    texts: dict[Lane, int] = dict.fromkeys(LANES, 0)
    tokens: dict[Lane, int] = dict.fromkeys(LANES, 0)
    for entry in entries:
        texts[entry.lane] += 1
        tokens[entry.lane] += entry.num_tokens
    return SimulatedStep(stream, started_s, ended_s, texts, tokens, max(entry.num_tokens for entry in entries))
