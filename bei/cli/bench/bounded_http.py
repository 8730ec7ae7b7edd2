"""Requests beside the load, with a bound of bytes and a deadline for the whole answer: the server may be anybody's."""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import Any

from bei.errors import BenchError

# Limits for descriptions of a server, which are parsed into objects, and for metrics, which are searched.
MOST_JSON_BYTES = 4_000_000
MOST_METRICS_BYTES = 32_000_000

# Limit for an answer of the load: a megabyte, and for each input what a vector of 20,000 numbers takes.
_MOST_BYTES = 256_000_000
_BASE_BYTES = 1_000_000
_INPUT_BYTES = 500_000


def most_answer_bytes(num_inputs: int) -> int:
    """The limit for the body of an answer to a request of ``num_inputs``."""
    return min(_MOST_BYTES, _BASE_BYTES + num_inputs * _INPUT_BYTES)


class AnswerTooLongError(BenchError):
    """A server answers more than is read."""


class BoundedResponse(http.client.HTTPResponse):
    """A response that is read until ``deadline_s`` on the monotonic clock, and to ``most_bytes``, headers included.

    Reading raises TimeoutError, AnswerTooLongError beside http.client's errors.
    """

    def __init__(self, sock: socket.socket, *arguments: Any, deadline_s: float, most_bytes: int, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedReader(sock, deadline_s, most_bytes))


class _BoundedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline_s: float, most_bytes: int) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._deadline_s = deadline_s
        self._most_bytes = self._left = most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the answer was not whole in time")
        self._sock.settimeout(remaining_s)
        count = self._raw.readinto(buffer)
        self._left -= count or 0
        if self._left < 0:
            raise AnswerTooLongError(f"it answers more than the {self._most_bytes:,} bytes that are read")
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
