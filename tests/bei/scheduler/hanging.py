"""Engines that hang, and who finds and replaces them, all under a test's control."""

from __future__ import annotations

import threading
from collections.abc import Set

import numpy as np

from bei.core import Engine, Outputs, PackedBatch
from bei.scheduler.execution import Step
from tests.bei.scheduler.front import Front, wait_until
from tests.support.engines import GatedEngine


class LateEngine(GatedEngine):
    """What comes through its gate in the end is no answer to anything."""

    num_closed = 0
    close_error: Exception | None = None

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        rows = super().run(batch, outputs)["embedding"]
        return {"embedding": np.full_like(rows, -1.0)}

    def close(self) -> None:
        self.num_closed += 1
        if self.close_error is not None:
            raise self.close_error


class Watch:
    """Says once that the step with a sequence beginning with this id is overdue."""

    def __init__(self, front: Front) -> None:
        self._manager = front.manager
        self._overdue: set[int] = set()
        self._manager._is_overdue = self._is_overdue  # type: ignore[method-assign]

    def _is_overdue(self, step: Step) -> bool:
        found = self._overdue & {int(entry.encoding.input_ids[0]) for entry in step.entries}
        self._overdue -= found
        return bool(found)

    def finds(self, first_id: int) -> None:
        """Return when it has."""
        self._overdue.add(first_id)
        wait_until(lambda: not self._overdue, "the watchdog has looked")


class Reload:
    """Gives the next engine, when it may."""

    def __init__(self, *engines: Engine, waits: bool = False) -> None:
        self._engines = iter(engines)
        self.count = 0
        self.may = threading.Event()
        if not waits:
            self.may.set()

    def __call__(self) -> Engine:
        self.count += 1
        self.may.wait()
        return next(self._engines)
