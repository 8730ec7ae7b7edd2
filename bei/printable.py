"""Messages in one line that is safe on a terminal and in a log, whatever they quote."""

from __future__ import annotations

# Most characters of a message, which may quote what a client sent or a file holds: megabytes.
_MOST_CHARS = 2_000


def printable(text: str) -> str:
    """``text`` with control characters and unprintable characters escaped, so that it is safe on a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def one_line(message: str) -> str:
    """``message`` in one line that is safe on a terminal and in a log: those of YAML and compilers have several, and
    files hold megabytes and control codes."""
    message = _shortened(message)
    return message if message.isprintable() else _shortened(printable(" ".join(message.split())))


def _shortened(message: str) -> str:
    if len(message) <= _MOST_CHARS:
        return message
    return f"{message[: _MOST_CHARS // 2]} ... {message[5 - _MOST_CHARS // 2 :]}"
