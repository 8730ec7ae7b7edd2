"""Start-time fair queueing: which of the sequences that wait in a lane may go into the next step, so that no flow gets
more of the engine than another one that waits beside it. Not thread-safe: callers lock."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

from bei.scheduler.next_batch import LaneView, QueueKey

# So many steps' worth of sequences is looked at for the next one: more would group lengths a little better, and take
# longer to look at than it saves.
_MOST_STEPS = 8


class _Claim(Protocol):
    @property
    def flow(self) -> int: ...


class Waiting(Protocol):
    """The part of an entry of the queue that is used here. ``waiters``: whoever waits for it, at least one."""

    arrival: int
    cost_s: float
    due_s: float

    @property
    def key(self) -> QueueKey: ...

    @property
    def waiters(self) -> Iterable[_Claim]: ...


class _Flow:
    """``virtual_s``: the predicted seconds that it was served, on the clock of the queue. ``backlog``: due times and
    arrivals, sorted; those that have left the queue are removed when they come up."""

    __slots__ = ("backlog", "number", "order", "virtual_s")

    def __init__(self, number: int, virtual_s: float) -> None:
        self.number = number
        self.virtual_s = virtual_s
        self.order = 0
        self.backlog: list[tuple[float, int]] = []


class FairQueue:
    """The flows of one lane. ``entries``: all that wait in it, by arrival; the lane goes on changing them.

    Each flow has a virtual time, which grows by the predicted seconds of what it is served. A step is built around the
    most urgent sequence of the flow with the least. Any flow may give sequences to it, in order of urgency, until its
    virtual time would be a step ahead of the least. So while two flows wait, what they are served differs by at most
    two full steps and two sequences (docs/decisions.md, "Flows share a lane").
    """

    def __init__(self, entries: Mapping[int, Waiting]) -> None:
        self._entries = entries
        self._flows: dict[int, _Flow] = {}  # those that wait, and those ahead of the clock
        self._idle: set[int] = set()  # the latter
        self._ranks: list[tuple[float, int, _Flow]] = []  # a heap; of each flow the last counts
        self._orders = count()
        self._clock_s = 0.0  # where a flow that comes begins
        self._progress_s = 0.0
        self._found: dict[int, _Flow] = {}  # of the last window, by arrival
        self.urgent = -1  # of the last window: an arrival
        for entry in sorted(entries.values(), key=lambda entry: (entry.due_s, entry.arrival)):
            for waiter in entry.waiters:
                self.add(entry, waiter.flow)
        for flow in sorted(self._flows.values(), key=lambda flow: len(flow.backlog)):
            self._rank(flow)  # who came with the least is likely to have come last, and had none of the time before

    @property
    def flows(self) -> Iterable[int]:
        """Those that wait, and some that waited lately."""
        return self._flows.keys()

    def add(self, entry: Waiting, number: int) -> None:
        """The flow ``number`` waits for ``entry``. Several may, or one again as it is more urgent: any that comes up
        brings it."""
        flow = self._flows.get(number)
        if flow is None:
            flow = self._flows[number] = _Flow(number, self._clock_s)
            self._rank(flow)
        self._idle.discard(number)
        insort(flow.backlog, (entry.due_s, entry.arrival))

    def window(self, step_s: float) -> LaneView:
        """What may go into the next step, where one takes up to ``step_s``. Something must wait."""
        found: dict[int, _Flow] = {}
        self._found = found
        seen: list[tuple[float, int, _Flow]] = []
        most_s, end_s = 0.0, inf
        while self._ranks and most_s < _MOST_STEPS * step_s:
            rank = heappop(self._ranks)
            virtual_s, order, flow = rank
            if order != flow.order:
                continue
            if virtual_s >= end_s:
                heappush(self._ranks, rank)
                break
            entries = self._first_of(flow, min(step_s, end_s - virtual_s))
            if not entries and virtual_s <= self._clock_s:
                del self._flows[flow.number]  # if it comes again, it begins at the clock
                self._idle.discard(flow.number)
                continue
            seen.append(rank)
            if entries and not found:
                self.urgent, end_s = entries[0].arrival, virtual_s + step_s
                # The clock goes on however many flows come and begin there, so that the others come up.
                self._clock_s = min(max(self._clock_s + self._progress_s, virtual_s), end_s)
                self._progress_s = 0.0
            for entry in entries:
                if entry.arrival not in found:
                    found[entry.arrival] = flow
                    most_s += entry.cost_s
        for rank in seen:
            heappush(self._ranks, rank)
        keys = sorted(self._entries[arrival].key for arrival in found)
        return LaneView(keys, bisect_left(keys, self._entries[self.urgent].key))

    def charge(self, members: Iterable[Waiting]) -> None:
        """``members`` of the last window are served."""
        charged: dict[_Flow, float] = {}
        for entry in members:
            flow = self._found[entry.arrival]
            charged[flow] = charged.get(flow, 0.0) + entry.cost_s
        for flow, cost_s in charged.items():
            flow.virtual_s += cost_s
            self._rank(flow)
            if not self._first_of(flow, 0.0):
                self._idle.add(flow.number)
        self._progress_s = sum(charged.values()) / max(1, len(self._flows) - len(self._idle))

    def _rank(self, flow: _Flow) -> None:
        flow.order = next(self._orders)
        heappush(self._ranks, (flow.virtual_s, flow.order, flow))

    def _first_of(self, flow: _Flow, seconds: float) -> list[Waiting]:
        """The most urgent entries of ``flow``, of so many predicted ``seconds``; the last may go beyond."""
        entries: list[Waiting] = []
        num_seen = 0
        for _, arrival in flow.backlog:
            num_seen += 1
            entry = self._entries.get(arrival)
            if entry is not None:
                entries.append(entry)
                seconds -= entry.cost_s
                if seconds <= 0:
                    break
        if len(entries) < num_seen:
            flow.backlog[:num_seen] = [claim for claim in flow.backlog[:num_seen] if claim[1] in self._entries]
        return entries
