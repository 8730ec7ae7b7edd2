"""Bodies to requests, and the dispatch by field."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import InvalidRequestError
from bei.server.dialects import tei
from bei.server.endpoint.parse import long_id_lists, parser, parser_by_field
from bei.server.routes import embed, extract, openai_embeddings, rerank
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import post


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
    [(b'{"texts": 1}', "texts"), (b'{"texts": ["a", 1]}', "texts"), (b"{}", "texts"), (b"[]", None), (b"\xff", None)],
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


# Long lists of token ids

MOST = 100_000
_lists = st.lists(st.lists(st.integers(0, 99_999), max_size=9), min_size=1, max_size=30)
_separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ": "), (",", " :\n ")])


@pytest.fixture(scope="module")
def _short_pieces() -> Iterator[None]:
    with mock.patch("bei.server.endpoint.parse.PIECE_BYTES", 7):
        yield


@pytest.mark.usefixtures("_short_pieces")
@given(lists=_lists, separators=_separators, before=_fields, behind=_fields, indent=st.none() | st.just(1))
def test_id_lists_in_pieces_are_those_at_once(
    lists: list[list[int]], separators: tuple[str, str], before: Any, behind: Any, indent: int | None
) -> None:
    fields = {**before, "inputs": lists, "model": "a", "nested": {"inputs": [[7]], **behind}}
    content = json.dumps(fields, separators=separators, indent=indent).encode()
    assert embed.parse_request(content, MOST) == msgspec.json.decode(content, type=embed.EmbedRequest)
    found = long_id_lists(content, "inputs", MOST)
    assert found is not None
    assert found.lists == lists
    assert msgspec.json.decode(found.rest) == {**fields, "inputs": "\0token ids"}


@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize(
    "fields",
    [
        {"parameters": {"inputs": [[1, 2], [3]]}, "inputs": [[4], [5]]},
        {"parameters": {"inputs": [[1, 2], [3]]}, "inputs": []},
        {"parameters": {"inputs": [[1, 2], [3]]}, "inputs": ["a"]},
        {"prompt_name": '"inputs":[[1,2],[3]]', "inputs": [[4], [5]]},
        {"inputs": [[1], "a", [2]]},
        {"inputs": [[], [1, 2, 3]]},
    ],
)
def test_only_the_field_itself_counts(fields: dict[str, Any]) -> None:
    content = json.dumps(fields, separators=(",", ":")).encode()
    assert embed.parse_request(content, MOST).inputs == fields["inputs"]


@pytest.mark.usefixtures("_short_pieces")
@given(near=st.text(st.sampled_from('[],"1 -{}'), max_size=60))
def test_what_is_near_to_id_lists_is_read_or_refused_as_ever(near: str) -> None:
    content = b'{"inputs":[[' + near.encode()
    try:
        expected: Any = msgspec.json.decode(content, type=embed.EmbedRequest)
    except msgspec.DecodeError:
        expected = None
    try:
        found: Any = embed.parse_request(content, MOST)
    except InvalidRequestError:
        found = None
    assert found == expected


@pytest.mark.parametrize("more", [{}, {"normalize": False}, {"other": [[1, 2]] * 30_000}])
def test_a_long_body_of_token_ids_is_parsed_as_a_short_one(more: dict[str, object]) -> None:
    lists = [[1, 2]] * 60_000
    body = json.dumps({**more, "inputs": lists}).encode()
    assert embed.parse_request(body, MOST) == msgspec.json.decode(body, type=embed.EmbedRequest)
    content = json.dumps({"input": lists, **more}).encode()
    request = openai_embeddings.parse(content, MOST)
    assert request.inputs == lists
    assert len(bytes(request.body.input)) < 100


def test_an_error_far_behind_in_a_long_body_is_named() -> None:
    body = json.dumps({"inputs": [[1, 2]] * 60_000 + [[-1]]}).encode()
    with pytest.raises(InvalidRequestError, match=r"inputs\[60000\]"):
        embed.parse_request(body, MOST)


@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize("count", [3, 4, 40])
def test_more_lists_than_a_request_may_have_are_counted_and_refused(count: int) -> None:
    lists = [[index] for index in range(count)]
    for field, parse in (("inputs", embed.parse_request), ("input", openai_embeddings.parse)):
        content = json.dumps({field: lists, "model": "a"}).encode()
        if count == 3:
            parse(content, 3)
            continue
        with pytest.raises(InvalidRequestError, match=f"The request has {count} inputs, the limit is 3: split it"):
            parse(content, 3)


def test_lists_by_the_million_are_not_made() -> None:
    found = long_id_lists(b'{"inputs":[' + b"[1]," * 1_000_000 + b"[1]]}", "inputs", 1000)
    assert found is not None
    assert len(found.lists) == 1_000_001
    assert len({id(one) for one in found.lists}) < 100_000


# Many inputs


@pytest.mark.usefixtures("_short_pieces")
@given(ids=st.lists(st.integers(0, 99_999), min_size=1, max_size=60), separators=_separators)
def test_the_ids_of_one_input_in_pieces_are_those_at_once(ids: list[int], separators: tuple[str, str]) -> None:
    fields = {"inputs": ids, "nested": {"inputs": [7]}}
    content = json.dumps(fields, separators=separators).encode()
    found = long_id_lists(content, "inputs", MOST)
    assert found is not None
    assert found.lists == [ids]
    assert msgspec.json.decode(found.rest) == {**fields, "inputs": "\0token ids"}
    assert embed.inputs_of(embed.parse_request(content, 1).inputs) == [ids]


@pytest.mark.usefixtures("_short_pieces")
@given(near=st.text(st.sampled_from('[],"1 -{}'), max_size=60))
def test_what_is_near_to_the_ids_of_one_input_is_read_or_refused_as_ever(near: str) -> None:
    content = b'{"ids":[1' + near.encode()
    try:
        expected: Any = msgspec.json.decode(content, type=tei.DecodeRequest).ids
    except msgspec.DecodeError:
        expected = None
    if expected is not None and not all(isinstance(value, int) for value in expected):
        expected = None
    try:
        found: Any = tei.parse_ids(content, MOST).ids
    except InvalidRequestError:
        found = None
    assert found == expected or found == [expected]


@pytest.mark.parametrize(
    ("parse", "content", "param"),
    [
        (embed.parse_request, b'{"inputs": ["", "", "", ""]}', "inputs"),
        (openai_embeddings.parse, b'{"input": ["", "", "", ""]}', "input"),
        (rerank.parse, b'{"query": "a", "documents": [{}, {}, {}, {}]}', "documents"),
        (tei.parse_ids, b'{"ids": [[1], [1], [1], [1]]}', "ids"),
    ],
    ids=["embed", "embeddings", "rerank", "decode"],
)
def test_inputs_are_counted_before_they_are_looked_at(
    parse: Callable[[bytes, int], Any], content: bytes, param: str
) -> None:
    is_refused = pytest.raises(InvalidRequestError, match="The request has 4 inputs, the limit is 3: split it")
    with mock.patch("bei.server.endpoint.parse.PIECE_BYTES", 1000), is_refused as caught:
        parse(content, 3)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/predict_tokens", {"inputs": [["a"]] * 8 + [["a", "b"]], "model": "ner"}, "inputs"),
        ("/v1/ranking", {"query": {"text": "a"}, "passages": [{"text": "b", "image": "c"}] * 9}, "passages"),
    ],
)
def test_objects_are_counted_before_they_are_looked_at(kinds: App, path: str, body: dict[str, Any], param: str) -> None:
    """What else is wrong with them is not said."""
    check_error(post(kinds, path, **body), 400, "has 9 inputs, the limit is 8", param=param)


def test_a_key_that_stands_twice_behind_many_others_is_found_at_once() -> None:
    """Each of the others was counted: minutes."""
    keys = ", ".join(f'"{place}": ""' for place in [*range(60_000), 59_999])
    began_s = time.process_time()
    with pytest.raises(InvalidRequestError, match="the key '59999' twice"):
        extract.ROUTE.parse(f'{{"input": "a", "labels": {{{keys}}}}}'.encode())
    assert time.process_time() - began_s < 5
