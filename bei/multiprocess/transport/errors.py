"""Errors on their way to another process: by class, code, message and attributes, so that nothing is executed to read
them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from bei.errors import BeiError, EngineError

_Plain: TypeAlias = str | int | float | bool | None


class CarriedError(NamedTuple):
    """A BeiError as plain data."""

    name: str
    code: str
    message: str
    attributes: dict[str, _Plain]


def carried(error: BeiError) -> CarriedError:
    """``error`` as data. Attributes that are no plain values stay behind."""
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
    return CarriedError(type(error).__name__, error.code, str(error), attributes)


def arrived(data: CarriedError) -> BeiError:
    """The error as it was. A class that this process does not know becomes one of the same code, or an EngineError."""
    kinds = list(_tree(BeiError))
    named = [kind for kind in kinds if kind.__name__ == data.name]
    alike = [kind for kind in kinds if kind.code == data.code]
    kind: type[BeiError] = (*named, *alike, EngineError)[0]
    error: BeiError = kind.__new__(kind, data.message)  # not __init__, whose arguments made the message
    vars(error).update(data.attributes)
    return error


def _tree(root: type[BeiError]) -> Iterator[type[BeiError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)
