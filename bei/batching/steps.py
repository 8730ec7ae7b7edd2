"""What the batch manager's threads work on: rules, steps, the workers that run them, and what they have done."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from bei.batching.gate import Turn
from bei.batching.queue import Entry
from bei.core import Engine, Row
from bei.errors import BeiError


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


class Step:
    """A batch on the engine. Times are monotonic seconds."""

    def __init__(self, entries: list[Entry], predicted_s: float, turn: Turn) -> None:
        self.entries = entries
        self.predicted_s = predicted_s
        self.turn = turn
        self.started_s = time.monotonic()
        self.watched_s = 0.0  # how long the watchdog has seen it run; a process that was stopped does not count
        self.is_overdue = False


class Worker:
    """A thread that runs steps on one stream of one engine.

    ``is_retired``: its engine has been given up. What its step may still answer is dropped, and it ends then.
    ``others``: the workers of the same engine, itself too.
    """

    def __init__(self, engine: Engine, index: int, others: list[Worker]) -> None:
        self.engine = engine
        self.index = index
        self.others = others
        self.step: Step | None = None
        self.is_retired = False
        self.has_ended = False
        self.thread = threading.Thread()


class Done(NamedTuple):
    """``answers[i]`` is the row or the error of ``entries[i]``. ``step``: the step that ran them, and its seconds."""

    entries: Seq[Entry]
    answers: Seq[Row | BeiError]
    step: tuple[Step, float] | None = None
