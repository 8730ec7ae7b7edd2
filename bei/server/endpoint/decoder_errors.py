"""The decoder's words about a request that is not of its type, and what they leave out: which values there are, and
which field stands in the place of one that is missing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

from bei.errors import MalformedRequestError

# Paths in messages are as `$.inputs[0].name`, and `$.fields[...]` of an object with names of the client's own.
_PATH = re.compile(r".* - at (?:`key` in )?`\$(.+?)`$", re.DOTALL)
_STEPS = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
_MISSING = re.compile("^Object missing required field `([^`]+)`$")

# Fields of a body that are compared with a missing one, and how like its name theirs must be.
_MOST_COMPARED = 100
_LIKENESS = 0.8


def malformed(error: msgspec.ValidationError, request: Any, fields: Iterable[str] = ()) -> MalformedRequestError:
    """The error for the client. ``request``: the type; ``fields``: the names that the body has."""
    message = str(error)
    missing = _MISSING.search(message)
    if missing is not None:
        found = difflib.get_close_matches(missing[1], islice(fields, _MOST_COMPARED), 1, _LIKENESS)
        advice = f" The body has `{found[0]}`: rename it." if found else ""
        return MalformedRequestError(f"The request is not valid: {message}.{advice}", missing[1])
    path = _PATH.search(message)
    if path is None:
        return MalformedRequestError(f"The request is not valid: {message}.")
    values = sorted({*_values(request, path[1])}) if message.startswith("Invalid enum value ") else []
    advice = f": send {'one of ' * (len(values) > 1)}{', '.join(values)}" if values else ""
    param = path[1].removeprefix(".").partition("[")[0] or None
    return MalformedRequestError(f"The request is not valid: {message}{advice}.", param)


def _values(request: Any, path: str) -> Iterator[str]:
    """What may stand at ``path`` in place of an enum's unknown value."""
    types = [*_alternatives(inspect.type_info(request))]
    for step in _STEPS.finditer(path):
        types = [one for outer in types for inner in _inside(outer, step[1]) for one in _alternatives(inner)]
    for one in types:
        if isinstance(one, inspect.LiteralType):
            yield from map(str, one.values)


def _alternatives(found: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(found, inspect.Metadata):
        yield from _alternatives(found.type)
    elif isinstance(found, inspect.UnionType):
        for one in found.types:
            yield from _alternatives(one)
    else:
        yield found


def _inside(outer: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """The types of ``field``; None: of all elements."""
    if isinstance(outer, (inspect.StructType, inspect.TypedDictType)):
        yield from (one.type for one in outer.fields if one.encode_name == field)
    elif field is None and isinstance(outer, inspect.ListType):
        yield outer.item_type
    elif field is None and isinstance(outer, inspect.DictType):
        yield outer.value_type
