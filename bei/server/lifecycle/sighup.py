"""SIGHUP: what the server reads anew while it runs. API keys, certificates, artifacts."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from bei.server.lifecycle.signals import LogTerminal

log = logging.getLogger(__name__)

# Reads something anew. Keeps what it has where the new cannot be used, and says so in the log.
Part: TypeAlias = Callable[[], Awaitable[None]]


class Reloading:
    """Calls ``parts``, one after the other. One reload at a time."""

    def __init__(self, parts: Seq[Part], terminal: LogTerminal) -> None:
        self._parts = [*parts]
        self._terminal = terminal
        self._is_due = False
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()

    def add(self, part: Part) -> None:
        """One more, behind the others."""
        self._parts.append(part)

    def remember(self) -> None:
        """While models are loaded: a SIGHUP is remembered until ``start``. One that says that the terminal was closed
        ends the process, as ever."""
        signal.signal(signal.SIGHUP, self._note)

    def _note(self, *_: object) -> None:
        if self._terminal.is_closed:
            sys.exit(128 + signal.SIGHUP)
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
            log.info("SIGHUP: API keys, certificates and artifacts are looked at anew")
            for part in self._parts:
                await part()
