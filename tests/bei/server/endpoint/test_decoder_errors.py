"""What the decoder leaves out: the values that there are, and the field that stands in another one's place."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from bei.errors import MalformedRequestError
from bei.server.endpoint.parse import packed_parser, parser


class _Inner(msgspec.Struct):
    form: Literal["x", "y"] | None = None


class _Request(msgspec.Struct):
    input: str
    form: Literal["b", "a"] | list[Literal["c", "d"]] = "a"
    inner: _Inner | None = None
    inners: list[_Inner] = []
    by_name: dict[str, _Inner] = {}
    renamed: Literal[1, 2] = msgspec.field(default=1, name="number")


def message_of(body: object, *, packed: bool = False) -> tuple[str, str | None]:
    encode, parse = (msgspec.msgpack.encode, packed_parser) if packed else (msgspec.json.encode, parser)
    with pytest.raises(MalformedRequestError) as caught:
        parse(_Request)(encode(body))
    return str(caught.value), caught.value.param


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"form": "hex"}, "'hex' - at `$.form`: send one of a, b.", "form"),
        ({"form": ["hex"]}, "'hex' - at `$.form[0]`: send one of c, d.", "form"),
        ({"form": "` - at `$.inner`"}, "at `$.form`: send one of a, b.", "form"),
        ({"inner": {"form": "q"}}, "'q' - at `$.inner.form`: send one of x, y.", "inner.form"),
        ({"inners": [{}, {"form": "q"}]}, "'q' - at `$.inners[1].form`: send one of x, y.", "inners"),
        ({"by_name": {"a.b[0]": {"form": "q"}}}, "'q' - at `$.by_name[...].form`: send one of x, y.", "by_name"),
        ({"number": 3}, "3 - at `$.number`: send one of 1, 2.", "number"),
    ],
)
def test_an_unknown_value_is_answered_with_those_that_there_are(
    fields: dict[str, Any], message: str, param: str, packed: bool
) -> None:
    found, blamed = message_of({"input": "a", **fields}, packed=packed)
    assert found.startswith("The request is not valid: Invalid enum value ")
    assert (found.endswith(message), blamed) == (True, param), found


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        ({"inputs": "a"}, " The body has `inputs`: rename it."),
        ({"text": "a", "model": "b"}, ""),
        ({**{f"input{number}{'x' * 9}": 1 for number in range(100_000)}, "inputs": "a"}, ""),
        ({}, ""),
    ],
)
def test_a_field_that_is_missing_is_looked_for_under_a_name_like_its_own(body: dict[str, object], advice: str) -> None:
    assert message_of(body) == (f"The request is not valid: Object missing required field `input`.{advice}", "input")


def test_what_is_no_object_has_no_field() -> None:
    assert message_of([]) == ("The request is not valid: Expected `object`, got `array`.", None)
    assert message_of({"input": "a", "inners": [3]})[1] == "inners"
