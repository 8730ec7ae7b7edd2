"""Messages of gRPC within the data of a stream: a byte that says whether it is compressed, four of its length."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final

from bei.errors import BeiError, EncodingNotSupportedError, MalformedRequestError, PayloadTooLargeError

PREFIX_BYTES: Final = 5
_PREFIX = struct.Struct("!BI")
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}


def with_prefix(message: bytes) -> bytes:
    """A message as it is sent."""
    return _PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Puts the messages of a stream together. ``on_grow`` gets how many bytes more are held, or fewer.

    ``most_bytes``: of a message, also after decompression.
    """

    def __init__(self, encoding: bytes, most_bytes: int, on_grow: Callable[[int], None]) -> None:
        self._encoding = encoding
        self._most_bytes = most_bytes
        self._on_grow = on_grow
        self._buffer = bytearray()

    @property
    def is_within(self) -> bool:
        """True if a message has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete now. Raises BeiError."""
        if not self._buffer and len(data) >= PREFIX_BYTES:  # most often all of one
            flag, size = _PREFIX.unpack_from(data)
            if flag == 0 and len(data) == PREFIX_BYTES + size <= self._most_bytes:
                return [data[PREFIX_BYTES:]]
        buffer = self._buffer
        buffer += data
        found, at = [], 0
        while len(buffer) - at >= PREFIX_BYTES:
            flag, size = _PREFIX.unpack_from(buffer, at)
            if size > self._most_bytes:
                raise self._too_large()
            end = at + PREFIX_BYTES + size
            if len(buffer) < end:
                break
            found.append(self._decoded(flag, bytes(buffer[at + PREFIX_BYTES : end])))
            at = end
        del buffer[:at]
        return found

    def _decoded(self, flag: int, content: bytes) -> bytes:
        if flag == 0:
            return content
        if flag != 1:
            raise MalformedRequestError("A message begins with a byte that is neither 0 nor 1.")
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise EncodingNotSupportedError("Messages may be compressed with gzip or deflate: send them so, or whole.")
        decompressor = zlib.decompressobj(bits)
        try:
            found = decompressor.decompress(content, self._most_bytes + 1)
        except zlib.error as error:
            raise MalformedRequestError(f"A message is not valid {self._encoding.decode()}.") from error
        if len(found) > self._most_bytes:
            raise self._too_large()
        if not decompressor.eof:
            raise MalformedRequestError(f"A message is not all of its {self._encoding.decode()}.")
        self._on_grow(len(found) - len(content))
        return found

    def _too_large(self) -> BeiError:
        return PayloadTooLargeError(f"A message has more than {self._most_bytes} bytes: send fewer texts at once.")
