"""Frames of HTTP/2 (RFC 9113, sections 4, 6 and 7)."""

from __future__ import annotations

import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
LARGEST_WINDOW: Final = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_WITH_PRIORITY: Final = 0x20

MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 3, 4, 5, 6

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = 0x5, 0x6, 0x7, 0x8, 0x9
ENHANCE_YOUR_CALM: Final = 0xB

_HEAD = struct.Struct("!BHBBI")
_UINT = struct.Struct("!I")


class Http2Error(Exception):
    """The connection cannot go on: it ends with a GOAWAY of this ``code`` and reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame, of at most 16,384 bytes unless the peer takes more."""
    return frame_head(len(payload), kind, flags, stream) + payload


def frame_head(size: int, kind: int, flags: int, stream: int) -> bytes:
    """The head of a frame with a payload of ``size`` bytes."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream)


def head_at(data: bytes, at: int) -> tuple[int, int, int, int]:
    """Size of the payload, kind, flags and stream of the frame that begins there."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return high << 16 | low, kind, flags, stream & 0x7FFF_FFFF


def settings(**values: int) -> bytes:
    """A SETTINGS frame; names as above, in lower case."""
    numbers = {name: globals()[name.upper()] for name in values}
    return frame(SETTINGS, 0, 0, b"".join(struct.pack("!HI", numbers[name], value) for name, value in values.items()))


def settings_in(payload: bytes) -> list[tuple[int, int]]:
    """Numbers and values. Raises Http2Error."""
    if len(payload) % 6:
        raise Http2Error(FRAME_SIZE_ERROR, "SETTINGS that are no multiple of 6 bytes")
    return list(struct.iter_unpack("!HI", payload))


def window_update(stream: int, size: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, _UINT.pack(size))


def reset(stream: int, code: int) -> bytes:
    """An RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, _UINT.pack(code))


def go_away(last_stream: int, code: int, reason: str = "") -> bytes:
    """A GOAWAY frame."""
    return frame(GOAWAY, 0, 0, _UINT.pack(last_stream) + _UINT.pack(code) + reason.encode())


def uint_in(payload: bytes) -> int:
    """The one number of a WINDOW_UPDATE or RST_STREAM. Raises Http2Error."""
    if len(payload) != 4:
        raise Http2Error(FRAME_SIZE_ERROR, "a frame of 4 bytes has another size")
    number: int = _UINT.unpack(payload)[0]
    return number


def unpadded(flags: int, payload: bytes) -> bytes:
    """The content of a HEADERS or DATA frame, without padding and priority. Raises Http2Error."""
    end = len(payload)
    start = 0
    if flags & _PADDED:
        if not payload:
            raise Http2Error(FRAME_SIZE_ERROR, "a padded frame without its length")
        start, end = 1, end - payload[0]
    if flags & _WITH_PRIORITY:
        start += 5
    if start > end:
        raise Http2Error(PROTOCOL_ERROR, "a frame of padding alone")
    return payload if start == 0 and end == len(payload) else payload[start:end]
