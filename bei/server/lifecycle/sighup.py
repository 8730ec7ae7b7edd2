"""SIGHUP: the running server reads API keys, TLS certificates and artifacts (``swap``) again."""

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

# Reads one thing again. Where the new one cannot be used, it keeps the old one and logs why.
Part: TypeAlias = Callable[[], Awaitable[None]]


class SighupReloads:
    """Calls ``parts``, one after the other. One reload at a time."""

    def __init__(self, parts: Seq[Part], terminal: LogTerminal) -> None:
        self._parts = [*parts]
        self._terminal = terminal
        self._is_due = False
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()

    def add(self, part: Part) -> None:
        """Add ``part`` behind the others."""
        self._parts.append(part)

    def remember(self) -> None:
        """Remember a SIGHUP until ``start``, while models are loaded. One that comes because the terminal was closed
        ends the process, as it does by default."""
        signal.signal(signal.SIGHUP, self._note)

    def _note(self, *_: object) -> None:
        if self._terminal.is_closed:
            sys.exit(128 + signal.SIGHUP)
        self._is_due = True

    def start(self) -> None:
        """The server runs: reload if a SIGHUP came meanwhile."""
        if self._is_due:
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
                await part()
