"""Scheduling policies to compare: bei's own code, and other servers' rules according to their descriptions.

For other servers only the batching rule is modelled; engine, front end and their times are the same for all. Further
delays are left out: TEI cuts one batch ahead of the running one, and Infinity's threads sleep 5 ms between looks at
their queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from bei.core import Limits
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import InteractiveExpectation
from bei.scheduler.queue import Entry
from bei.scheduler.scheduler import Scheduler, SchedulingRules

# Defaults of TEI's --max-batch-tokens, and of Infinity's --batch-size and the number of batches it sorts together.
TEI_MAX_BATCH_TOKENS = 16_384
INFINITY_BATCH_SIZE = 32
_INFINITY_SORTED_BATCHES = 8


class Policy(Protocol):
    """A queue, and the rule for its next step."""

    def add(self, entries: Seq[Entry], now_s: float) -> None:
        """Queue texts, in the order of their request."""

    def cut(self, now_s: float) -> list[Entry]:
        """Remove and return the next step, within the engine's limits; empty only if the queue is."""

    def ran(self, entries: Seq[Entry], seconds: float, now_s: float) -> None:
        """Note that a step has ended at ``now_s``."""


class BeiPolicy:
    """``bei.scheduler``: lanes, similar lengths, steps by predicted cost. Observed steps correct ``costs``."""

    def __init__(self, costs: CostModel, rules: SchedulingRules) -> None:
        self._costs = costs
        self._scheduler = Scheduler(costs.limits, costs, rules)
        self._interactive = InteractiveExpectation()

    def add(self, entries: Seq[Entry], now_s: float) -> None:
        """Queue like ``BatchManager.submit``."""
        if any(entry.lane == "interactive" for entry in entries):
            self._interactive.note(now_s)
        self._scheduler.queues.add(entries)

    def cut(self, now_s: float) -> list[Entry]:
        """The next step; nothing expires, as nothing in a trace has a deadline."""
        return self._scheduler.cut(now_s, lambda: self._interactive.holds(now_s)).entries

    def ran(self, entries: Seq[Entry], seconds: float, now_s: float) -> None:
        """Count the lanes' shares, and correct the costs."""
        self._scheduler.served.add(now_s, seconds, entries)
        lengths = [entry.num_tokens for entry in entries]
        self._costs.observe(sum(lengths), len(lengths), max(lengths), seconds)


class FifoTokenBudget:
    """Text Embeddings Inference: texts in order of arrival, up to a budget of tokens.

    Real tokens count, as in its engines without padding. The first text that does not fit ends the batch.
    """

    def __init__(self, limits: Limits, max_batch_tokens: int = TEI_MAX_BATCH_TOKENS) -> None:
        self._budget = min(max_batch_tokens, limits.max_num_tokens)
        self._max_size = limits.max_batch_size
        self._waiting: deque[Entry] = deque()

    def add(self, entries: Seq[Entry], now_s: float) -> None:
        self._waiting.extend(entries)

    def cut(self, now_s: float) -> list[Entry]:
        """The oldest texts, at least one."""
        return _taken(self._waiting, self._budget, self._max_size)

    def ran(self, entries: Seq[Entry], seconds: float, now_s: float) -> None:
        """A no-op."""


class FixedBatches:
    """Infinity: batches of 32 texts. Of longer queues, the texts of up to eight batches are sorted by length together.

    It has no limit of tokens; a batch that exceeds the engine's limit is cut there.
    """

    def __init__(self, limits: Limits, batch_size: int = INFINITY_BATCH_SIZE) -> None:
        self._limits = limits
        self._batch_size = min(batch_size, limits.max_batch_size)
        self._waiting: deque[Entry] = deque()
        self._batches: deque[deque[Entry]] = deque()

    def add(self, entries: Seq[Entry], now_s: float) -> None:
        self._waiting.extend(entries)

    def cut(self, now_s: float) -> list[Entry]:
        """The next of the batches that were sorted together, or of those now in the queue."""
        if not self._batches:
            self._sort()
        if not self._batches:
            return []
        step = _taken(self._batches[0], self._limits.max_num_tokens, self._batch_size)
        if not self._batches[0]:
            self._batches.popleft()
        return step

    def ran(self, entries: Seq[Entry], seconds: float, now_s: float) -> None:
        """A no-op."""

    def _sort(self) -> None:
        num_batches = min(_INFINITY_SORTED_BATCHES, max(1, len(self._waiting) // self._batch_size))
        taken = [self._waiting.popleft() for _ in range(min(num_batches * self._batch_size, len(self._waiting)))]
        if num_batches > 1:
            taken.sort(key=lambda entry: entry.num_tokens)
        for start in range(0, len(taken), self._batch_size):
            self._batches.append(deque(taken[start : start + self._batch_size]))


def _taken(waiting: deque[Entry], max_tokens: int, max_size: int) -> list[Entry]:
    """Remove and return from the front of ``waiting`` as many as fit, at least one if there is any."""
    step: list[Entry] = []
    num_tokens = 0
    while waiting and len(step) < max_size:
        num_tokens += waiting[0].num_tokens
        if step and num_tokens > max_tokens:
            break
        step.append(waiting.popleft())
    return step


# Policies by name. Each gets a cost model of its own, which it may ignore.
POLICIES: dict[str, Callable[[CostModel, SchedulingRules], Policy]] = {
    "bei": BeiPolicy,
    "fifo": lambda costs, rules: FifoTokenBudget(costs.limits),
    "fixed": lambda costs, rules: FixedBatches(costs.limits),
}
