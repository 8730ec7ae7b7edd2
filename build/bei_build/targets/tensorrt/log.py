"""TensorRT's log, kept for as long as a build takes: what it does not raise, it writes there."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeAlias

from bei.errors import CompileError

Line: TypeAlias = tuple[str, str]  # severity, message

_ERRORS = ("ERROR", "INTERNAL_ERROR")
_UNUSED = re.compile(r"Unused Input|is unused")


@cache
def logger_of(base: Any) -> Any:
    """The process's one logger for TensorRT's class ``base``; its ``lines`` are pairs of severity and message.

    One, because TensorRT keeps the first logger it is given for as long as anything of it lives, and says that it
    ignores others. Verbose lines are left out: a model of two layers makes 700 of them.
    """

    class Recorder(base):  # type: ignore[misc]  # a class of the library, known when it runs
        def __init__(self) -> None:
            base.__init__(self)
            self.lines: list[Line] = []

        def log(self, severity: Any, message: str) -> None:
            if severity.name != "VERBOSE":
                self.lines.append((severity.name, message))

    return Recorder()


def serious(log: list[Line]) -> list[str]:
    """The messages that no good build has: errors, and warnings that an input leads nowhere."""
    return [text for severity, text in log if severity in _ERRORS or (severity == "WARNING" and _UNUSED.search(text))]


def refusal(what: str, texts: list[str], error: type[CompileError] = CompileError) -> CompileError:
    """``TensorRT WHAT: TEXTS`` on one line, whatever the log's line breaks."""
    quoted = [" ".join(text.split()) for text in texts]
    return error(f"TensorRT {what}: {'; '.join(quoted) or 'it gave no reason'}")
