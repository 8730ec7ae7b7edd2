"""Fields that are refused: by every parser, without decoding what may have megabytes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import UNSET

from bei.config.settings import ServeConfig
from bei.errors import InvalidRequestError, MalformedRequestError
from bei.server.app import inference_routes
from bei.server.endpoint.field_schema import structs_in
from bei.server.endpoint.parse import parser
from bei.server.endpoint.refused_fields import Refused, refused
from tests.bei.server.app import App


class Request(msgspec.Struct):
    """One refused field, and one that is not."""

    asked: Annotated[Refused, refused("send another", 1, "a", {}, False)] = UNSET
    text: str = ""


parse = parser(Request)


@pytest.mark.parametrize("value", [b"null", b"1", b"1.0", b' "a"', b"{ }", b"false"])
def test_what_is_done_anyway_is_accepted_and_kept_no_longer(value: bytes) -> None:
    assert parse(b'{"text": "b", "asked": %s}' % value) == Request(text="b")  # a Raw would keep the whole body


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"2", "asked 2 is"),
        (b"true", "asked True is"),  # which equals 1 in Python
        (b"0", "asked 0 is"),
        (b'"b"', "asked b is"),
        (b"[1]", "asked (a list) is"),
        (b'{"a": 1}', "asked (an object) is"),
        (b"[]", "asked [] is"),
        (b'"%s"' % (b"b" * 200), f"asked {'b' * 40}... is"),
        (b'"%s"' % ("\u00e9" * 200).encode(), "asked " + "\u00e9" * 40 + "... is"),
    ],
)
def test_anything_else_is_refused_by_name(value: bytes, shown: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(b'{"asked": %s}' % value)
    assert str(caught.value) == f"{shown} not supported here: send another."
    assert caught.value.param == "asked"


def test_megabytes_are_refused_without_being_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields of the type Any made millions of objects of them."""

    def decode(content: bytes) -> Any:
        raise AssertionError(f"{len(content)} bytes are decoded")

    monkeypatch.setattr(msgspec.json, "decode", decode)
    with pytest.raises(InvalidRequestError, match=r"asked \(a list\) is not supported"):
        parse(b'{"asked": [%s1]}' % (b"1," * 500_000))


def test_what_is_no_utf8_is_no_json() -> None:
    with pytest.raises(MalformedRequestError, match="not valid JSON in UTF-8"):
        parse(b'{"asked": "\xff"}')


def test_no_field_of_a_request_decodes_whatever_comes(app: App) -> None:
    """Fields that are not honoured are ``Refused``; others say what they hold, or are read in a second step."""
    own = inference_routes(ServeConfig())
    routes = [*own, *(route for dialect in app.dialects for route in dialect.routes)]
    structs = {struct for route in routes for struct in structs_in(route.request)}
    assert len(structs) > 40
    loose = [
        f"{struct.__name__}.{field.name}"
        for struct in structs
        for field in msgspec.structs.fields(struct)
        if getattr(field.type, "__origin__", field.type) is Any
    ]
    assert loose == []
