"""notBefore and notAfter of our own TLS certificate. (``ssl`` decodes only a peer's.)"""

from __future__ import annotations

from datetime import datetime, timezone

_SEQUENCE = 0x30
_VERSION = 0xA0
_UTC_TIME = 0x17
_GENERALIZED_TIME = 0x18


def validity(der: bytes) -> tuple[datetime, datetime] | None:
    """The two dates of a certificate in DER (RFC 5280, section 4.1); None: it cannot be read."""
    try:
        certificate = _content(der, _SEQUENCE)[0]
        fields = _content(certificate, _SEQUENCE)[0]  # of what is signed
        if fields[0] == _VERSION:
            fields = _content(fields, _VERSION)[1]
        for _ in ("serial number", "signature algorithm", "issuer"):
            fields = _content(fields)[1]
        dates = _content(fields, _SEQUENCE)[0]
        begins, rest = dates[0], _content(dates)
        ends = rest[1][0]
        return _date(begins, rest[0]), _date(ends, _content(rest[1])[0])
    except (IndexError, ValueError):
        return None


def _content(data: bytes, tag: int | None = None) -> tuple[bytes, bytes]:
    """Content of the first DER element of ``data``, and the bytes after the element. Raises ValueError, IndexError."""
    if tag is not None and data[0] != tag:
        raise ValueError(f"tag {data[0]} where {tag} was expected")
    length, start = data[1], 2
    if length >= 0x80:  # of so many bytes is the length
        start += length - 0x80
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("cut off")
    return data[start : start + length], data[start + length :]


def _date(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 50 is 1950
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError(f"tag {tag} is no date")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
