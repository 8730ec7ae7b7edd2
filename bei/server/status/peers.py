"""Questions between the processes of one server. The supervisor carries questions and answers
(``bei.multiprocess.control.channel``); where there is one process only, there are no peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

# Seconds that a process has for its answer.
PATIENCE_S = 1.0

# The name under which ``ask`` returns the last answers of ended processes, for kinds that the supervisor keeps.
ENDED = "ended"


@dataclass(frozen=True)
class Replies:
    """What the processes answered, by their names: ``supervisor``, ``front-0``, ``manager``, ``engine-1``.

    ``silent``: processes that should have answered and did not, in time or because they are being restarted.
    """

    answers: Mapping[str, bytes]
    silent: tuple[str, ...]


class Peers(Protocol):
    """The other processes of this server. Safe in any thread."""

    @property
    def name(self) -> str:
        """This process, as the others know it."""

    def offer(self, kind: str, answer: Callable[[], bytes | None]) -> None:
        """Answer questions of this kind from now on. ``answer`` is called in a thread of its own, must be quick and may
        not wait for anything that waits for an ``ask``. None: this process ends, and has no answer any more."""

    async def ask(self, kind: str) -> Replies:
        """Ask all other processes that offer ``kind``; for kinds that the supervisor keeps also this one, so that its
        answer is kept. Takes ``PATIENCE_S`` or a little more, and never raises."""
