"""Answers in pieces: the bytes of answers at once, whatever the route, the sizes and what is inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.server.endpoint import render, route
from bei.server.endpoint.render import (
    FLOAT_BYTES,
    PIECE_BYTES,
    Items,
    items_of,
    num_bytes_of,
    pieces_of,
    rows_of,
    whole,
)
from tests.bei.server.app import App
from tests.bei.server.endpoint.test_route import GOOD, OF_QUESTIONS, filled
from tests.bei.server.kinds import post
from tests.support.artifacts import LIMITS

TEXTS = ["cat", "the cats", "hello world, hello!", "é" * 30, "a", "query: cat"]

# Bodies that ask for more of a route's forms than its plain one.
_MORE: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [{"encoding_format": "base64", "dimensions": 3}, {"normalize": False, "dimensions": 3}],
    "/embed": [{"normalize": False, "dimensions": 3}],
    "/embed_all": [{"input_type": "query"}, {"input_type": "document"}],
    "/embed_sparse": [{"top_k": 2}],
    "/rerank": [{"return_text": True}],
    "/v1/rerank": [{"top_n": 2}],
    "/v2/rerank": [{"return_documents": True}],
    "/predict": [{"raw_scores": True}],
    "/classify": [{"raw_scores": True}],
    "/predict_tokens": [{"raw_scores": True}, {"aggregation_strategy": "simple"}],
    "/tokenize": [{"add_special_tokens": False}],
}
CASES = [
    (path, {**filled(path, TEXTS), **more})
    for path in sorted(set(GOOD) - OF_QUESTIONS)
    for more in [{}, *_MORE.get(path, [])]
]
CASES.append(("/tokenize", {"prompt": "the cats " * 40, "return_token_strs": True}))
CASES.append(("/predict", {"inputs": "cat"}))


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer with ``Items`` is streamed, and a piece ends wherever it can."""
    monkeypatch.setattr(route, "INLINE_BYTES", -1)
    monkeypatch.setattr(render, "PIECE_BYTES", 1)


def without_stamp(content: bytes) -> Any:
    """Ids and times differ from answer to answer; the rest is compared byte by byte."""
    found = orjson.loads(content)
    if isinstance(found, dict):
        for key in {"id", "created"} & set(found):
            content = content.replace(orjson.dumps(found[key]), b"", 1)
    return content


@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_route_s_answer_in_pieces_has_the_bytes_of_the_one_at_once(
    kinds: App, path: str, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    at_once = post(kinds, path, **body, model=GOOD[path][2])
    assert at_once.status_code == 200, at_once.text
    assert "content-length" in at_once.headers
    request.getfixturevalue("in_pieces")
    streamed = post(kinds, path, **body, model=GOOD[path][2])
    assert without_stamp(streamed.content) == without_stamp(at_once.content)
    assert "content-length" not in streamed.headers
    for name in ("content-type", "x-truncated-inputs"):
        assert streamed.headers.get(name) == at_once.headers.get(name)


numbers = st.lists(st.floats(width=32, allow_nan=False), max_size=40)
plain = st.one_of(st.none(), st.integers(-9, 9), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3))


def lists(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Items of any estimated size, right or wrong."""
    return st.builds(
        lambda made, size: Items(len(made), size, lambda start, stop: made[start:stop]),
        st.lists(values, max_size=12),
        st.integers(0, 2_000_000),
    )


contents = st.one_of(
    plain, lists(plain), lists(lists(plain)), st.dictionaries(st.text(max_size=3), st.one_of(plain, lists(plain)))
)


def built(content: Any) -> Any:
    """``content`` with lists in the place of Items."""
    if isinstance(content, Items):
        return [built(item) for item in content.make(0, content.count)]
    return {key: built(value) for key, value in content.items()} if isinstance(content, dict) else content


@given(content=contents)
def test_pieces_and_the_whole_are_the_same_json(content: Any) -> None:
    expected = orjson.dumps(built(content))
    assert whole(content) == expected
    assert b"".join(pieces_of(content)) == expected


@given(rows=numbers, width=st.integers(1, 7), cut=st.integers(1, 7))
def test_rows_are_written_as_lists_of_their_numbers(rows: list[float], width: int, cut: int) -> None:
    array = np.array(rows[: len(rows) // width * width], np.float32).reshape(-1, width)[:, :cut]
    expected = orjson.dumps([np.ascontiguousarray(row) for row in array], option=orjson.OPT_SERIALIZE_NUMPY)
    assert whole(rows_of(array)) == b"".join(pieces_of(rows_of(array))) == expected


def test_pieces_are_small_whatever_lies_inside() -> None:
    rows = [np.full((4000, 64), 0.12345678, np.float32), *[np.full((1, 64), 0.1, np.float32)] * 100]
    size = sum(array.size for array in rows) * FLOAT_BYTES
    texts = Items(len(rows), size, lambda start, stop: [rows_of(array) for array in rows[start:stop]])
    pieces = list(pieces_of({"data": texts}))
    assert len(pieces) > 10
    assert max(map(len, pieces)) < 3 * PIECE_BYTES


def test_items_are_made_once_in_order_and_only_when_they_are_written() -> None:
    asked: list[int] = []

    def make(value: int) -> str:
        asked.append(value)
        return "x" * 1000

    pieces = pieces_of(items_of(range(1000), 1000, make))
    assert asked == []
    next(pieces)
    assert 0 < len(asked) < 300
    for _ in pieces:
        pass
    assert asked == list(range(1000))


def test_the_size_of_an_answer_is_that_of_its_lists() -> None:
    items = items_of([1, 2], 10, str)
    assert [num_bytes_of(content) for content in (items, {"a": items, "b": items, "c": 1}, [1], None)] == [20, 40, 0, 0]


def test_what_is_no_json_is_an_error_of_the_renderer() -> None:
    with pytest.raises(TypeError):
        whole({"a": object()})
    with pytest.raises(TypeError):
        list(pieces_of(items_of([object()], 1, lambda value: value)))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed_all", "/embed_sparse", "/predict_tokens", "/tokenize"])
def test_the_estimated_size_is_not_far_from_the_real_one(
    kinds: App, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated: list[int] = []

    def noting(content: object) -> int:
        estimated.append(num_bytes_of(content))
        return estimated[-1]

    monkeypatch.setattr(route, "num_bytes_of", noting)
    response = post(kinds, path, **filled(path, [f"the cats {'hello ' * LIMITS.max_seq_len}"] * 8), model=GOOD[path][2])
    assert 0.2 < len(response.content) / estimated[0] < 2
