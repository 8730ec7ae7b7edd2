"""Encoded bodies: what comes out is what went in, within the limit, or a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import sys
import threading
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import EncodingNotSupportedError, InvalidRequestError, PayloadTooLargeError
from bei.server.http import compression as module
from bei.server.http.compression import _INLINE, _MOST_PARTS, _PIECE, CODINGS, content_coding, decode, decoded
from tests.support.engines import DEADLINE_S

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENCODERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
BOMB_SIZE = 50_000_000

codings = pytest.mark.parametrize("coding", CODINGS)


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    return {coding: encode(bytes(BOMB_SIZE)) for coding, encode in ENCODERS.items()}


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        (None, "identity"),
        ("", "identity"),
        ("identity", "identity"),
        ("gzip", "gzip"),
        (" GZip ", "gzip"),
        ("x-gzip", "gzip"),
        ("zstd", "zstd"),
    ],
)
def test_the_header_names_the_coding(header: str | None, coding: str) -> None:
    assert content_coding(header) == coding


@pytest.mark.parametrize("header", ["br", "deflate", "gzip, zstd", "gzip, gzip", "*", "gz\u00ffip", "x" * 10_000])
def test_any_other_coding_is_refused_by_name_and_the_accepted_ones_are_named(header: str) -> None:
    with pytest.raises(EncodingNotSupportedError, match="gzip or zstd") as caught:
        content_coding(header)
    assert header[:100] in str(caught.value) or repr(header) in str(caught.value)
    assert len(str(caught.value)) < 400


@codings
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=5), copies=st.sampled_from([1, 1, 1000]))
def test_parts_after_each_other_decode_to_what_was_encoded(coding: str, parts: list[bytes], copies: int) -> None:
    parts = [part * copies for part in parts]
    body, content = b"".join(map(ENCODERS[coding], parts)), b"".join(parts)
    assert decode(body, coding, len(content)) == content


@codings
@given(content=st.binary(max_size=1000), data=st.data())
def test_a_body_that_was_cut_off_is_refused(coding: str, content: bytes, data: st.DataObject) -> None:
    body = ENCODERS[coding](content)
    end = data.draw(st.integers(1, len(body) - 1))
    with pytest.raises(InvalidRequestError, match=f"not {coding}"):
        decode(body[:end], coding, 10_000)


@codings
@given(body=st.binary(min_size=1, max_size=100))
def test_any_bytes_are_decoded_or_refused(coding: str, body: bytes) -> None:
    with contextlib.suppress(InvalidRequestError, PayloadTooLargeError):
        decode(body, coding, 10_000)


@codings
def test_the_limit_is_on_what_comes_out(coding: str) -> None:
    body = ENCODERS[coding](b"x" * 1000)
    assert len(decode(body, coding, 1000)) == 1000
    with pytest.raises(PayloadTooLargeError, match="more than 999 bytes"):
        decode(body, coding, 999)


@codings
def test_a_bomb_is_refused_before_it_is_decoded(
    coding: str, bombs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    produced: list[int] = []
    original = module._PIECES[coding]

    def counted(body: bytes) -> object:
        for piece in original(body):
            produced.append(len(piece))
            yield piece

    monkeypatch.setitem(module._PIECES, coding, counted)
    with pytest.raises(PayloadTooLargeError):
        decode(bombs[coding], coding, 1_000_000)
    assert max(produced) <= _PIECE
    assert sum(produced) <= 1_000_000 + _PIECE


def test_a_zstd_frame_may_not_ask_for_a_window_larger_than_http_allows() -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 24})
    body = compressor.compress(b"x" * 100) + compressor.flush()
    with pytest.raises(InvalidRequestError, match="not zstd"):
        decode(body, "zstd", 1000)


@codings
def test_thousands_of_empty_parts_are_refused(coding: str) -> None:
    part = ENCODERS[coding](b"")
    assert decode(part * _MOST_PARTS, coding, 10) == b""
    with pytest.raises(InvalidRequestError, match="more than"):
        decode(part * (_MOST_PARTS + 1), coding, 10)


def test_a_wrong_checksum_is_refused() -> None:
    body = bytearray(gzip.compress(b"x" * 1000))
    body[-8] ^= 1
    with pytest.raises(InvalidRequestError, match="not gzip"):
        decode(bytes(body), "gzip", 10_000)


def test_a_zlib_body_is_not_gzip() -> None:
    with pytest.raises(InvalidRequestError, match="not gzip"):
        decode(zlib.compress(b"x"), "gzip", 10_000)


@codings
@pytest.mark.parametrize("size", [0, 10, _INLINE, _INLINE + 1, 20 * _INLINE])
def test_small_and_large_bodies_come_out_the_same_way(coding: str, size: int) -> None:
    assert asyncio.run(decoded(ENCODERS[coding](bytes(size)), coding, 20 * _INLINE)) == bytes(size)


@codings
def test_the_loop_goes_on_while_a_large_body_is_decoded(
    coding: str, bombs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_turned = threading.Event()
    original = module._PIECES[coding]

    def waiting(body: bytes) -> Iterator[bytes]:
        size = 0
        for piece in original(body):
            assert size <= _INLINE or has_turned.wait(DEADLINE_S), "the loop stands still"
            size += len(piece)
            yield piece

    monkeypatch.setitem(module._PIECES, coding, waiting)

    async def scenario() -> bytes:
        work = asyncio.ensure_future(decoded(bombs[coding], coding, BOMB_SIZE))
        for _ in range(10):
            await asyncio.sleep(0)
        has_turned.set()
        return await work

    assert len(asyncio.run(scenario())) == BOMB_SIZE


def test_a_body_without_a_coding_is_returned_as_it_is() -> None:
    body = b"anything"
    assert asyncio.run(decoded(body, "identity", 1)) is body
