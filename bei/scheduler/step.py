"""What the batch manager's threads work on: steps, the workers that run them, and what they have done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeAlias

from bei.core import Engine, Row
from bei.errors import BeiError
from bei.scheduler.device_gate import Turn
from bei.scheduler.queue import Entry

# Makes the answers to a step's entries, once.
Answers: TypeAlias = Callable[[], Seq[Row | BeiError]]


class Step:
    """A batch on the engine. Times are monotonic seconds."""

    def __init__(self, entries: list[Entry], predicted_s: float, turn: Turn) -> None:
        self.entries = entries
        self.predicted_s = predicted_s
        self.turn = turn
        self.started_s = time.monotonic()
        self.watched_s = 0.0  # how long the watchdog has seen it run; a process that was stopped does not count
        self.is_overdue = False
        self.has_failed = False  # in a run: what it took says nothing of its cost


def left_s(steps: Seq[Step], now_s: float) -> float:
    """How much longer a running step is predicted to take, mean over ``steps``; 0 if there is none."""
    return sum(max(0.0, step.predicted_s - (now_s - step.started_s)) for step in steps) / max(1, len(steps))


class Worker:
    """A thread that runs steps on one stream of one engine.

    ``is_retired``: its engine has been given up. What its step may still answer is dropped, and it ends then.
    ``others``: the workers of the same engine, itself too.
    """

    def __init__(self, engine: Engine, others: list[Worker]) -> None:
        self.engine = engine
        self.others = others
        self.step: Step | None = None
        self.is_retired = False
        self.has_ended = False
        self.thread = threading.Thread()

    def is_wanted(self) -> bool:
        """Whether what its step answers is still waited for."""
        return not self.is_retired


def known(answers: Seq[Row | BeiError]) -> Answers:
    """Answers that need not be made."""
    return lambda: answers


class Done(NamedTuple):
    """``answers()[i]`` is the row or the error of ``entries[i]``. ``step``: the step that ran them, and its seconds."""

    entries: Seq[Entry]
    answers: Answers
    step: tuple[Step, float] | None = None
