"""SIGHUP: the running server reads API keys, TLS certificates and artifacts (``swap``) again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from bei.utils.sighup import SighupMemory

log = logging.getLogger(__name__)

# Reads one thing again. Where the new one cannot be used, it keeps the old one and logs why.
Part: TypeAlias = Callable[[], Awaitable[None]]


class SighupReloads:
    """Calls ``parts``, one after the other. One reload at a time. ``memory``: of signals before ``start``."""

    def __init__(self, parts: Seq[Part], memory: SighupMemory) -> None:
        self._parts = [*parts]
        self._memory = memory
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()

    def add(self, part: Part) -> None:
        self._parts.append(part)

    def start(self) -> None:
        """The server runs: reload if a SIGHUP came meanwhile."""
        if self._memory.is_due:
            self.soon()

    def soon(self) -> None:
        """Start a reload of everything. To be called on the event loop."""
        task = asyncio.ensure_future(self._run())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _run(self) -> None:
        async with self._lock:
            log.info("SIGHUP: API keys, certificates and artifacts are looked at anew")
            for part in self._parts:
                try:
                    await part()
                except Exception:  # a border: the other parts are still to be read
                    log.exception("a part of the server could not be read anew")
