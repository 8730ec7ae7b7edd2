"""Keeps a service open while someone asks it, even if another one has taken its place."""

from __future__ import annotations

import asyncio


class Held:
    """Counts those who hold it. Used on one event loop."""

    def __init__(self) -> None:
        self._num_holders = 0
        self._unheld = asyncio.Event()
        self._unheld.set()

    def hold(self) -> None:
        """Keep the service open until ``let_go``, even if another one takes its place."""
        self._num_holders += 1
        self._unheld.clear()

    def let_go(self) -> None:
        """Undo one ``hold``."""
        self._num_holders -= 1
        if not self._num_holders:
            self._unheld.set()

    async def wait_unheld(self) -> None:
        """Return when nothing holds the service. One that has been replaced may be closed then."""
        await self._unheld.wait()
