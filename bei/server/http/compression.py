"""Bodies with a Content-Encoding, gzip (RFC 1952) or zstd (RFC 8878): decoded in bounded pieces, coded as they come."""

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
_GZIP = 16 + zlib.MAX_WBITS  # zlib's way to say: with gzip's header and checksum

# The window that every zstd decoder for HTTP must have and no encoder may exceed (RFC 9659): a frame's header alone
# makes the decoder allocate it.
_ZSTD_WINDOW_LOG = 23

_GZIP_LEVEL = 1
_ZSTD_LEVEL = 1

_PIECE = 65536
# Members of gzip or frames of zstd in one body: many compressors write one for every 64 kB or more, and each costs a
# decoder, even if it is empty.
_MOST_PARTS = 1000
# To decode this much takes less than a millisecond or so: what is larger, before or after, goes to the thread.
_INLINE = 262_144

# One thread: however many bodies wait, one decoder's window and one decoded body are held beside them.
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
    """``body`` without its ``coding``; what is small at once, what is large in a thread, so that the loop goes on.

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
    """``body``, not empty, without its ``coding``, one of CODINGS. Never holds more than ``limit`` bytes and a piece.

    Raises PayloadTooLargeError, InvalidRequestError where the body is not whole or not of this coding.
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
    """``pieces`` in ``coding``, one of CODINGS, as soon as the coder gives something away. The fastest level: numbers
    shrink to little less than half on any."""
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
    # Decoders copy what they leave of their input: of a slice that is little, of a whole body time that grows with its
    # square.
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]


_PIECES = {"gzip": _gzip_pieces, "zstd": _zstd_pieces}
