"""SIGHUP before a server can obey it: remembered from the first instructions of the process.

Imports only what every interpreter has loaded anyway: whatever comes before ``remember`` is time in which SIGHUP ends
the process.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import cache


class LogTerminal:
    """The terminal that the log goes to, if it goes to one. Whoever closes it sends SIGHUP, and means the end."""

    def __init__(self) -> None:
        self._was_there = os.isatty(2)

    @property
    def is_closed(self) -> bool:
        """True if there was a terminal and it is gone."""
        return self._was_there and not os.isatty(2)


class SighupMemory:
    """Notes a SIGHUP. One that comes because the ``terminal`` was closed ends the process, as it does by default."""

    def __init__(self, terminal: LogTerminal) -> None:
        self.terminal = terminal
        self.is_due = False

    def begin(self) -> None:
        """Note signals from now on, until another handler takes over. In the main thread."""
        signal.signal(signal.SIGHUP, self._note)
        # Whoever starts a server may hold the signal back until the process can take it, so that none is lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))

    def _note(self, *_: object) -> None:
        if self.terminal.is_closed:
            sys.exit(128 + signal.SIGHUP)
        self.is_due = True


@cache
def remember() -> SighupMemory:
    """The memory of this process, which the first call begins."""
    memory = SighupMemory(LogTerminal())
    memory.begin()
    return memory
