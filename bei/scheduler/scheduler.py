"""The decisions of a batch manager, without its threads: the queues of an engine, and the next step.

Told the time, so that the same code runs on a real clock (``batch_manager``) and on a simulated one
(``bei.cli.simulate``). Not safe in threads: managers lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from bei.core import Limits
from bei.engine.shared_prefixes import num_shared
from bei.port import Lane
from bei.scheduler.alike import joining
from bei.scheduler.lane_shares import ServedShares, capped_step_s, full_step_s, overtaking, short_step_s
from bei.scheduler.next_batch import LaneView, StepBounds, StepCosts, leading_lane, next_batch, step_bounds
from bei.scheduler.queue import Entry, LaneQueues

# How often the lengths of capped and of full steps are computed from the costs.
_REMEASURE_EVERY_S = 1.0


@dataclass(frozen=True)
class SchedulingRules:
    """``step_cap_s``: the longest step of bulk work while interactive work waits or is expected; 0: from the costs.

    ``bulk_share``: the share of the engine's time that bulk work gets however much interactive work there is.
    ``hang_timeout_s``: the least time after which a step is taken to hang; 0: never. ``cache_bytes``: how much memory
    the cache of answers may use; 0: no cache.
    """

    step_cap_s: float = 0.0
    bulk_share: float = 0.2
    hang_timeout_s: float = 30.0
    cache_bytes: int = 0


class Cut(NamedTuple):
    """Entries that leave the queue: ``entries``, the next step, predicted to take ``predicted_s`` (empty where nothing
    waits, or what would have run has expired), and ``expired``, whose deadlines have all passed. ``num_shared``: tokens
    of the step that are not computed, because one of its sequences begins with the same ones."""

    entries: list[Entry]
    predicted_s: float
    expired: list[Entry]
    num_shared: int = 0


class Scheduler:
    """The queues of one engine, and the policy over them. ``shares_prefixes``: as ``EngineInfo`` has it;
    ``overtaking``: as ``PortStats`` has it. ``waiting_s``: as ``capped_step_s`` has it, asked now and then."""

    def __init__(
        self,
        limits: Limits,
        costs: StepCosts,
        rules: SchedulingRules,
        waiting_s: Callable[[], float | None] = lambda: None,
        *,
        shares_prefixes: bool = False,
    ) -> None:
        self.queues = LaneQueues(sorts_texts=shares_prefixes)
        self._shares_prefixes = shares_prefixes
        self.served = ServedShares()
        self.overtaking = overtaking(costs, limits)  # of sizes alone, which no correction of the costs changes
        self._limits = limits
        self._costs = costs
        self._rules = rules
        self._waiting_s = waiting_s
        self._cap_s = self._full_step_s = 0.0
        self._remeasure_s = -inf

    def has_interactive(self) -> bool:
        """Whether interactive work waits. In any thread."""
        return self.queues.has("interactive")

    def short_step_s(self) -> float:
        """The predicted seconds of a step of one short sequence. In any thread."""
        return short_step_s(self._costs, self._limits)

    def cut(self, now_s: float, interactive_expected: Callable[[], bool]) -> Cut:
        """Take the next step out of the queues, and what has expired. ``interactive_expected``: whether interactive
        work may come soon; asked where more than one sequence waits."""
        if len(self.queues) == 1:
            return self._cut_only(self.queues.pop_only(), now_s)
        expired = self.queues.expired(now_s)
        if not len(self.queues):
            return Cut([], 0.0, expired)
        cap_s = self.cap_s(now_s)
        lanes = self.queues.views(self._full_step_s)
        waiting = {lane: bool(view.queued) for lane, view in lanes.items()}
        if not waiting["bulk"]:
            self.served.raise_bulk(self._rules.bulk_share)
        lead = leading_lane(waiting, self.served.recent_s(now_s), self._rules.bulk_share)
        bounds = step_bounds(
            lanes,
            lead,
            self._costs,
            cap_s,
            waited_s=self.queues.waited_s(lead, now_s),
            interactive_expected=interactive_expected(),
        )
        parts = next_batch(lanes, self._limits, self._costs, bounds)
        members = self.queues.cut(parts, self._joining(lanes[lead], parts, bounds))
        entries = [entry for entry in members if entry.deadline_s > now_s]
        if len(entries) < len(members):
            expired += [entry for entry in members if entry.deadline_s <= now_s]
            if not entries:
                return Cut([], 0.0, expired)
        lengths, texts = [entry.num_tokens for entry in entries], self._texts(entries)
        shared = num_shared(texts) if texts else 0
        predicted_s = self._costs.seconds(sum(lengths) - shared, len(lengths), max(lengths))
        return Cut(entries, predicted_s, expired, shared)

    def _texts(self, entries: Seq[Entry]) -> list[bytes]:
        """The texts of a step that may share prefixes; none of another."""
        if not self._shares_prefixes:
            return []
        texts = [entry.text for entry in entries]
        return [] if None in texts else [text for text in texts if text is not None]

    def _joining(self, lead: LaneView, parts: Mapping[Lane, Seq[slice]], bounds: StepBounds) -> dict[Lane, list[int]]:
        """What joins the step of ``parts`` beside them, since it begins as the sequence does that leads the step."""
        if not self._shares_prefixes:
            return {}
        members = self.queues.members(parts)
        texts, arrivals = self._texts(members), {entry.arrival for entry in members}
        if not texts:
            return {}
        urgent = lead.queued[lead.urgent].arrival
        text = next(text for text, entry in zip(texts, members, strict=True) if entry.arrival == urgent)
        lengths = [entry.num_tokens for entry in members]
        candidates = self.queues.alike(bounds.lead, text, arrivals)
        return {bounds.lead: joining(texts, lengths, candidates, self._limits, self._costs, bounds)}

    def _cut_only(self, entry: Entry, now_s: float) -> Cut:
        """The decision of ``next_batch`` for a single sequence, as most steps of interactive work are."""
        if entry.deadline_s <= now_s:
            return Cut([], 0.0, [entry])
        if entry.lane != "bulk":
            self.served.raise_bulk(self._rules.bulk_share)
        return Cut([entry], self._costs.seconds(entry.num_tokens, 1, entry.num_tokens), [])

    def cap_s(self, now_s: float) -> float:
        """The longest step of bulk work beside interactive work."""
        if now_s >= self._remeasure_s:
            self._measure(now_s)
        return self._cap_s

    def _measure(self, now_s: float) -> None:
        """Now and then: costs are corrected while the engine runs, and interactive work comes for other engines."""
        self._cap_s = self._rules.step_cap_s or capped_step_s(self._costs, self._limits, self._waiting_s())
        self._full_step_s = full_step_s(self._costs, self._limits)
        self._remeasure_s = now_s + _REMEASURE_EVERY_S
