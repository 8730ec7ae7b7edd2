"""Errors cross the border of a process as what they are: class, code, message, attributes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from bei import errors
from bei.errors import (
    BeiError,
    BrokenDependencyError,
    EngineError,
    InvalidRequestError,
    MissingDependencyError,
    OverloadedError,
)
from bei.multiprocess.transport.messages import CarriedError, arrived, carried


def tree(root: type[BeiError] = BeiError) -> Iterator[type[BeiError]]:
    if root.__module__ == errors.__name__:
        yield root
    for child in root.__subclasses__():
        yield from tree(child)


def sent(error: BeiError) -> BeiError:
    return arrived(msgspec.msgpack.decode(msgspec.msgpack.encode(carried(error)), type=CarriedError))


def made(kind: type[BeiError]) -> BeiError:
    if issubclass(kind, OverloadedError):
        return kind("too much", 1.5)
    if issubclass(kind, MissingDependencyError):
        return kind("package", "extra", "Serving")
    if issubclass(kind, BrokenDependencyError):
        return kind("package", "extra", "Serving", "its words")
    return kind("a message")


@pytest.mark.parametrize("kind", list(tree()))
def test_an_error_arrives_as_it_was(kind: type[BeiError]) -> None:
    error = made(kind)
    found = sent(error)
    assert type(found) is kind
    assert (str(found), found.code, vars(found)) == (str(error), error.code, vars(error))


def test_fields_arrive() -> None:
    assert vars(sent(InvalidRequestError("wrong", "input"))) == {"param": "input"}
    assert vars(sent(OverloadedError("wait", 2.5))) == {"retry_after_s": 2.5}


def test_what_is_no_plain_value_stays_behind() -> None:
    error = EngineError("failed")
    error.cause = ValueError("secret")  # type: ignore[attr-defined]
    assert vars(sent(error)) == {}


def test_a_class_that_is_not_known_becomes_one_of_its_code_or_an_engine_error() -> None:
    assert type(arrived(CarriedError("NewError", "overloaded", "later", {}))) is OverloadedError
    assert type(arrived(CarriedError("NewError", "new_code", "what", {}))) is EngineError


def test_nothing_that_is_no_error_of_ours_can_be_named() -> None:
    assert type(arrived(CarriedError("SystemExit", "new_code", "0", {}))) is EngineError
