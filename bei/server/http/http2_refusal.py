"""What a client hears that speaks HTTP/2 in clear text, so that it can name the cause: RFC 9113."""

from __future__ import annotations

from typing import Final

NOT_SUPPORTED: Final = 505  # in the log and the metrics
HTTP_2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"

_SETTINGS, _GOAWAY = 0x4, 0x7
_HTTP_1_1_REQUIRED = 0xD
_REASON = b"This port speaks HTTP/1.1: have the client use that version."


def _frame(kind: int, payload: bytes = b"") -> bytes:
    """Of the connection as a whole, without flags (section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload


# The first frame of a server is SETTINGS (section 3.4); of no stream anything was done (section 6.8).
HTTP_1_1_REQUIRED: Final = _frame(_SETTINGS) + _frame(
    _GOAWAY, bytes(4) + _HTTP_1_1_REQUIRED.to_bytes(4, "big") + _REASON
)
