"""TensorRT's log, which holds the errors that it does not raise. Builder and engine share the process's one logger."""

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

_KEPT_ERRORS = 4  # TensorRT repeats an error at each level that it passes


@cache
def process_logger(base: Any) -> Any:
    """The process's only logger, derived from TensorRT's class ``base``; it forwards messages to Python's logging.

    TensorRT keeps the first logger it is given as long as any of its objects lives, and ignores others.
    """

    class Logger(base):  # type: ignore[misc]  # a class of the library, known when it runs
        """Keeps the last errors of each thread, for the caller of a call that failed.

        ``lines``: messages of all threads while ``recording``.
        """

        def __init__(self) -> None:
            base.__init__(self)
            self.lines: list[Line] = []
            self._is_recording = False
            self._kept = threading.local()

        @contextmanager
        def recording(self) -> Iterator[list[Line]]:
            """Keep all messages except verbose ones (700 for a model of two layers), and forward none.

            A build has threads of its own, and its messages are judged as a whole.
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
            """Remove and return the errors of this thread."""
            errors = [*self._errors()]
            self._errors().clear()
            return errors

        def said(self) -> str:
            """The errors of this thread as one line, removed."""
            return "; ".join(self.taken()) or "it gave no reason"

    return Logger()
