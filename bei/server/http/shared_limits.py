"""Server-wide limits: usage of the other processes. ``NO_PEERS`` is the no-op for a single process.

Each process publishes its own usage, including what it is about to take, and then reads that of the others. Of two that
take at once at least one sees the other, so together they never exceed the limit. Both may see each other and both be
refused; clients try again.
"""

from __future__ import annotations

from typing import Protocol


class MemoryPeers(Protocol):
    """The bytes of one memory budget in this process and in the others. Thread-safe as long as ``tell`` calls do not
    overlap."""

    def tell(self, own: int) -> int:
        """Publish that this process holds ``own``. Returns the sum that the others have published."""

    def refuse(self) -> None:
        """Count a transfer that was refused because of what the others hold: one of them ends a slow one."""

    def refused(self) -> int:
        """Number of refusals of the others since the last call."""


class NoPeers:
    """The server is one process."""

    def tell(self, own: int) -> int:
        """0."""
        return 0

    def refuse(self) -> None:
        """No-op."""

    def refused(self) -> int:
        """0."""
        return 0


NO_PEERS = NoPeers()
