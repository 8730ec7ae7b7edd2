"""Bodies to requests, and the dispatch by field."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import InvalidRequestError
from bei.server.parsing import parser, parser_by_field


class Texts(msgspec.Struct):
    texts: list[str]


class Documents(msgspec.Struct):
    documents: list[str]


parse = parser_by_field(texts=Texts, documents=Documents)

_fields = st.dictionaries(st.sampled_from(["texts", "documents", "other"]), st.none() | st.just(["a"]))


@given(_fields)
def test_the_only_field_that_is_there_decides(fields: dict[str, list[str] | None]) -> None:
    there = [name for name in ("texts", "documents") if fields.get(name) is not None]
    body = json.dumps(fields).encode()
    if len(there) == 1:
        assert type(parse(body)) is {"texts": Texts, "documents": Documents}[there[0]]
    else:
        with pytest.raises(InvalidRequestError, match="exactly one of the fields texts, documents"):
            parse(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [(b'{"texts": 1}', "texts"), (b'{"texts": ["a", 1]}', "texts"), (b"{}", None), (b"[]", None), (b"\xff", None)],
)
def test_errors_blame_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parser(Texts)(body)
    assert caught.value.param == param


@given(st.binary(max_size=40))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    for function in (parse, parser(Texts)):
        try:
            function(body)
        except InvalidRequestError:
            continue
