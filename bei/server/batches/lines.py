"""The lines of a batch's input: ``{"custom_id": ..., "method": "POST", "url": "/v1/embeddings", "body": {...}}``.

They are read one at a time, whatever the size of the file, and a longer line than allowed is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta

from bei.server.endpoint.lenient_json import masked_halves
from bei.server.endpoint.parse import BYTE_ORDER_MARK

# Around the body of a line: names, quotes, ids, spaces.
_AROUND_BODY = 10_000


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a batch. ``custom_id`` is the client's name for it; ``url`` is the path of the route."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: Annotated[str, Meta(min_length=1, max_length=2_000)]
    body: msgspec.Raw


class LineProblem(NamedTuple):
    """Why a line is no request. ``code`` is stable."""

    code: str
    message: str


class RequestLine(NamedTuple):
    """``number`` counts from 1, empty lines too. ``end`` is the place in the file behind it. Where it has a ``problem``
    there is no request, and ``custom_id`` is None if it could not be read."""

    number: int
    end: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: LineProblem | None = None


def read_lines(file: BinaryIO, most_body_bytes: int, start: int = 0, num_before: int = 0) -> Iterator[RequestLine]:
    """The lines of ``file`` from ``start`` on, which has ``num_before`` lines before it. Empty ones are left out."""
    most = most_body_bytes + _AROUND_BODY
    file.seek(start)
    number, end = num_before, start
    while content := file.readline(most + 1):
        number += 1
        is_too_long = len(content) > most
        end += len(content)
        if is_too_long and not content.endswith(b"\n"):
            end += _skip_rest(file)
        if end == start + len(content) and start == 0:
            content = content.removeprefix(BYTE_ORDER_MARK)
        if is_too_long:
            message = f"The line has more than the {most_body_bytes} bytes of payload_limit: send fewer inputs in it."
            yield RequestLine(number, end, None, problem=LineProblem("line_too_large", message))
        elif content := content.strip():
            yield parsed(content, number, end)


def _skip_rest(file: BinaryIO) -> int:
    """Read up to the line's end. Returns the number of bytes."""
    skipped = 0
    while piece := file.readline(1 << 20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def parsed(content: bytes, number: int, end: int) -> RequestLine:
    """The line of ``content``."""
    try:
        found = _decoded(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The line is no request of a batch: {error}. {_FORM}"
        return RequestLine(number, end, _custom_id_of(content), problem=LineProblem("invalid_json_line", message))
    line = RequestLine(number, end, found.custom_id, found.url, bytes(found.body))
    if found.method != "POST":
        message = f"The method is {found.method[:20]!r}: the requests of a batch are POST."
        return line._replace(problem=LineProblem("invalid_method", message))
    if not found.url.startswith("/"):
        message = f"The url {found.url[:100]!r} is no path of this server: give one as /v1/embeddings."
        return line._replace(problem=LineProblem("invalid_url", message))
    if not line.body.startswith(b"{"):
        return line._replace(problem=LineProblem("invalid_json_line", f"The body is no object. {_FORM}"))
    return line


def _decoded(content: bytes) -> BatchLine:
    """Half of a surrogate pair in the body is for its route to refuse. Raises what the decoder does."""
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        masked = masked_halves(content)
        if masked == content:
            raise
    found = _decoder.decode(masked)
    body = bytes(found.body)
    start = masked.rfind(body)  # no string of the line has its quotes
    end = start + len(body)
    around = content[:start] + content[end:]
    if masked_halves(around) != around:
        raise msgspec.DecodeError("half of a surrogate pair, which is no character, stands outside of the body")
    return msgspec.structs.replace(found, body=msgspec.Raw(content[start:end]))


def _custom_id_of(content: bytes) -> str | None:
    """The id of a line that has another mistake."""
    try:
        custom_id = _any_decoder.decode(content).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return custom_id or None


class _Named(msgspec.Struct):
    custom_id: Annotated[str, Meta(max_length=512)] = ""


_FORM = 'Write {"custom_id": ..., "method": "POST", "url": "/v1/embeddings", "body": {...}} in one line.'

_decoder = msgspec.json.Decoder(BatchLine)
_any_decoder = msgspec.json.Decoder(_Named)
