"""Answers in the form that a client accepts: JSON, MessagePack, or vectors alone as bytes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.engine.fake import FakeEngine
from bei.errors import InvalidRequestError
from bei.server.endpoint import render, route
from bei.server.http.accept import MSGPACK, OCTETS, accepted, accepted_codings, answer_form
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.endpoint.test_route import GOOD, OF_QUESTIONS, filled
from tests.support.artifacts import LIMITS

JSON = "application/json"
TEXTS = ["cat", "hello world", "the cats", "é" * 30]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("*/*", (JSON,)),
        ("application/json", (JSON,)),
        ("text/html", (JSON,)),
        ("", (JSON,)),
        ("application/msgpack", (MSGPACK,)),
        ("application/x-msgpack, */*;q=0.1", (MSGPACK, JSON)),
        ("application/octet-stream;q=0.5, application/vnd.msgpack", (MSGPACK, OCTETS)),
        ("application/msgpack, application/json", (JSON, MSGPACK)),
        ("application/json;q=0.2, APPLICATION/OCTET-STREAM ; q=0.9", (OCTETS, JSON)),
        ("application/msgpack;q=0", (JSON,)),
        ("application/octet-stream;q=high", (JSON,)),
    ],
)
def test_the_best_that_there_is_comes_first(header: str, expected: tuple[str, ...]) -> None:
    assert accepted(header.encode()) == expected


@given(header=st.binary(max_size=60))
def test_any_header_means_something(header: bytes) -> None:
    found = accepted(header)
    assert found
    assert set(found) <= {JSON, MSGPACK, OCTETS}


def test_a_report_is_asked_for_by_a_header_of_two_values() -> None:
    assert answer_form([(b"x-bei-report", b"True")]).has_report
    assert not answer_form([(b"x-bei-report", b"0"), (b"accept", b"*/*")]).has_report
    with pytest.raises(InvalidRequestError, match="x-bei-report must be true or false"):
        answer_form([(b"x-bei-report", b"yes please")])


def ask(app: App, path: str, accept: str | None, **body: Any) -> httpx.Response:
    headers = {} if accept is None else {"accept": accept}
    response: httpx.Response = app.run(app.client.post(path, content=json.dumps(body).encode(), headers=headers))
    return response


def unstamped(fields: Any) -> Any:
    """Ids and times differ from answer to answer."""
    return {k: v for k, v in fields.items() if k not in ("id", "created")} if isinstance(fields, dict) else fields


@pytest.mark.parametrize("path", sorted(GOOD))
@pytest.mark.parametrize("in_pieces", [False, True])
def test_messagepack_has_the_values_of_json(
    kinds: App, path: str, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**(GOOD[path][0] if path in OF_QUESTIONS else filled(path, TEXTS)), "model": GOOD[path][2]}
    expected = ask(kinds, path, None, **body).json()
    if in_pieces:
        monkeypatch.setattr(route, "INLINE_BYTES", -1)
        monkeypatch.setattr(render, "PIECE_BYTES", 1)
    response = ask(kinds, path, MSGPACK, **body)
    assert response.headers["content-type"] == MSGPACK
    found = msgspec.msgpack.decode(response.content)
    numbers = json.loads(json.dumps(found), parse_float=lambda text: float(np.float32(text)))
    expected = json.loads(json.dumps(expected), parse_float=lambda text: float(np.float32(text)))
    assert unstamped(numbers) == unstamped(expected)


@pytest.mark.parametrize("count", [1, 15, 16, 300, 70_000])
def test_long_lists_in_pieces_are_whole_messagepack(count: int) -> None:
    content = {"data": render.items_of(range(count), 2, lambda value: {"n": value}), "end": True}
    pieces = b"".join(render.pieces_of(content, render.IN_MSGPACK))
    assert msgspec.msgpack.decode(pieces) == {"data": [{"n": value} for value in range(count)], "end": True}
    assert pieces == render.whole(content, render.IN_MSGPACK)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("dtype", ["float", "float16", "int8", "uint8", "binary", "ubinary"])
def test_bytes_are_the_vectors_of_the_json_answer(
    kinds: App, dtype: str, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"input": TEXTS, "model": "embedder", "output_dtype": dtype}
    expected = [one["embedding"] for one in ask(kinds, "/v1/embeddings", None, **body).json()["data"]]
    if in_pieces:
        monkeypatch.setattr(route, "INLINE_BYTES", -1)
        monkeypatch.setattr(render, "PIECE_BYTES", 1)
    response = ask(kinds, "/v1/embeddings", OCTETS, **body)
    assert response.headers["content-type"] == OCTETS
    shape = [int(size) for size in response.headers["x-bei-shape"].split(",")]
    found = np.frombuffer(response.content, response.headers["x-bei-dtype"]).reshape(shape)
    np.testing.assert_allclose(found.astype(np.float64), np.array(expected), rtol=1e-3 if dtype == "float16" else 1e-6)
    assert response.headers["x-truncated-inputs"] == "3"


@pytest.mark.parametrize("path", ["/embed", "/", "/invocations", "/v1/embed", "/v2/embed", "/embeddings"])
def test_every_route_of_vectors_gives_their_bytes(kinds: App, path: str) -> None:
    expected = ask(kinds, "/embed", None, inputs=TEXTS, model="embedder").json()
    found = ask(kinds, path, OCTETS, **filled(path, TEXTS), model="embedder")
    np.testing.assert_allclose(np.frombuffer(found.content, "<f4").reshape(len(TEXTS), -1), expected, rtol=1e-6)


def test_bytes_of_what_is_no_vector_are_not_acceptable_unless_json_is(kinds: App) -> None:
    body = {**GOOD["/rerank"][0], "model": "reranker"}
    response = ask(kinds, "/rerank", OCTETS, **body)
    check_error(response, 406, "accept application/json or application/msgpack", code="not_acceptable")
    fallback = ask(kinds, "/rerank", f"{OCTETS}, {JSON};q=0.1", **body)
    assert (fallback.status_code, fallback.headers["content-type"]) == (200, JSON)


def test_several_types_of_vectors_are_no_bytes(kinds: App) -> None:
    body = {"texts": ["a"], "model": "embedder", "embedding_types": ["float", "int8"]}
    assert ask(kinds, "/v2/embed", OCTETS, **body).status_code == 406


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", ()),
        ("identity, br", ()),
        ("gzip, deflate", ("gzip",)),
        ("gzip, deflate, br, zstd", ("zstd", "gzip")),
        ("gzip;q=0.9, zstd;q=0.5", ("gzip", "zstd")),
        ("gzip;q=0, zstd", ("zstd",)),
    ],
)
def test_the_best_coding_comes_first(header: str, expected: tuple[str, ...]) -> None:
    assert accepted_codings(header.encode()) == expected


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_server_that_compresses_sends_the_same_answer(
    make_app: MakeApp, coding: str, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(FakeEngine(LIMITS), compress_answers=True)
    inputs = [f"cat {index}" for index in range(100)]
    headers = {"accept-encoding": coding}

    def ask(**body: Any) -> httpx.Response:
        response: httpx.Response = app.run(app.client.post("/v1/embeddings", json=body, headers=headers))
        return response

    expected = app.run(app.client.post("/v1/embeddings", json={"input": inputs}, headers={"accept-encoding": "br"}))
    assert "content-encoding" not in expected.headers
    if in_pieces:
        monkeypatch.setattr(route, "INLINE_BYTES", -1)
        monkeypatch.setattr(render, "PIECE_BYTES", 1)
    found = ask(input=inputs)
    assert (found.headers["content-encoding"], found.headers["vary"]) == (coding, "accept-encoding")
    assert found.content == expected.content
    if not in_pieces:
        assert int(found.headers["content-length"]) < len(expected.content) / 3
        assert "content-encoding" not in ask(input="one").headers


def test_a_server_compresses_only_if_it_is_told_to(app: App) -> None:
    inputs = [f"cat {index}" for index in range(30)]
    response = app.run(app.client.post("/v1/embeddings", json={"input": inputs}, headers={"accept-encoding": "gzip"}))
    assert "content-encoding" not in response.headers
