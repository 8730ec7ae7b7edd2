"""Detects lone surrogates: JSON and Python strings may hold them, but they are not characters."""

from __future__ import annotations

import re

from bei.errors import InvalidTextError

_HALF = re.compile("[\ud800-\udfff]")


def check_characters(text: str, name: str, param: str) -> None:
    """Raise InvalidTextError if ``text``, called ``name``, holds a lone surrogate."""
    if not text.isascii() and (half := _HALF.search(text)):
        raise surrogate_error(name, half.start(), ord(half[0]), param)


def surrogate_error(name: str, index: int, half: int, param: str | None) -> InvalidTextError:
    """The error for a text called ``name`` with the surrogate ``half`` at ``index``."""
    return InvalidTextError(
        f"{name} has half a surrogate pair at {index} (\\u{half:04x}), which is no character: a text was cut inside of "
        "one, an emoji say; replace it (text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')).",
        param,
    )
