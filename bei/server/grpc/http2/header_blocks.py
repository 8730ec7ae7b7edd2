"""Header blocks: those of calls read, by the library ``hpack``, and those of answers written as literals (RFC 7541).

A client sends the same fields with every call. Its encoder then writes indices of the dynamic table alone, and the
block is looked up: it means the same until another one changes the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from bei.server.grpc.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Http2Error

if TYPE_CHECKING:
    from hpack.struct import HeaderTuple

_MOST_REMEMBERED = 64
_INDEX_OF_MORE = 0xFF  # a longer number begins
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_NOT_IN_FIELDS = re.compile(rb"[\0\r\n]")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_OF_CONNECTIONS = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
_CONTENT_TYPE = b"application/grpc"
_SAFE_IN_MESSAGES = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(frozen=True)
class CallHead:
    """The fields of a call. ``headers``: without those whose names begin with a colon, and without binary values.

    ``is_malformed``: to be reset; ``refused``: the status of HTTP with which it is refused, or 0.
    """

    path: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    timeout_s: float | None = None
    encoding: bytes = b"identity"
    is_malformed: bool = False
    refused: int = 0


class HeaderReader:
    """The blocks of a connection, in their order. ``most_bytes``: of the fields of a block, as the RFC counts them."""

    def __init__(self, most_bytes: int) -> None:
        from hpack import Decoder

        self._decoder = Decoder(max_header_list_size=most_bytes)
        self._known: dict[bytes, CallHead] = {}

    def read(self, block: bytes) -> CallHead:
        """The head in a block. Raises Http2Error."""
        known = self._known.get(block)
        if known is not None:
            return known
        head = head_of(self._decoded(block))
        if not block or min(block) < 0x80 or _INDEX_OF_MORE in block:
            self._known.clear()  # the table may have changed
        elif len(self._known) < _MOST_REMEMBERED:
            self._known[block] = head
        return head

    def _decoded(self, block: bytes) -> list[HeaderTuple]:
        from hpack.exceptions import HPACKError, OversizedHeaderListError

        try:
            return list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise Http2Error(ENHANCE_YOUR_CALM, "the metadata are too large: send fewer") from error
        except (HPACKError, IndexError, ValueError) as error:
            raise Http2Error(COMPRESSION_ERROR, "a header block that cannot be read") from error


def head_of(fields: Iterable[tuple[bytes, bytes]]) -> CallHead:
    """The head that fields make (RFC 9113, section 8; github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md)."""
    pseudo: dict[bytes, bytes] = {}
    headers: list[tuple[bytes, bytes]] = []
    timeout_s, encoding, kind = None, b"identity", b""
    for name, value in fields:
        if name[:1] == b":":
            if headers or name in pseudo:
                return CallHead(is_malformed=True)
            pseudo[bytes(name)] = value
            continue
        if not _NAME.fullmatch(name) or _NOT_IN_FIELDS.search(value) or name in _OF_CONNECTIONS:
            return CallHead(is_malformed=True)
        if name == b"grpc-timeout":
            match = _TIMEOUT.fullmatch(value)
            if match is None:
                return CallHead(is_malformed=True)
            timeout_s = int(match[1]) * _UNITS_S[match[2]]
        elif name == b"grpc-encoding":
            encoding = bytes(value)
        elif name == b"content-type":
            kind = value
        if not name.endswith(b"-bin"):
            headers.append((bytes(name), bytes(value)))
    if pseudo.keys() - {b":authority"} != {b":method", b":scheme", b":path"}:
        return CallHead(is_malformed=True)
    refused = 405 if pseudo[b":method"] != b"POST" else 0 if kind.startswith(_CONTENT_TYPE) else 415
    path = pseudo[b":path"].decode("latin-1")
    return CallHead(path, tuple(headers), timeout_s, encoding, refused=refused)


def _number(value: int, prefix: int) -> bytes:
    """A number (RFC 7541, section 5.1) of which the first byte has ``prefix`` bits."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes((value,))
    found = bytearray((most,))
    value -= most
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def literal(name: bytes, value: bytes) -> bytes:
    """A field that no table remembers, uncompressed."""
    return b"\0" + _number(len(name), 7) + name + _number(len(value), 7) + value


# :status 200 is entry 8 of the static table.
ANSWER: Final = b"\x88" + literal(b"content-type", b"application/grpc")
ACCEPTED_ENCODINGS: Final = literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
_OK: Final = literal(b"grpc-status", b"0")


def status_only(status: int) -> bytes:
    """The head of an answer of HTTP that has no more."""
    return literal(b":status", b"%d" % status) + literal(b"content-type", b"text/plain")


def trailers(code: int, message: str, metadata: Iterable[tuple[str, str]]) -> bytes:
    """The end of a call. ``message`` is percent-encoded, values are to be ASCII."""
    found = _OK if code == 0 else literal(b"grpc-status", b"%d" % code)
    if message:
        found += literal(b"grpc-message", quote(message, safe=_SAFE_IN_MESSAGES).encode())
    for name, value in metadata:
        found += literal(name.encode(), value.encode("ascii", "replace"))
    return found
