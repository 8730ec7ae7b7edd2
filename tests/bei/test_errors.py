"""Whatever an error quotes, its message is one line that a terminal and a log can show."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei import errors
from bei.errors import BeiError, ConfigError, InvalidRequestError, OverloadedError, UnsupportedArchitectureError

NASTY = 'while parsing\n  in "file", line 2:\n\tkey: \x1b[2J\ud800\u202e\ufeff\0'


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(NASTY),
        UnsupportedArchitectureError(NASTY),
        InvalidRequestError(NASTY, "input"),
        OverloadedError(NASTY, 1.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_message_is_one_printable_line(error: BeiError) -> None:
    expected = 'while parsing in "file", line 2: key: \\x1b[2J\\ud800\\u202e\\ufeff\\x00'
    assert str(error) == expected


@given(st.text(st.characters(exclude_categories=[]), max_size=40), st.integers(1, 200))
def test_a_message_is_bounded_and_stays_when_it_is_passed_on(text: str, times: int) -> None:
    message = str(BeiError(text * times))
    assert message.isprintable()
    assert len(message) <= 2_000
    assert str(BeiError(message)) == message


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=100))
def test_a_printable_message_stays_as_it_is(text: str) -> None:
    assert str(BeiError(text)) == text


def test_the_drawing_of_the_tree_has_every_class_in_its_place() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ([│├└─ ]*)(\w+Error)\b", line):
            depth = len(found[1]) // 4
            drawn[found[2]] = path[depth - 1] if depth else "Exception"
            path[depth:] = [found[2]]
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, BeiError)]
    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in classes}


def test_an_error_may_have_no_message() -> None:
    assert str(BeiError()) == ""
