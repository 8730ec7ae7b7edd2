"""Keys that stand twice in an object of JSON."""

from __future__ import annotations

import json
import time

import pytest

from bei.utils.json_keys import key_twice


@pytest.mark.parametrize(
    ("content", "twice"),
    [
        ('{"a": 1, "b": {"a": 2}}', None),
        ('{"a": 1, "a": 1}', "a"),
        ('[[{"b": {"c": 1, "\\u0063": 2}}]]', "c"),
        ('{"a": ' + "9" * 10_000 + ', "b": 1e999, "b": 0}', "b"),
        ("3", None),
    ],
)
def test_a_key_that_stands_twice_is_found_at_any_depth(content: str, twice: str | None) -> None:
    assert key_twice(content) == key_twice(content.encode()) == twice


@pytest.mark.parametrize(("content", "kind"), [("{", ValueError), ("[" * 100_000, RecursionError)])
def test_what_is_no_json_is_an_error(content: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        key_twice(content)


def test_a_hundred_thousand_keys_are_looked_at_once() -> None:
    """Each was compared with all others, which takes minutes, and holds the interpreter's lock."""
    content = json.dumps({str(number): 1 for number in range(100_000)})[:-1] + ', "99999": 2}'
    begun = time.perf_counter()
    assert key_twice(content) == "99999"
    assert time.perf_counter() - begun < 5
