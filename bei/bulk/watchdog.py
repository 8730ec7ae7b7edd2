"""Ends a job in which something does not return: a step of the engine, a call of a disk or of a store.

A thread inside such a call cannot be ended, and would keep its process from ending. So the process ends as it is: a job
goes on wherever it was ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from bei.errors import JobError
from bei.scheduler.execution import longest_s

_WATCH_EVERY_S = 0.25
# Servers of files are away for minutes: a call of theirs may take so many times ``hang_timeout``.
_PATIENCE_WITH_STORES = 20.0
# What is predicted of them, on the slow side.
_BYTES_PER_S = 1e6


class _Call:
    def __init__(self, what: str, predicted_s: float, patience: float) -> None:
        self.what = what
        self.watched_s = 0.0
        self._predicted_s = predicted_s
        self._patience = patience

    def is_overdue(self, hang_timeout_s: float) -> bool:
        return self.watched_s > longest_s(self._predicted_s, self._patience * hang_timeout_s)


_calls: set[_Call] = set()
_changes = threading.Lock()


@contextmanager
def watched(what: str, predicted_s: float, patience: float = 1.0) -> Iterator[None]:
    """A context that a ``Watchdog`` of this process waits for as for a step that is predicted to take ``predicted_s``,
    but at least ``patience`` times ``hang_timeout``. ``what``: says what has not ended, up to "for 30 s"."""
    call = _Call(what, predicted_s, patience)
    with _changes:
        _calls.add(call)
    try:
        yield
    finally:
        with _changes:
            _calls.discard(call)


def watched_store(shown: str, num_bytes: int = 0) -> AbstractContextManager[None]:
    """The same for one call of the disk or store that has ``shown``, which moves ``num_bytes``."""
    return watched(f"{shown} has not answered", num_bytes / _BYTES_PER_S, _PATIENCE_WITH_STORES)


class Watchdog:
    """Watches the calls of this process. A context manager; ``end`` gets the error, in a thread, and ends the process.

    ``hang_timeout_s``: the setting ``hang_timeout``; 0: nothing is ever overdue.
    """

    def __init__(self, hang_timeout_s: float, end: Callable[[JobError], object]) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._end = end
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bei-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        """Counts the time that it is awake itself: a process that was stopped does not hang."""
        while not self._is_over.wait(_WATCH_EVERY_S):
            with _changes:
                for call in _calls:
                    call.watched_s += _WATCH_EVERY_S
                overdue = next((call for call in _calls if call.is_overdue(self._hang_timeout_s)), None)
            if overdue is not None:
                self._end(_error(overdue))
                return


def _error(call: _Call) -> JobError:
    return JobError(
        f"{call.what} for {call.watched_s:,.0f} s. The job ends here: the same command goes on with what is not done. "
        "A larger --hang-timeout waits longer."
    )
