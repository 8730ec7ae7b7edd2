"""HTTP/1.1 requests and responses of the load generator, which counts more than it reads."""

from __future__ import annotations

from collections.abc import Mapping

import httptools

_KEPT = 400  # kept bytes of a body that is only counted
_MOST_HEAD_BYTES = 1_000_000  # interim responses included
_NO_BODY = frozenset((204, 304))


def head_of(method: str, path: str, host: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request, without content length."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1")


def request_of(head: bytes, body: bytes) -> bytes:
    """A whole request; without a body if ``body`` is empty."""
    if not body:
        return head + b"\r\n\r\n"
    return b"%b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body), body)


class NotHttpError(Exception):
    """Received data is not HTTP/1.1."""


class HttpResponse:
    """Responses of one connection in sequence: ``begin``, then ``feed`` until a response is complete.

    ``keeps_body`` False: bodies are counted, and only their first bytes kept.
    """

    def __init__(self, *, keeps_body: bool) -> None:
        self._keeps_body = keeps_body
        self._parser = httptools.HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Reset for the next response."""
        self.status = 0
        self.has_begun = False  # a byte of it was received
        self.ends_with_connection = False  # the body ends when the server closes
        self.keeps_connection = False
        self.num_body_bytes = 0
        self.num_kept_bytes = 0
        self._num_head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._is_whole = False

    def feed(self, data: bytes) -> bool:
        """Parse data; True if the response is complete. Raises NotHttpError."""
        self.has_begun = True
        if not self.status:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise NotHttpError(str(error)) from error
        if not self.status and self._num_head_bytes > _MOST_HEAD_BYTES:
            raise NotHttpError(f"headers of more than {_MOST_HEAD_BYTES:,} bytes")
        return self._is_whole

    @property
    def body(self) -> bytes:
        """The kept part of the body."""
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, by lower-case name; None: missing."""
        return next((value for key, value in self._headers if key.lower() == name), None)

    # Callbacks of the parser. Interim responses (1xx) have no body.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called after the last header."""
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        self.status = status
        has_end = status in _NO_BODY or self.header(b"content-length") or self.header(b"transfer-encoding")
        self.ends_with_connection = not has_end

    def on_body(self, data: bytes) -> None:
        """Called for each part of the body."""
        self.num_body_bytes += len(data)
        if self._keeps_body or self.num_body_bytes - len(data) < _KEPT:
            self._body.append(data)
            self.num_kept_bytes += len(data)

    def on_message_complete(self) -> None:
        """Called at the end of the response."""
        if self.status:
            self._is_whole = True
            self.keeps_connection = self._parser.should_keep_alive()
