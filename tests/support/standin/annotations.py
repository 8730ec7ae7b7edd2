"""Whether a value is of a type that a stub names, by pybind11's rules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ANYTHING = {"Any", "object", "CapsuleType", "Callable", "Iterator", "Self", "None_", "handle"}
_SEQUENCES = {"list", "List", "Sequence", "Iterable", "MutableSequence", "Collection"}


class Annotations:
    """Answers for the annotations of one stub. ``classes``: its classes by path, added as they are made.

    ``unknown``: annotations that were met and say nothing here; they are of any value.
    """

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}
        self.unknown: set[str] = set()

    def accepts(self, annotation: ast.expr, value: Any) -> bool:
        """Whether ``value`` may be passed, assigned or returned as ``annotation``."""
        if isinstance(annotation, ast.Constant):
            if isinstance(annotation.value, str):
                return self.accepts(ast.parse(annotation.value, mode="eval").body, value)
            return annotation.value is ... or value is None
        if isinstance(annotation, ast.BinOp):
            return self.accepts(annotation.left, value) or self.accepts(annotation.right, value)
        if isinstance(annotation, ast.Subscript):
            return self._accepts_generic(annotation, value)
        return self._accepts_name(ast.unparse(annotation), value)

    def _accepts_name(self, path: str, value: Any) -> bool:
        name = path.rpartition(".")[2]
        if path in self.classes:
            return isinstance(value, self.classes[path]) or (name == "FallbackString" and isinstance(value, str))
        if name in _ANYTHING:
            return True
        if name in _SCALARS:
            return _SCALARS[name](value)
        if name in _SEQUENCES:
            return _is_sequence(value)
        self.unknown.add(path)
        return True

    def _accepts_generic(self, annotation: ast.Subscript, value: Any) -> bool:
        name = ast.unparse(annotation.value).rpartition(".")[2]
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if name in ("ClassVar", "Annotated", "Final"):
            return self.accepts(inner[0], value)
        if name == "Optional":
            return value is None or self.accepts(inner[0], value)
        if name == "Union":
            return any(self.accepts(choice, value) for choice in inner)
        if name in _SEQUENCES:
            return _is_sequence(value) and all(self.accepts(inner[0], item) for item in value)
        if name in ("tuple", "Tuple"):
            return self._accepts_tuple(inner, value)
        if name in ("dict", "Dict", "Mapping"):
            return isinstance(value, Mapping) and all(
                self.accepts(inner[0], key) and self.accepts(inner[1], item) for key, item in value.items()
            )
        if name in ("type", "Type"):
            return isinstance(value, type)
        if name not in _ANYTHING:
            self.unknown.add(ast.unparse(annotation))
        return True

    def _accepts_tuple(self, inner: list[ast.expr], value: Any) -> bool:
        if not isinstance(value, tuple):
            return False
        if len(inner) == 2 and isinstance(inner[1], ast.Constant) and inner[1].value is ...:
            return all(self.accepts(inner[0], item) for item in value)
        return len(inner) == len(value) and all(map(self.accepts, inner, value))


def _is_integer(value: Any) -> bool:
    """What pybind11 makes an int of: integers, numpy's and enums too, and handles that are integers; no float."""
    return hasattr(value, "__index__") or (hasattr(value, "__int__") and not hasattr(value, "__float__"))


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") or hasattr(value, "__index__")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # numpy's


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def _is_sequence(value: Any) -> bool:
    """Lists, tuples, and the library's own (``Dims``); no text and no bytes, as pybind11 takes none."""
    is_sequence = isinstance(value, Sequence) or (hasattr(value, "__len__") and hasattr(value, "__getitem__"))
    return is_sequence and not isinstance(value, (str, bytes, bytearray, Mapping))


_SCALARS: dict[str, Callable[[Any], bool]] = {
    "int": _is_integer,
    "SupportsInt": _is_integer,
    "SupportsIndex": _is_integer,
    "float": _is_number,
    "SupportsFloat": _is_number,
    "bool": _is_bool,
    "str": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, bytes),
    "Buffer": _is_buffer,
    "memoryview": lambda value: isinstance(value, memoryview),
    "slice": lambda value: isinstance(value, slice),
    "tuple": lambda value: isinstance(value, tuple),
    "dict": lambda value: isinstance(value, Mapping),
    "type": lambda value: isinstance(value, type),
    "None": lambda value: value is None,
}
