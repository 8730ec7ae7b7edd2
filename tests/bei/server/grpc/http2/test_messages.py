"""Messages in the data of a stream, however it is cut, compressed or wrong."""

from __future__ import annotations

import gzip
import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import BeiError, EncodingNotSupportedError, MalformedRequestError, PayloadTooLargeError
from bei.server.grpc.http2.messages import MessageReader, with_prefix

MOST = 1_000


def reader(encoding: bytes = b"identity") -> MessageReader:
    return MessageReader(encoding, MOST, lambda _: None)


@given(st.lists(st.binary(max_size=50), max_size=6), st.lists(st.integers(0, 330), max_size=8))
def test_however_the_data_are_cut_the_messages_come_out(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(with_prefix, messages))
    found, read = [], reader()
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in itertools.pairwise(borders):
        found += read.feed(data[start:end])
    assert found == messages
    assert not read.is_within


def compressed(content: bytes) -> bytes:
    return b"\1" + len(content).to_bytes(4, "big") + content


def test_gzip_and_deflate_are_read_and_counted() -> None:
    grown: list[int] = []
    for encoding, make in ((b"gzip", gzip.compress), (b"deflate", zlib.compress)):
        content = make(b"cat" * 100)
        assert MessageReader(encoding, MOST, grown.append).feed(compressed(content)) == [b"cat" * 100]
    assert all(size > 200 for size in grown)


@pytest.mark.parametrize(
    ("encoding", "data", "error"),
    [
        (b"identity", b"\0" + (MOST + 1).to_bytes(4, "big"), PayloadTooLargeError),
        (b"identity", b"\2\0\0\0\0", MalformedRequestError),
        (b"identity", compressed(b"a"), EncodingNotSupportedError),
        (b"snappy", compressed(b"a"), EncodingNotSupportedError),
        (b"gzip", compressed(b"no gzip"), MalformedRequestError),
        (b"gzip", compressed(gzip.compress(b"a" * 900)[:-9]), MalformedRequestError),
        (b"gzip", compressed(gzip.compress(bytes(10_000_000))[: MOST - 1]), PayloadTooLargeError),
    ],
)
def test_what_is_wrong_is_an_error(encoding: bytes, data: bytes, error: type[BeiError]) -> None:
    with pytest.raises(error):
        reader(encoding).feed(data)
