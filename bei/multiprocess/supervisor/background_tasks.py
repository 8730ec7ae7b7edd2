"""Work of the supervisor's that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """Of one event loop. What fails is in the log: a supervisor must not stop watching without a word."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Do ``work``, soon."""
        task: asyncio.Task[object] = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """End what is under way."""
        for task in self._under_way:
            task.cancel()

    def _on_done(self, task: asyncio.Task[object]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected error", exc_info=error)
