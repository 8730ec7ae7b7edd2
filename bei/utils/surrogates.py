"""Halves of surrogate pairs: strings of JSON and of Python may have them, and they are no characters."""

from __future__ import annotations

import re

from bei.errors import InvalidTextError

_HALF = re.compile("[\ud800-\udfff]")


def check_characters(text: str, name: str, param: str) -> None:
    """Raise InvalidTextError where ``text``, called ``name``, is not all characters."""
    if not text.isascii() and (half := _HALF.search(text)):
        raise not_all_characters(name, half.start(), ord(half[0]), param)


def not_all_characters(name: str, index: int, half: int, param: str | None) -> InvalidTextError:
    """The error of a text called ``name``, which has ``half`` of a surrogate pair at ``index``."""
    return InvalidTextError(
        f"{name} has half a surrogate pair at {index} (\\u{half:04x}), which is no character: a text was cut inside of "
        "one, an emoji say; replace it (text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')).",
        param,
    )
