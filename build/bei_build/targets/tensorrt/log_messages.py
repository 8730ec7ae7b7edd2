"""TensorRT's log messages of a build."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bei.engine.tensorrt_logger import ERRORS, Line
from bei.errors import CompileError

_UNUSED = re.compile(r"Unused Input|is unused")


def serious_messages(log: Sequence[Line]) -> list[str]:
    """The messages that no successful build has: errors, and warnings about unused inputs."""
    return [text for severity, text in log if severity in ERRORS or (severity == "WARNING" and _UNUSED.search(text))]


def compile_error(what: str, texts: list[str], error: type[CompileError] = CompileError) -> CompileError:
    """A CompileError with the message ``TensorRT WHAT: TEXTS`` on one line, whatever the texts' line breaks."""
    quoted = [" ".join(text.split()) for text in texts]
    return error(f"TensorRT {what}: {'; '.join(quoted) or 'it gave no reason'}")
