"""Lines of a batch: what is one, what is none and why, and that none is too long to be read."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.server.batches.lines import RequestLine, read_lines

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a text"}}


def lines_of(content: bytes, most: int = 1_000, **start: int) -> list[RequestLine]:
    return [*read_lines(io.BytesIO(content), most, **start)]


def changed(**fields: object) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def test_a_request_keeps_its_body_to_the_byte() -> None:
    (line,) = lines_of(b'{"custom_id":"a","method":"POST","url":"/embed","body":{"inputs" : "x",  "new": 1.50}}')
    assert (line.number, line.custom_id, line.url, line.body) == (1, "a", "/embed", b'{"inputs" : "x",  "new": 1.50}')


def test_empty_lines_count_and_are_left_out_and_so_is_a_mark_in_front() -> None:
    content = b"\xef\xbb\xbf" + changed(custom_id="a") + b"\r\n\n  \n" + changed(custom_id="b")
    found = lines_of(content)
    assert [(line.number, line.custom_id, line.problem) for line in found] == [(1, "a", None), (4, "b", None)]
    assert found[-1].end == len(content)


@pytest.mark.parametrize(
    ("content", "code", "custom_id"),
    [
        (b"garbage", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        (b'{"custom_id": "a"}', "invalid_json_line", "a"),
        (changed(custom_id=7), "invalid_json_line", None),
        (changed(custom_id=""), "invalid_json_line", None),
        (changed(custom_id="a" * 513), "invalid_json_line", None),
        (changed(extra=1), "invalid_json_line", "a"),
        (changed(body=[1]), "invalid_json_line", "a"),
        (changed(method="GET"), "invalid_method", "a"),
        (changed(url="https://api.openai.com/v1/embeddings"), "invalid_url", "a"),
    ],
)
def test_what_is_no_request_says_why(content: bytes, code: str, custom_id: str | None) -> None:
    (line,) = lines_of(content, 200_000)
    assert line.problem is not None
    assert (line.problem.code, line.custom_id) == (code, custom_id)


def test_an_unknown_field_is_refused_by_its_name() -> None:
    (line,) = lines_of(changed(timeout=3))
    assert line.problem is not None
    assert "timeout" in line.problem.message


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ud83d and more text"])
@pytest.mark.parametrize("body", ["{half}", ["a", "b {half}"], {"{half}": 1, "\\ud83d": "\\\\\u2603"}])
def test_half_of_a_surrogate_pair_in_the_body_is_for_its_route_to_refuse(half: str, body: object) -> None:
    """As where JSON's encoders write an emoji that was cut."""
    written = json.dumps({"input": body}).replace("{half}", half).encode()
    for fields in (b'"custom_id":"a","body":%s', b'"body":%s,"custom_id":"a"', b'"custom_id":"\\ufffd","body" : %s '):
        (line,) = lines_of(b'{"method":"POST",' + fields % written + b',"url":"/embed"}')
        assert (line.problem, line.body) == (None, written)


@pytest.mark.parametrize(
    "fields",
    [{"custom_id": "a\ud800"}, {"url": "/embed\ud800"}, {"body": {"input": "\ud83d"}, "custom_id": "\ud83d"}],
)
def test_half_of_a_surrogate_pair_elsewhere_is_named(fields: dict[str, Any]) -> None:
    (line,) = lines_of(changed(**fields))
    assert line.problem is not None
    assert "half of a surrogate pair, which is no character, stands outside of the body" in line.problem.message


def test_of_a_body_that_stands_twice_none_is_taken_for_the_other() -> None:
    twice = b'"body":{"input":"\\ud83d"},"body":{"input":"\\ud83c"}'
    (line,) = lines_of(b'{"custom_id":"a","method":"POST","url":"/embed",%s}' % twice)
    assert line.problem is not None


def test_a_line_that_is_too_long_costs_the_others_nothing_and_is_not_kept() -> None:
    long = changed(body={"input": "x" * 3_000_000}) + b"\n"
    found = lines_of(long + changed(custom_id="b"))
    assert [line.problem and line.problem.code for line in found] == ["line_too_large", None]
    assert (found[0].end, found[1].custom_id, found[0].body) == (len(long), "b", b"")


@given(st.lists(st.sampled_from([changed(custom_id="a"), b"", b"garbage", b"x" * 12_000, b" "]), max_size=8), st.data())
def test_reading_goes_on_from_the_end_of_any_line(contents: list[bytes], data: st.DataObject) -> None:
    whole = b"\n".join(contents)
    found = lines_of(whole)
    if found:
        place = data.draw(st.integers(0, len(found) - 1))
        assert lines_of(whole, start=found[place].end, num_before=found[place].number) == found[place + 1 :]
