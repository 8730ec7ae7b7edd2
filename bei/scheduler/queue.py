"""Waiting sequences: a queue for each lane, sorted by length and by urgency. Not thread-safe: callers lock."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from bei.core import Encoding
from bei.port import LANES, Lane, LaneStats
from bei.scheduler.alike import Candidate, WaitingTexts
from bei.scheduler.fair_queue import FairQueue
from bei.scheduler.next_batch import LaneView, QueueKey

# Token ids (of an image the digest of its pixels), token types, how many tokens serve as attention keys, how many are
# left out of means, the adapter, and the digest of labels.
Identity: TypeAlias = "tuple[bytes, bytes | None, int | None, int, int, bytes]"

_NONE: Mapping[Lane, Seq[int]] = {}

# Work without a deadline is due this many seconds after its arrival, by lane, so that a stream of work with deadlines
# cannot starve it.
PATIENCE_S: Mapping[Lane, float] = {"interactive": 1.0, "bulk": 30.0}

# Up to this many sequences are removed one by one, each by a search and a shift of the list; more by one pass over it.
_FEW = 16


_num_tokens = attrgetter("num_tokens")


class Waiter(NamedTuple):
    """A request's claim to outputs of an entry, its deadline, and its flow."""

    request_id: int
    place: int
    deadline_s: float
    outputs: AbstractSet[str]
    flow: int = 0


class Entry:
    """One tokenized sequence on its way through the engine, and the requests that wait for it.

    Identical sequences are one entry with several waiters, and the outputs that any of them wants. ``deadline_s``: the
    latest deadline of the waiters. ``num_hangs``: how many of its steps hung.
    """

    __slots__ = (
        "arrival",
        "arrived_s",
        "cost_s",
        "deadline_s",
        "due_s",
        "encoding",
        "identity",
        "lane",
        "num_hangs",
        "num_tokens",
        "outputs",
        "waiters",
    )

    def __init__(self, encoding: Encoding, waiter: Waiter, lane: Lane, arrived_s: float, cost_s: float) -> None:
        types = encoding.token_type_ids
        self.encoding = encoding
        self.num_tokens = encoding.num_tokens
        self.identity: Identity = (
            encoding.input_ids.tobytes() if encoding.image is None else encoding.image.digest,
            None if types is None else types.tobytes(),
            encoding.num_keys,
            encoding.num_unpooled,
            encoding.adapter,
            encoding.image_digests
            if encoding.features or encoding.images
            else b""
            if encoding.label_vectors is None
            else encoding.label_vectors.digest,
        )
        self.waiters = [waiter]
        self.deadline_s = waiter.deadline_s
        self.lane = lane
        self.outputs = waiter.outputs
        self.arrived_s = arrived_s
        self.cost_s = cost_s
        self.due_s = min(waiter.deadline_s, arrived_s + PATIENCE_S[lane])
        self.arrival = 0  # the queue numbers it
        self.num_hangs = 0

    @property
    def key(self) -> QueueKey:
        """The entry as ``next_batch`` sees it."""
        return QueueKey(self.num_tokens, self.arrival)

    @property
    def text(self) -> bytes | None:
        """The token ids, if tokens differ in nothing else."""
        encoding = self.encoding
        plain = encoding.token_type_ids is None and encoding.num_keys is None and not encoding.adapter
        is_text = encoding.image is None and not encoding.features
        return self.identity[0] if plain and is_text else None

    def add(self, waiter: Waiter) -> None:
        """Add a request that waits for this entry."""
        self.waiters.append(waiter)
        self.deadline_s = max(self.deadline_s, waiter.deadline_s)

    def drop(self, request_id: int) -> None:
        """Remove the claims of a request."""
        self.waiters = [waiter for waiter in self.waiters if waiter.request_id != request_id]
        self.deadline_s = max([waiter.deadline_s for waiter in self.waiters], default=-inf)


