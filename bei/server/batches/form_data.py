"""Reads a form with a file (multipart/form-data, RFC 7578) while it arrives: the file is never in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, TypeAlias

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from bei.errors import EncodingNotSupportedError, InvalidRequestError, PayloadTooLargeError
from bei.server.scope import SCOPE_BODY

if TYPE_CHECKING:
    from bei.server.http.memory_budgets import Body

MULTIPART = "multipart/form-data"

# Of the fields beside the file, with the headers of all parts; and of all that stands around the file.
_MOST_FIELD_BYTES = 10_000
_MOST_AROUND_BYTES = 100_000
_MOST_NAME_CHARS = 512

Write: TypeAlias = Callable[[bytes], Awaitable[object]]


class FormData:
    """A form whose field ``file`` is given to ``write`` as it arrives, ``most_bytes`` of it. Read it once.

    ``known``: the names of the other fields that it may have, each once. A part of another name is refused as it
    begins: so what is kept of a form, and the work for it, do not grow with the number of its parts.
    """

    def __init__(self, request: Request, known: Collection[str], most_bytes: int, write: Write) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # of the file, once it has come
        self.num_bytes = 0
        self._request = request
        self._known = known
        self._most_bytes = most_bytes
        self._write = write
        self._headers: dict[str, bytes] = {}
        self._header, self._value = b"", b""
        self._name = ""
        self._is_file = False
        self._text = bytearray()
        self._num_field_bytes = 0
        self._content = bytearray()
        self._is_whole = False

    async def read(self) -> None:
        """Read it to its end.

        Raises InvalidRequestError, EncodingNotSupportedError, PayloadTooLargeError, ClientDisconnect, what its body was
        given up with (RequestTimeoutError, OverloadedError), and what ``write`` raises.
        """
        parser = self._parser()
        body: Body | None = self._request.scope.get(SCOPE_BODY)
        received, is_last = 0, False
        while not is_last:
            message = await self._request.receive()
            if body is not None and body.error is not None:
                raise body.error
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk: bytes = message.get("body", b"")
            is_last = not message.get("more_body", False)
            received += len(chunk)
            self._check_size(received - _MOST_AROUND_BYTES)
            try:
                parser.write(chunk)
            except FormParserError as error:
                raise _malformed(str(error)) from error
            if self._content:
                content, self._content = bytes(self._content), bytearray()
                await self._write(content)
            if body is not None:
                body.grow(-len(chunk))  # it is written, and not kept
        if not self._is_whole:
            raise _malformed("it ends too early")

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._most_bytes:
            raise PayloadTooLargeError(
                f"The file has more than {self._most_bytes} bytes (batch_file_limit): upload it in parts."
            )

    def _parser(self) -> MultipartParser:
        headers = self._request.headers
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise EncodingNotSupportedError("Files are uploaded without a Content-Encoding: leave it out.")
        kind, options = parse_options_header(headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if kind != MULTIPART.encode() or not boundary:
            raise InvalidRequestError(f"The body must be {MULTIPART}, with the fields purpose and file.")
        length = headers.get("content-length", "")
        if length.isdecimal():
            self._check_size(int(length) - _MOST_AROUND_BYTES)
        try:
            return MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_to_header,
                    "on_header_value": self._add_to_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_content,
                    "on_part_data": self._add_content,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _malformed(str(error)) from error

    # Called by the parser.

    def _begin_part(self) -> None:
        self._headers, self._text = {}, bytearray()

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.decode("latin-1").lower()] = self._value
        self._header, self._value = b"", b""

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise InvalidRequestError("The form has two files: upload one at a time.", "file")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:_MOST_NAME_CHARS]
        elif self._name not in self._known:
            name = self._name[:50]
            raise InvalidRequestError(f"The form has an unknown field {name!r}: leave it out.", name)
        elif self._name in self.fields:
            raise InvalidRequestError(f"The form has the field {self._name} twice: send it once.", self._name)

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.num_bytes += end - start
            self._check_size(self.num_bytes)
            self._content += data[start:end]
        else:
            self._count(end - start)
            self._text += data[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_whole = True

    def _count(self, num_bytes: int) -> None:
        """Note bytes of headers and fields, which are in memory."""
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > _MOST_FIELD_BYTES:
            raise InvalidRequestError("The fields beside the file are too long: send purpose and expires_after.")


def _malformed(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body cannot be read as {MULTIPART}: {reason}.")
