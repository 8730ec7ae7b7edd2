"""The head of a request: what RFC 9112 asks of its headers and httptools does not check, headers of several lines, and
the wish to upgrade.

The checks are one Host (section 3.2), and no transfer coding but chunked (section 6.1): a proxy that reads either in
another way would see another request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache

from bei.errors import BeiError, InvalidRequestError

# uri-host [":" port], RFC 3986, section 3.2.2; empty where the target has no authority.
_HOST = re.compile(rb"(\[[\w\-.~!$&'()*+,;=:]+\]|[\w\-.~!$&'()*+,;=%]*)(:\d*)?", re.ASCII)

# Several lines of these are one list (RFC 9110, section 5.3), and of those there can be one value.
_LISTS = frozenset((b"accept", b"accept-encoding", b"content-encoding"))
_SINGLE = frozenset(
    (
        *(b"content-type", b"inference-header-content-length"),
        *(b"x-bei-dialect", b"x-bei-lane", b"x-bei-model", b"x-bei-report"),
    )
)

_MALFORMED = "The request is not HTTP/1.1: send what RFC 9112 describes, with TLS only where the server has it."


def checked_headers(version: str, headers: Seq[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """The last value of each header. ``headers``: names in lower case, and values. ``version``: "1.0" or "1.1".

    Raises InvalidRequestError where the request must be answered with 400.
    """
    named = dict(headers)
    is_repeated = len(named) < len(headers)
    host = named.get(b"host")
    if host is None:
        if version != "1.0":
            raise InvalidRequestError("The request has no Host header, as HTTP/1.1 needs one: send it.")
    elif not _is_host(host) or (is_repeated and _count(headers, b"host") > 1):
        raise InvalidRequestError("The request must have one Host header, of a host and perhaps a port: send it so.")
    coding = named.get(b"transfer-encoding")
    if coding is not None and (
        coding.strip().lower() != b"chunked"
        or version == "1.0"
        or (is_repeated and _count(headers, b"transfer-encoding") > 1)
    ):
        raise InvalidRequestError(
            "The header Transfer-Encoding must be chunked, once, and the request of HTTP/1.1: send a compressed body "
            "with Content-Encoding."
        )
    return named


def joined(headers: Seq[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """``headers``, some of which are repeated, with one line of each that is read. Raises InvalidRequestError for lines
    that contradict each other."""
    given: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in _LISTS or name in _SINGLE:
            given.setdefault(name, []).append(value.strip())
    for name, values in given.items():
        if name in _SINGLE and len({*values}) > 1:
            header = name.decode()
            raise InvalidRequestError(f"The header {header} has several values: send one.", header)
    found = [header for header in headers if header[0] not in given]
    for name, values in given.items():
        found.append((name, b", ".join(filter(None, values)) if name in _LISTS else values[0]))
    return found


@lru_cache(maxsize=16)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value.strip()) is not None


def _count(headers: Seq[tuple[bytes, bytes]], name: bytes) -> int:
    return sum(found == name for found, _ in headers)


def reason_of(error: Exception) -> BeiError:
    """Why the parser stopped with ``error``: what a callback has raised, else that it is no request."""
    reason = error.__context__
    return reason if isinstance(reason, BeiError) else InvalidRequestError(_MALFORMED)


def without_upgrade(method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A whole head that asks for the same, but for no other protocol."""
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() != b"upgrade")
        if name != b"upgrade":
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", b""])
