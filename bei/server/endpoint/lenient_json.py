"""A body that could not be read, looked at again, for what JSON allows and the decoder does not.

Half of a surrogate pair in a string (RFC 8259, section 8.2) is an error of the input that has it, and not of the body.
A number as ``2.0`` is an integer where one is meant, as JSON schema has it. Good bodies never come here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeAlias, TypeVar

import msgspec

from bei.errors import BeiError, InvalidTextError, MalformedRequestError
from bei.utils.surrogates import surrogate_error

RequestT = TypeVar("RequestT")

# From the body to a string in it: fields and places in lists.
Path: TypeAlias = tuple[str | int, ...]

_INPUT_FIELDS = frozenset(("input", "inputs", "texts"))

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u([dD][89a-fA-F][0-9a-fA-F]{2})|[\s\S])"
)
_HALF_CHARS = 4
_MOST_UNREADABLE = 10_000
# Whole numbers that are written with a fraction are exact up to here.
_MOST_WHOLE = 2.0**53

_FRACTION = re.compile(rb"[0-9][.eE]")


def read_again(
    parse: Callable[[bytes], Any], content: bytes, error: MalformedRequestError, *, in_part: bool
) -> tuple[Any, Mapping[int, BeiError]]:
    """A request that ``parse`` refused with ``error``, and the errors of unreadable inputs, by their places.

    Raises ``error`` or another of its kind, InvalidTextError.
    """
    if not (_SURROGATE.search(content) or _FRACTION.search(content)):
        raise error
    try:
        return _read_again(parse, content, in_part)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise error from None  # it is of another kind


def _read_again(parse: Callable[[bytes], Any], content: bytes, in_part: bool) -> tuple[Any, Mapping[int, BeiError]]:
    unreadable: Mapping[int, BeiError] = {}
    if _SURROGATE.search(content):
        content, unreadable = _without_halves(content, in_part)
    tree = msgspec.json.decode(content) if _FRACTION.search(content) else None
    while True:
        try:
            return parse(content), unreadable
        except MalformedRequestError as other:
            field = (other.param or "").partition(".")[0]
            if not isinstance(tree, dict) or not isinstance(tree.get(field), (float, list, dict)):
                raise
            # Only of the field that is wrong, and once: elsewhere fractions stay as they are.
            tree[field] = msgspec.Raw(msgspec.json.encode(_with_integers(tree[field])))
            content = msgspec.json.encode(tree)


def _without_halves(content: bytes, in_part: bool) -> tuple[bytes, Mapping[int, BeiError]]:
    """``content`` with an empty string for each that has half of a surrogate pair, and the errors of these inputs.

    Raises InvalidTextError where such a string is none of several inputs, or not ``in_part``.
    """
    mark = secrets.token_hex()
    tree = msgspec.json.decode(_ESCAPE.sub(lambda found: _marked(found, mark.encode()), content))
    unreadable: dict[int, BeiError] = {}
    for path, holder, key in _marked_strings(tree, mark):
        error = _error(path, holder if key is None else holder[key], mark)
        if not in_part or key is None or path[0] not in _INPUT_FIELDS:
            raise error
        if len(unreadable) == _MOST_UNREADABLE:  # nobody reads so many, and each takes memory
            raise error
        unreadable.setdefault(path[1] if len(path) > 1 and isinstance(path[1], int) else 0, error)
        holder[key] = ""
    return msgspec.json.encode(tree), unreadable


def masked_halves(content: bytes) -> bytes:
    """``content`` with an escape of the same length, of U+FFFD, for each half of a surrogate pair."""
    if not _SURROGATE.search(content):
        return content
    return _ESCAPE.sub(lambda found: found[0] if found[1] is None else rb"\ufffd", content)


def _marked(found: re.Match[bytes], mark: bytes) -> bytes:
    return found[0] if found[1] is None else mark + found[1]


def _marked_strings(tree: Any, mark: str) -> Iterator[tuple[Path, Any, Any]]:
    """The path of each string that has ``mark``, what holds it, and where; of a field's name itself, the name alone."""
    path: list[str | int] = []  # one for all: a path for each of many nested lists would take memory by their product
    waiting = [(tree, _fields(tree))]
    while waiting:
        holder, fields = waiting[-1]
        for key, value in fields:
            if isinstance(key, str) and mark in key:
                yield tuple(path), key, None
            if isinstance(value, (dict, list)):
                path.append(key)
                waiting.append((value, _fields(value)))
                break
            if isinstance(value, str) and mark in value:
                yield (*path, key), holder, key
        else:
            waiting.pop()
            del path[-1:]


def _fields(holder: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return iter(list(holder.items()))
    return enumerate(holder) if isinstance(holder, list) else iter(())


def _error(path: Path, text: str, mark: str) -> InvalidTextError:
    """Names the field nearest to the place of the input in its list, as other errors do."""
    place = next((index for index, one in enumerate(path) if isinstance(one, int)), len(path))
    fields: Seq[str | int] = path[:place]
    param = str(fields[-1]) if fields else None
    name = ".".join(map(str, fields)) or "The body"
    if place < len(path):
        name = f"{param or 'The body'} {path[place]}"
    elif param in _INPUT_FIELDS:
        name = f"{param} 0"
    start = text.index(mark)
    half = int(text[start + len(mark) :][:_HALF_CHARS], 16)
    return surrogate_error(name, start, half, param)


def _with_integers(value: Any) -> Any:
    """``value`` with integers for numbers that are whole."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _MOST_WHOLE else value
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_integers(one) for name, one in value.items()}
    return value