class _LaneQueue:
    """The entries of one lane. ``sorts_texts``: sequences of a step may share prefixes."""

    def __init__(self, *, sorts_texts: bool) -> None:
        self.texts = WaitingTexts() if sorts_texts else None
        self.sorted: list[QueueKey] = []
        self.entries: dict[int, Entry] = {}  # by arrival
        self._due: list[tuple[float, int]] = []  # a heap; entries that have left are skipped when they come up
        self.num_tokens = 0
        self.cost_s = 0.0
        self._is_long = False  # with more than a full step; as of the last view
        self._flow: int | None = None  # of all entries, while it is long; None: several
        self.fair: FairQueue | None = None  # while it is long, and several wait
        self._window: Seq[QueueKey] = ()  # what it has shown

    def add(self, entry: Entry) -> None:
        insort(self.sorted, entry.key)
        self.entries[entry.arrival] = entry
        heapq.heappush(self._due, (entry.due_s, entry.arrival))
        self.num_tokens += entry.num_tokens
        self.cost_s += entry.cost_s
        if self.texts is not None and entry.text is not None:
            self.texts.add(entry.text, entry.arrival)
        if self._is_long:
            for waiter in entry.waiters:
                self.claim(entry, waiter.flow)

    def claim(self, entry: Entry, flow: int) -> None:
        """``flow`` waits for ``entry``, which is here."""
        if self.fair is not None:
            self.fair.add(entry, flow)
        elif flow != self._flow:
            self._flow = None

    def hurry(self, entry: Entry) -> None:
        """Sort ``entry`` again by urgency, after ``entry.due_s`` has become earlier."""
        heapq.heappush(self._due, (entry.due_s, entry.arrival))

    def urgent(self) -> Entry | None:
        """The entry that is due first, if there is any."""
        while self._due:
            entry = self.entries.get(self._due[0][1])
            if entry is not None:
                return entry
            heapq.heappop(self._due)
        return None

    def view(self, full_step_s: float) -> LaneView:
        """All that waits; what may go into the next step where several flows wait with more than a full one."""
        if self.cost_s > full_step_s:
            if not self._is_long:
                flows = {waiter.flow for entry in self.entries.values() for waiter in entry.waiters}
                self._is_long, self._flow = True, flows.pop() if len(flows) == 1 else None
            if self._flow is None and (view := self._fair_view(full_step_s)) is not None:
                return view
        else:
            self._is_long = False
        self.fair = None
        urgent = self.urgent()
        return LaneView(self.sorted, 0 if urgent is None else bisect_left(self.sorted, urgent.key))

    def _fair_view(self, full_step_s: float) -> LaneView | None:
        if self.fair is None:
            self.fair = FairQueue(self.entries)
        view = self.fair.window(full_step_s)
        if len(flows := [*self.fair.flows]) > 1:
            self._window = view.queued
            return view
        (self._flow,) = flows
        return None

    def members(self, parts: Iterable[slice]) -> list[Entry]:
        """The entries in ``parts`` of the last view, which stay."""
        keys = self.sorted if self.fair is None else self._window
        return [self.entries[key.arrival] for part in parts for key in keys[part]]

    def alike(self, text: bytes, but: Collection[int]) -> Iterator[Candidate]:
        """Entries that begin as ``text`` does, but for those arrivals; where flows share the lane, of the last view."""
        assert self.texts is not None
        shown = self.entries.keys() if self.fair is None else {key.arrival for key in self._window}
        for arrival, num_common in self.texts.nearest(text):
            if arrival in shown and arrival not in but:
                yield Candidate(arrival, self.entries[arrival].num_tokens, num_common)

    def cut(self, parts: Iterable[slice], joining: Seq[int]) -> list[Entry]:
        members = [self.entries[arrival] for arrival in joining]
        if self.fair is None:
            for part in parts:
                members += [self.entries.pop(key.arrival) for key in self.sorted[part]]
                del self.sorted[part]
        else:
            for part in parts:
                keys = self._window[part]
                members += [self.entries.pop(key.arrival) for key in keys]
                among = slice(bisect_left(self.sorted, keys[0]), bisect_right(self.sorted, keys[-1]))
                self.sorted[among] = [key for key in self.sorted[among] if key.arrival in self.entries]
        for entry in members[: len(joining)]:
            del self.entries[entry.arrival], self.sorted[bisect_left(self.sorted, entry.key)]
        if self.fair is not None:
            self.fair.charge(members)
        self._left(members)
        return members

    def remove(self, doomed: Collection[Entry]) -> None:
        for entry in doomed:
            del self.entries[entry.arrival]
        if len(doomed) <= _FEW:
            for entry in doomed:
                del self.sorted[bisect_left(self.sorted, entry.key)]
        else:
            self.sorted = [key for key in self.sorted if key.arrival in self.entries]
        self._left(doomed)

    def _left(self, members: Collection[Entry]) -> None:
        self.num_tokens -= sum([entry.num_tokens for entry in members])
        self.cost_s -= sum([entry.cost_s for entry in members])
        if self.texts is not None:
            for entry in members:
                if entry.text is not None:
                    self.texts.remove(entry.text, entry.arrival)
        if not self.entries:  # a sum of floats that were added and taken away is not quite 0
            self._due.clear()
            self.cost_s = 0.0
            self.fair = None


