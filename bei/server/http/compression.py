"""Bodies with a Content-Encoding, gzip (RFC 1952) or zstd (RFC 8878), decoded and encoded in pieces of bounded size."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from bei.errors import EncodingNotSupportedError, InvalidRequestError, PayloadTooLargeError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CODINGS = ("gzip", "zstd")

_ALIASES = {"": "identity", "x-gzip": "gzip"}  # RFC 9110, section 8.4.1.3
_GZIP = 16 + zlib.MAX_WBITS  # for zlib: with gzip's header and checksum

# The window that every zstd decoder for HTTP must have and no encoder may exceed (RFC 9659): a frame's header alone
# makes the decoder allocate it.
_ZSTD_WINDOW_LOG = 23

_GZIP_LEVEL = 1
_ZSTD_LEVEL = 1

_PIECE = 65536
# Most members of gzip or frames of zstd in one body. Many compressors write one for every 64 kB or more; each takes a
# decoder of its own, even if it is empty.
_MOST_PARTS = 1000
# Bodies of at most this many bytes, encoded and decoded, are decoded on the event loop: in about a millisecond. Larger
# ones go to the thread.
_INLINE = 262_144

# One thread: however many bodies wait, only one decoder's window and one decoded body are in memory beside them.
_decoder = ThreadPoolExecutor(1, "decoder")


def content_coding(header: str | None) -> str:
    """The coding that a Content-Encoding header names: ``identity`` or one of CODINGS.

    Raises EncodingNotSupportedError, also for several codings on top of each other.
    """
    name = (header or "").strip().lower()
    coding = _ALIASES.get(name, name)
    if coding not in ("identity", *CODINGS):
        raise EncodingNotSupportedError(
            f"Content-Encoding {name[:100]!r} is not decoded here: "
            f"send the body with {' or '.join(CODINGS)}, or as it is."
        )
    return coding


async def decoded(body: bytes, coding: str, limit: int) -> bytes:
    """``body`` decoded from ``coding``: a small one on the event loop, a large one in a thread.

    Raises PayloadTooLargeError as soon as more than ``limit`` bytes come out, InvalidRequestError.
    """
    if coding == "identity" or not body:
        return body
    if len(body) <= _INLINE:
        try:
            return decode(body, coding, min(limit, _INLINE))
        except PayloadTooLargeError:
            if limit <= _INLINE:
                raise
    return await asyncio.get_running_loop().run_in_executor(_decoder, decode, body, coding, limit)


def decode(body: bytes, coding: str, limit: int) -> bytes:
    """Decode ``body``, not empty, from ``coding``, one of CODINGS. Never holds more than ``limit`` bytes and a piece.

    Raises PayloadTooLargeError, InvalidRequestError if the body is incomplete or not in this coding.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in _PIECES[coding](body):
            size += len(piece)
            if size > limit:
                raise PayloadTooLargeError(
                    f"The body decodes to more than {limit} bytes: send fewer or shorter inputs."
                )
            pieces.append(piece)
    except (zlib.error, zstd.ZstdError, EOFError) as error:
        raise InvalidRequestError(
            f"The body is not {coding} as its Content-Encoding says ({error}): "
            "compress it again, or leave the header out."
        ) from error
    return b"".join(pieces)


def _gzip_pieces(body: bytes) -> Iterator[bytes]:
    slices, given = _slices(body), b""
    for _ in range(_MOST_PARTS):
        decoder = zlib.decompressobj(_GZIP)
        while not decoder.eof:
            given = given or next(slices, b"")
            if not given:
                raise EOFError("it ends early")
            yield decoder.decompress(given, _PIECE)
            given = decoder.unconsumed_tail
        given = decoder.unused_data or next(slices, b"")
        if not given:
            return
    raise EOFError(f"it has more than {_MOST_PARTS} members")


def _zstd_pieces(body: bytes) -> Iterator[bytes]:
    slices, given = _slices(body), b""
    for _ in range(_MOST_PARTS):
        decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})
        while not decoder.eof:
            if decoder.needs_input:
                given = given or next(slices, b"")
                if not given:
                    raise EOFError("it ends early")
            yield decoder.decompress(given, _PIECE)
            given = b""  # the decoder keeps what it has not used
        given = decoder.unused_data or next(slices, b"")
        if not given:
            return
    raise EOFError(f"it has more than {_MOST_PARTS} frames")


def coded(pieces: Iterable[bytes], coding: str) -> Iterator[bytes]:
    """Encode ``pieces`` in ``coding``, one of CODINGS; yields output as soon as the encoder has some. The level is the
    fastest: on any level, numbers shrink to a little less than half."""
    coder = _coder(coding)
    for piece in pieces:
        if out := coder.compress(piece):
            yield out
    yield coder.flush()


class _Coder(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


def _coder(coding: str) -> _Coder:
    return zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP) if coding == "gzip" else zstd.ZstdCompressor(_ZSTD_LEVEL)


def _slices(body: bytes) -> Iterator[bytes]:
    # A decoder copies the input that it has not used yet. Of a slice that is little; of a whole body the copies would
    # take time that grows with the square of its size.
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]


_PIECES = {"gzip": _gzip_pieces, "zstd": _zstd_pieces}
