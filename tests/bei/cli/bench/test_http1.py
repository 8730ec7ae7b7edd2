"""HTTP/1.1 responses, received in any pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.cli.bench.driver import retry_after_s
from bei.cli.bench.http1 import HttpResponse, NotHttpError, head_of, request_of

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n1\r\n!\r\n0\r\nx: y\r\n\r\n"
COUNTED = b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\ncontent-length: 6\r\n\r\nhello!"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + COUNTED


def fed(raw: bytes, *, keeps_body: bool = True) -> HttpResponse:
    answer = HttpResponse(keeps_body=keeps_body)
    answer.feed(raw)
    return answer


@given(raw=st.sampled_from((CHUNKED, COUNTED, INTERIM)), cuts=st.lists(st.integers(1, 90), max_size=12))
def test_answers_are_whole_exactly_at_their_last_byte_in_whatever_pieces_they_come(raw: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    answer = HttpResponse(keeps_body=True)
    for _ in range(2):  # one after the other on the same connection
        whole = [answer.feed(raw[start:end]) for start, end in itertools.pairwise(edges)]
        assert whole == [False] * (len(whole) - 1) + [True]
        assert answer.status == (200 if raw == CHUNKED else 429)
        assert (answer.body, answer.num_body_bytes, answer.keeps_connection) == (b"hello!", 6, True)
        assert raw == CHUNKED or answer.header(b"retry-after") == b"3"
        answer.begin()
        assert (answer.status, answer.body, answer.has_begun) == (0, b"", False)


def test_of_a_body_that_is_only_counted_the_beginning_is_kept() -> None:
    answer = HttpResponse(keeps_body=False)
    answer.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 3000\r\n\r\n" + b"a" * 300)
    for _ in range(27):
        assert not answer._is_whole
        answer.feed(b"b" * 100)
    assert answer.num_body_bytes == 3000
    assert answer.body.startswith(b"a" * 300 + b"b" * 100)
    assert len(answer.body) < 1000


@pytest.mark.parametrize(
    ("raw", "ends_with_connection", "keeps_connection"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nrest", True, False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", False, False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", False, False),
        (b"HTTP/1.1 204 No\r\n\r\n", False, True),
    ],
)
def test_where_an_answer_ends_and_whether_the_connection_stays(
    raw: bytes, ends_with_connection: bool, keeps_connection: bool
) -> None:
    answer = fed(raw)
    assert (answer.ends_with_connection, answer.keeps_connection) == (ends_with_connection, keeps_connection)


@pytest.mark.parametrize(
    "raw", [b"220 mail ready\r\n", b"HTTP/1.1 101 Up\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"]
)
def test_what_is_no_answer_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(NotHttpError):
        fed(raw)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ("retry-after: 3", 3.0),
        ("Retry-After: 3\r\nRetry-After-Ms: 250", 0.25),
        ("retry-after: Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("retry-after: -1", None),
        ("retry-after: inf", None),
        ("x: y", None),
    ],
)
def test_when_to_come_back(headers: str, seconds: float | None) -> None:
    answer = fed(f"HTTP/1.1 429 X\r\n{headers}\r\ncontent-length: 0\r\n\r\n".encode())
    assert retry_after_s(answer) == seconds


def test_requests_are_whole() -> None:
    head = head_of("POST", "/embed", "a.example:8000", {"x-bei-lane": "bulk"})
    whole = request_of(head, json.dumps({"inputs": "ä"}, ensure_ascii=False).encode())
    top, body = whole.split(b"\r\n\r\n")
    assert top.split(b"\r\n") == [
        b"POST /embed HTTP/1.1",
        b"host: a.example:8000",
        b"x-bei-lane: bulk",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
    ]
    assert request_of(head, b"") == head + b"\r\n\r\n"
