"""What the other processes of a server hold of its limits. In one process there are no others: ``ALONE``.

A limit is the server's. Each process says what it holds, with what it is about to take, and then looks at the others:
of two that take at once, one at least sees the other, so that together they never hold more than the limit. Both may
see each other, and both be refused; they come back.
"""

from __future__ import annotations

from typing import Protocol


class Tally(Protocol):
    """A number of this process, and the sum of the others'. Safe in threads, if one at a time tells."""

    def tell(self, own: int) -> int:
        """This process holds ``own``. Returns what the others hold together, as they have told last."""


class Uploads(Tally, Protocol):
    """The bytes of unfinished request bodies."""

    def refuse(self) -> None:
        """A new upload was refused because of what others hold: they are asked to end a slow one."""

    def refused(self) -> int:
        """How many the others have refused since this was asked last."""


class Alone:
    """There is no other process."""

    def tell(self, own: int) -> int:
        """Nobody listens, and nobody else holds anything."""
        return 0

    def refuse(self) -> None:
        """Nobody listens."""

    def refused(self) -> int:
        """None."""
        return 0


ALONE = Alone()
