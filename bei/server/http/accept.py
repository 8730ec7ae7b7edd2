"""In which form an answer goes out: what a client accepts, best first, of what there is.

application/json          every answer
application/msgpack       the same fields and values in MessagePack (application/x-msgpack and vnd.msgpack mean it too)
application/octet-stream  vectors alone, little-endian, one after the other; two headers say what they are

Reference: RFC 9110, sections 12.5.1 and 12.5.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from bei.errors import InvalidRequestError
from bei.server.http.compression import CODINGS
from bei.server.http.errors import JSON

MSGPACK = "application/msgpack"
OCTETS = "application/octet-stream"

_MEDIA_TYPES = {
    JSON: JSON,
    MSGPACK: MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
    OCTETS: OCTETS,
}
REPORT_HEADER = "X-Bei-Report"
_REPORT = REPORT_HEADER.lower().encode()
REPORT_VALUES = {"1": True, "true": True, "0": False, "false": False}


class AnswerForm(NamedTuple):
    """``media_types`` and ``codings`` of the answer's bytes, best first; no coding is always accepted. ``has_report``:
    the answer says of each input what became of it."""

    media_types: tuple[str, ...] = (JSON,)
    has_report: bool = False
    codings: tuple[str, ...] = ()


def is_msgpack(content_type: str) -> bool:
    """True if a body of ``content_type`` is MessagePack."""
    return _MEDIA_TYPES.get(content_type.partition(";")[0].strip().lower()) == MSGPACK


def answer_form(headers: Iterable[tuple[bytes, bytes]]) -> AnswerForm:
    """What a request's headers ask for. Raises InvalidRequestError that names the header."""
    given = dict(headers)
    return _form(given.get(b"accept"), given.get(b"accept-encoding"), given.get(_REPORT))


@lru_cache(maxsize=256)
def _form(accept: bytes | None, accept_encoding: bytes | None, report: bytes | None) -> AnswerForm:
    return AnswerForm(
        (JSON,) if accept is None else accepted(accept),
        report is not None and _has_report(report),
        () if accept_encoding is None else accepted_codings(accept_encoding),
    )


def _has_report(value: bytes) -> bool:
    given = value.decode("latin-1").strip().lower()
    if given not in REPORT_VALUES:
        raise InvalidRequestError(f"The header x-bei-report must be true or false, not {given[:40]!r}.", "x-bei-report")
    return REPORT_VALUES[given]


def accepted(header: bytes) -> tuple[str, ...]:
    """The media types of an Accept header that there are, best first; of equal ones JSON, else the first.

    A header that names none of them is passed over, as clients send what they like for pages and pictures.
    """
    weights: dict[str, float] = {}
    anything = 0.0
    for name, weight in _weighted(header):
        if name in ("*/*", "application/*"):
            anything = max(anything, weight)
        elif name in _MEDIA_TYPES:
            media_type = _MEDIA_TYPES[name]
            weights[media_type] = max(weights.get(media_type, 0.0), weight)
    if anything:
        weights.setdefault(JSON, anything)
    found = sorted((name for name in weights if weights[name] > 0), key=lambda name: (-weights[name], name != JSON))
    return tuple(found) or (JSON,)


def accepted_codings(header: bytes) -> tuple[str, ...]:
    """The codings of an Accept-Encoding header that there are, best first; of equal ones zstd."""
    weights = {name: weight for name, weight in _weighted(header) if name in CODINGS and weight > 0}
    return tuple(sorted(weights, key=lambda name: (-weights[name], name != "zstd")))


def _weighted(header: bytes) -> Iterator[tuple[str, float]]:
    for part in header.decode("latin-1").split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        yield name, _weight(parameters)


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return min(1.0, max(0.0, float(parameter[2:])))
            except ValueError:
                return 0.0
    return 1.0