class LaneQueues:
    """The waiting entries of all lanes. Within a lane the one that is due first is the most urgent, and where several
    flows wait with more than a full step, that of the flow which had least (``fair_queue``).

    Of entries that come together and are due together the longest comes first: long ones have the fewest neighbours in
    length, and run best while there are most to choose from (docs/decisions.md, "Batches are cut late").
    """

    def __init__(self, *, sorts_texts: bool = False) -> None:
        self._sorts_texts = sorts_texts
        self._lanes: dict[Lane, _LaneQueue] = {lane: _LaneQueue(sorts_texts=sorts_texts) for lane in LANES}
        self._by_identity: dict[Identity, Entry] = {}
        self._next_arrival = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    def has(self, lane: Lane) -> bool:
        """True if anything waits in ``lane``."""
        return bool(self._lanes[lane].sorted)

    def twin(self, identity: Identity) -> Entry | None:
        """The waiting entry that is equal, if there is one."""
        return self._by_identity.get(identity)

    def add(self, entries: Iterable[Entry]) -> None:
        """Enqueue entries that have no twin in the queue."""
        for entry in sorted(entries, key=_num_tokens, reverse=True):
            entry.arrival = self._next_arrival
            self._next_arrival += 1
            self._by_identity[entry.identity] = entry
            self._lanes[entry.lane].add(entry)

    def join(self, entry: Entry, waiter: Waiter, lane: Lane, now_s: float) -> None:
        """Add ``waiter`` to a waiting ``entry``, which moves up if ``waiter`` is more urgent."""
        entry.add(waiter)
        entry.outputs = entry.outputs | waiter.outputs
        due_s = min(entry.due_s, waiter.deadline_s, now_s + PATIENCE_S[lane])
        if lane != entry.lane and LANES.index(lane) < LANES.index(entry.lane):
            self._lanes[entry.lane].remove([entry])
            entry.lane, entry.due_s = lane, due_s
            self._lanes[lane].add(entry)
            return
        if due_s < entry.due_s:
            entry.due_s = due_s
            self._lanes[entry.lane].hurry(entry)
        self._lanes[entry.lane].claim(entry, waiter.flow)

    def pop_only(self) -> Entry:
        """Take out the only entry that waits."""
        _, entry = self._by_identity.popitem()
        self._lanes[entry.lane] = _LaneQueue(sorts_texts=self._sorts_texts)
        return entry

    def remove(self, doomed: Iterable[Entry]) -> None:
        """Take waiting entries out."""
        by_lane: dict[Lane, list[Entry]] = {}
        for entry in doomed:
            del self._by_identity[entry.identity]
            by_lane.setdefault(entry.lane, []).append(entry)
        for lane, entries in by_lane.items():
            self._lanes[lane].remove(entries)

    def clear(self) -> list[Entry]:
        everything = list(self._by_identity.values())
        self.remove(everything)
        return everything

    def views(self, full_step_s: float = inf) -> dict[Lane, LaneView]:
        """The lanes as ``next_batch`` sees them. ``full_step_s``: flows that wait in a lane with more predicted seconds
        share it."""
        return {lane: queue.view(full_step_s) for lane, queue in self._lanes.items()}

    def waited_s(self, lane: Lane, now_s: float) -> float:
        """Seconds that the most urgent entry of the last view of ``lane`` has waited; 0 if there is none."""
        queue = self._lanes[lane]
        urgent = queue.urgent() if queue.fair is None else queue.entries[queue.fair.urgent]
        return 0.0 if urgent is None else now_s - urgent.arrived_s

    def members(self, parts_of: Mapping[Lane, Iterable[slice]]) -> list[Entry]:
        """The entries in slices of each lane's last view, which stay."""
        return [entry for lane, parts in parts_of.items() for entry in self._lanes[lane].members(parts)]

    def alike(self, lane: Lane, text: bytes, but: Collection[int]) -> Iterator[Candidate]:
        """What waits in ``lane`` and begins as ``text`` does, by arrival, but for those arrivals: with the most common
        tokens first."""
        return self._lanes[lane].alike(text, but)

    def cut(self, parts_of: Mapping[Lane, Iterable[slice]], joining: Mapping[Lane, Seq[int]] = _NONE) -> list[Entry]:
        """Remove the entries of a step. ``parts_of``: slices of each lane's last view, in descending order;
        ``joining``: arrivals of others."""
        members = [
            entry for lane, parts in parts_of.items() for entry in self._lanes[lane].cut(parts, joining.get(lane, ()))
        ]
        for entry in members:
            del self._by_identity[entry.identity]
        return members

    def expired(self, now_s: float) -> list[Entry]:
        """Remove entries whose deadlines have passed, and return them.

        Only the most urgent entry of a lane is checked, until one has not expired; an expired one behind it is removed
        by a later call.
        """
        found: list[Entry] = []
        for lane in self._lanes.values():
            while (entry := lane.urgent()) is not None and entry.deadline_s <= now_s:
                self.remove([entry])
                found.append(entry)
        return found

    def stats(self) -> dict[Lane, LaneStats]:
        """Numbers of the waiting entries, their tokens and their cost in seconds, by lane."""
        return {lane: LaneStats(len(q.sorted), q.num_tokens, q.cost_s) for lane, q in self._lanes.items()}
