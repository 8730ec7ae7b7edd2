"""SIGHUP: what the server reads anew while it runs, API keys and certificates."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq

log = logging.getLogger(__name__)


class Reloading:
    """Calls ``parts``, each of which keeps what it has where the new cannot be used. One reload at a time."""

    def __init__(self, parts: Seq[Callable[[], Awaitable[None]]]) -> None:
        self._parts = parts
        self._is_due = False
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def remember(self) -> None:
        """While models are loaded: a SIGHUP is remembered until ``start``, where there is something to read anew."""
        if self._parts:
            signal.signal(signal.SIGHUP, self._note)

    def _note(self, *_: object) -> None:
        self._is_due = True

    def start(self) -> None:
        """The server runs: do what was asked for meanwhile."""
        if self._is_due:
            self.soon()

    def soon(self) -> None:
        """Read everything anew. On the event loop."""
        task = asyncio.ensure_future(self._run())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _run(self) -> None:
        async with self._lock:
            log.info("reading API keys and certificates anew")
            for part in self._parts:
                await part()
