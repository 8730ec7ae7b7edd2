"""The memory of large answers under way."""

from __future__ import annotations

import threading

from bei.errors import OverloadedError
from bei.server.http.retry_after import retry_s
from bei.server.http.shared_limits import ALONE, Tally


class AnswerMemory:
    """A limit on the bytes of all answers under way in a server, as estimated. Safe in threads.

    Each is held to a limit of its own, but many at once would still take all memory there is.
    """

    def __init__(self, limit: int, elsewhere: Tally = ALONE) -> None:
        self.limit = limit
        self.held = 0
        self._elsewhere = elsewhere
        self._lock = threading.Lock()

    def take(self, size: int, *, may_exceed: bool) -> None:
        """Count ``size`` bytes more. Raises OverloadedError where they do not fit, unless they ``may_exceed``: of an
        answer whose request is accepted already."""
        with self._lock:
            others = self._elsewhere.tell(self.held + size)
            if self.held + others + size > self.limit and not may_exceed:
                self._elsewhere.tell(self.held)
                raise OverloadedError(
                    f"The answers under way take about {self.held + others} bytes, and this one {size}, more than "
                    f"{self.limit} together: retry later, or ask for less at a time.",
                    retry_s(),
                )
            self.held += size

    def give_back(self, size: int) -> None:
        """The answer is with its client, or nobody wants it."""
        with self._lock:
            self.held -= size
            self._elsewhere.tell(self.held)
