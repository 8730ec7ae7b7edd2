"""Header blocks of other people's encoder, and ours in other people's decoder."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from bei.server.grpc.http2.frames import Http2Error
from bei.server.grpc.http2.header_blocks import HeaderReader, head_of, literal, trailers

CALL = [(":method", "POST"), (":scheme", "http"), (":path", "/tei.v1.Embed/Embed"), (":authority", "localhost")]
GRPC = [("te", "trailers"), ("content-type", "application/grpc+proto")]


def fields(*more: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in (*CALL, *GRPC, *more)]


def test_equal_calls_are_looked_up_until_another_changes_the_table() -> None:
    encoder, reader = Encoder(), HeaderReader(10_000)
    blocks = [encoder.encode([*CALL, *GRPC, ("x-bei-lane", lane)]) for lane in ("bulk", "bulk", "interactive", "bulk")]
    heads = [reader.read(block) for block in (*blocks, blocks[-1])]
    assert [dict(head.headers)[b"x-bei-lane"] for head in heads] == [b"bulk", b"bulk", b"interactive", b"bulk", b"bulk"]
    assert heads[-1] is heads[-2]
    assert (heads[0].path, heads[0].is_malformed, heads[0].refused) == ("/tei.v1.Embed/Embed", False, 0)


VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=200)
NAMES = st.text("abcdefgh-", min_size=1, max_size=150).filter(lambda name: not name.endswith("-bin"))


@given(st.lists(st.lists(st.tuples(NAMES, VALUES), max_size=4), min_size=1, max_size=8))
def test_a_connection_s_blocks_mean_what_they_were_made_of(calls: list[list[tuple[str, str]]]) -> None:
    encoder, reader = Encoder(), HeaderReader(1_000_000)
    for more in calls:
        for _ in range(3):  # the second and third are of indices alone
            head = reader.read(encoder.encode([*CALL, *GRPC, *more]))
            assert head == head_of(fields(*more))


@given(st.integers(0, 20), st.text(max_size=300), st.lists(st.tuples(NAMES, VALUES), max_size=4))
def test_trailers_are_read_by_others(code: int, message: str, metadata: list[tuple[str, str]]) -> None:
    decoded = Decoder(max_header_list_size=1_000_000).decode(trailers(code, message, metadata))
    found = [(str(name), str(value)) for name, value in decoded]
    assert found[0] == ("grpc-status", str(code))
    assert [(name, value) for name, value in found if name not in ("grpc-status", "grpc-message")] == metadata
    told = dict(found).get("grpc-message", "")
    assert unquote(told) == message
    assert told.isascii()
    assert told.isprintable()


@pytest.mark.parametrize(
    ("more", "timeout_s"), [("100m", 0.1), ("3S", 3.0), ("2M", 120.0), ("1H", 3600.0), ("5u", 5e-6), ("7n", 7e-9)]
)
def test_timeouts(more: str, timeout_s: float) -> None:
    assert head_of(fields(("grpc-timeout", more))).timeout_s == pytest.approx(timeout_s)


@pytest.mark.parametrize(
    "wrong",
    [
        fields(("grpc-timeout", "1 day")),
        fields(("Upper", "a")),
        fields(("connection", "close")),
        fields(("x", "a\r\nb")),
        fields()[1:],
        [*fields(), (b":path", b"/again")],
        [(b":path", b"/a"), *fields()],
        [*fields(), (b":other", b"")],
    ],
)
def test_malformed_heads(wrong: list[tuple[bytes, bytes]]) -> None:
    assert head_of(wrong).is_malformed


def test_heads_that_http_refuses() -> None:
    assert head_of([*fields()[:4], (b"content-type", b"application/json")]).refused == 415
    assert head_of([(b":method", b"GET"), *fields()[1:]]).refused == 405
    assert (b"key-bin", b"a") not in head_of(fields(("key-bin", "a"))).headers


@pytest.mark.parametrize("block", [b"\xff\xff\xff\xff\xff\xff", b"\xbf", b"\x00\x05ab", b"\x40\x01a\x7f"])
def test_what_cannot_be_decoded_ends_the_connection(block: bytes) -> None:
    with pytest.raises(Http2Error):
        HeaderReader(1_000).read(block)


def test_too_many_bytes_of_fields_end_the_connection() -> None:
    with pytest.raises(Http2Error, match="too large"):
        HeaderReader(1_000).read(literal(b"x", b"a" * 2_000))
    reader = HeaderReader(1_000)  # a bomb: few bytes, many fields
    reader.read(b"\x40\x01x\x7f\x81\x01" + b"a" * 256)
    with pytest.raises(Http2Error):
        reader.read(b"\xbe" * 100)
