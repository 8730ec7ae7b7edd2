"""/openapi.json allows the parts of inputs that the server reads, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from bei.errors import InvalidRequestError
from bei.server.endpoint.input_parts import InputPart, JoinedPart, joined_parts
from tests.api_docs import page

COMPONENTS = page()["components"]
ABSENT = object()
VALUES: Mapping[str, tuple[object, ...]] = {
    "text": (ABSENT, None, "", "a"),
    "image": (ABSENT, None, "", "aGVsbG8="),
    "image_url": (ABSENT, None, "data:,", {"url": "data:,", "detail": "low"}, {"url": "data:,", "format": "png"}, {}),
    "image_base64": (ABSENT, "aGVsbG8="),
    "bytes": (ABSENT, "aGVsbG8="),
    "url": (ABSENT, None),
    "type": (ABSENT, None, "text", "input_text", "image_url", "image", "video"),
}
INPUTS: tuple[list[dict[str, str]], ...] = (
    [],
    [{}],
    [{"text": ""}],
    [{"text": "a"}],
    [{"image": "aGVsbG8="}],
    [{"text": ""}, {"text": ""}],
    [{"text": "a"}, {}],
    [{"text": "a"}, {"image": "aGVsbG8="}],
    [{"image": "aGVsbG8="}, {"image": "aGVsbG8="}],
)


def parts() -> Iterator[dict[str, object]]:
    """Every combination of VALUES, and one with a field that there is not."""
    for values in product(*VALUES.values()):
        yield {name: value for name, value in zip(VALUES, values, strict=True) if value is not ABSENT}
    yield {"text": "a", "detail": "low"}


def is_allowed(schema: Any, value: object) -> bool:
    return bool(Draft202012Validator({**schema, "components": COMPONENTS}).is_valid(value))


def is_read(read: Callable[[Any], object], given: object) -> bool:
    """An empty text is refused later, where an input is checked."""
    try:
        return read(given) != ""
    except (msgspec.ValidationError, InvalidRequestError):
        return False


def read_part(given: object) -> object:
    return msgspec.convert(given, InputPart).model_input("input")


def read_parts(given: object) -> object:
    return joined_parts(msgspec.convert(given, list[JoinedPart]), "inputs")


def test_a_part_is_allowed_where_it_is_read() -> None:
    schema = {"$ref": "#/components/schemas/InputPart"}
    found = [(is_allowed(schema, part), is_read(read_part, part), part) for part in parts()]
    assert [one for one in found if one[0] is not one[1]] == []
    assert sum(allowed for allowed, *_ in found) > 30


@pytest.mark.parametrize("name", ["JoinedInput"])
def test_parts_of_one_input_are_allowed_where_they_are_read(name: str) -> None:
    schema = {"$ref": f"#/components/schemas/{name}"}
    for given in INPUTS:
        assert is_allowed(schema, {"content": given}) is (given != [] and is_read(read_parts, given)), given


def test_a_field_of_an_address_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="format"):
        read_part({"type": "image_url", "image_url": {"url": "data:,", "format": "png"}})
