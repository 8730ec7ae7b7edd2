"""TensorRT's log: what it does not raise, it writes there. Builder and engine share it: a process has one."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

Line: TypeAlias = tuple[str, str]  # severity, message on one line

ERRORS = ("ERROR", "INTERNAL_ERROR")

_KEPT_ERRORS = 4  # TensorRT says an error again at each level that it passes


@cache
def process_logger(base: Any) -> Any:
    """The process's one logger for TensorRT's class ``base``, which passes messages on to Python's.

    One, because TensorRT keeps the first logger it is given for as long as anything of it lives, and says that it
    ignores others.
    """

    class Logger(base):  # type: ignore[misc]  # a class of the library, known when it runs
        """Keeps the last errors of each thread, for whoever finds that a call has failed.

        ``lines``: what came from any thread while somebody was ``recording``.
        """

        def __init__(self) -> None:
            base.__init__(self)
            self.lines: list[Line] = []
            self._is_recording = False
            self._kept = threading.local()

        @contextmanager
        def recording(self) -> Iterator[list[Line]]:
            """Keep all lines but the verbose ones, of which a model of two layers makes 700, and pass none on.

            A build has threads of its own, and what it says is judged as a whole.
            """
            self.lines.clear()
            self._is_recording = True
            try:
                yield self.lines
            finally:
                self._is_recording = False

        def log(self, severity: Any, message: str) -> None:
            text = " ".join(message.split())
            if self._is_recording:
                if severity.name != "VERBOSE":
                    self.lines.append((severity.name, text))
            elif severity.name in ERRORS:
                self._errors().append(text)
                log.error("TensorRT: %s", text)
            elif severity.name == "WARNING":
                log.warning("TensorRT: %s", text)
            else:
                log.debug("TensorRT: %s", text)

        def _errors(self) -> deque[str]:
            if not hasattr(self._kept, "errors"):
                self._kept.errors = deque(maxlen=_KEPT_ERRORS)
            errors: deque[str] = self._kept.errors
            return errors

        def taken(self) -> list[str]:
            """Errors of this thread since they were last taken."""
            errors = [*self._errors()]
            self._errors().clear()
            return errors

        def said(self) -> str:
            """The same as one line, for a message."""
            return "; ".join(self.taken()) or "it gave no reason"

    return Logger()
