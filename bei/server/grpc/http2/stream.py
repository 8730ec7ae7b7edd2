"""One call: the messages that arrive, and the answers that go out as fast as the client takes them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from bei.errors import BeiError, MalformedRequestError, RequestTimeoutError
from bei.server.grpc.http2.frames import FLOW_CONTROL_ERROR, Http2Error
from bei.server.grpc.http2.header_blocks import CallHead, trailers
from bei.server.grpc.http2.messages import MessageReader, with_prefix
from bei.server.http.memory_budgets import Body, BodyMemory

STREAM_WINDOW: Final = 1 << 20  # bytes that a client may send of a stream before they are looked at
# Complete messages of a stream that wait for their turn; then the client's window is not opened any more.
_MOST_WAITING = 64
_MOST_UNSENT = 65_536  # bytes of answers after which a stream's next answer waits
_MIN_BYTES_PER_S = 10_000  # as of bodies over HTTP/1.1


class StreamOwner(Protocol):
    """The connection of a stream."""

    number: int

    def flush(self, stream: Stream) -> None:
        """Send what the client takes."""

    def open_window(self, stream: Stream, size: int) -> None:
        """Let the client send ``size`` bytes more."""

    def fail(self, stream: Stream, error: BeiError) -> None:
        """End a call with an error that its messages have."""

    def work_ended(self) -> None:
        """Nothing is done for a stream any more."""


class Stream:
    """A stream of a connection. ``takes_all``: the call begins when all of its messages are there."""

    def __init__(
        self, connection: StreamOwner, number: int, head: CallHead, bodies: BodyMemory, most_bytes: int, window: int
    ) -> None:
        self.connection = connection
        self.number = number
        self.head = head
        self.begun_s = time.monotonic()
        self.deadline_s = math.inf if head.timeout_s is None else self.begun_s + head.timeout_s
        self.takes_all = True
        self.body = Body(bodies)
        self.body.on_fail = self._body_failed
        self.task: asyncio.Task[None] | None = None
        self.window = window  # what the client takes
        self.has_ended = False  # the client has sent all
        self.is_closed = False  # nothing more is sent
        self._reader = MessageReader(head.encoding, most_bytes, self.body.grow)
        self._messages: deque[bytes] = deque()
        self._moved_s = self.begun_s  # the client has taken something
        self._withheld = 0  # bytes for which the client's window is not opened yet
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self.unsent = memoryview(b"")
        self.trailers: bytes | None = None
        self.has_answered = False  # the head is sent

    # The client's side.

    def receive(self, data: bytes, size: int) -> int:
        """Take a part of the data, which took ``size`` of the window. Returns the bytes for which the window may be
        opened. Raises BeiError, Http2Error."""
        self._withheld += size
        if self._withheld > STREAM_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "more data than the window of a stream")
        self.body.add(len(data))
        if self.is_closed:
            return 0
        self._messages += self._reader.feed(data)
        if self.takes_all and len(self._messages) > 1:
            raise MalformedRequestError("The method takes one message: send no more.")
        self._wake()
        return self._to_open()

    def _to_open(self) -> int:
        if not self.takes_all and len(self._messages) >= _MOST_WAITING:
            return 0
        size, self._withheld = self._withheld, 0
        return size

    def end(self) -> None:
        """The client has sent all."""
        self.has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    @property
    def is_truncated(self) -> bool:
        """True if a message has begun and not ended."""
        return self._reader.is_within

    def only_message(self) -> bytes:
        """Of a call that ``takes_all``. Raises MalformedRequestError."""
        if not self._messages or self.is_truncated:
            raise MalformedRequestError("The method takes one message, and it did not come, or not all of it.")
        return self._messages.popleft()

    async def message(self) -> bytes | None:
        """The next message; None: there is no more. Raises MalformedRequestError."""
        while not self._messages and not self.has_ended:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if not self._messages:
            if self.is_truncated:
                raise MalformedRequestError("The last message is not all there.")
            return None
        found = self._messages.popleft()
        self.body.grow(-min(len(found), self.body.held))
        size = self._to_open()
        if size:
            self.connection.open_window(self, size)
        return found

    def _body_failed(self) -> None:
        assert self.body.error is not None
        self.connection.fail(self, self.body.error)

    def overdue(self, now_s: float, body_timeout_s: float) -> BeiError | None:
        """The error of a call whose messages take too long to arrive."""
        if self.has_ended or not (self.takes_all or self.is_truncated):
            return None
        due_s = self.begun_s + body_timeout_s + self.body.size / _MIN_BYTES_PER_S
        if now_s < due_s:
            return None
        return RequestTimeoutError(f"The message did not arrive within {body_timeout_s:g} s: send it faster.")

    # The server's side.

    def answer(self, message: bytes) -> None:
        """Send a message, now or when the client takes it."""
        if not self.unsent:
            self._moved_s = time.monotonic()
        self.unsent = memoryview(bytes(self.unsent) + with_prefix(message))
        self.connection.flush(self)

    async def answered(self) -> None:
        """Return when the client has taken most of what was to be sent."""
        while len(self.unsent) > _MOST_UNSENT and not self.is_closed:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def finish(
        self, code: int, text: str = "", metadata: Iterable[tuple[str, str]] = (), message: bytes | None = None
    ) -> None:
        """End the call, with a last ``message`` if given."""
        if self.is_closed or self.trailers is not None:
            return
        self.trailers = trailers(code, text, metadata)
        if message is not None:
            self._moved_s = time.monotonic()
            self.unsent = memoryview(bytes(self.unsent) + with_prefix(message))
        self.connection.flush(self)

    def is_stuck(self, now_s: float, timeout_s: float) -> bool:
        """True if the client has taken nothing for so long of what was to be sent."""
        return bool(self.unsent) and now_s > self._moved_s + timeout_s

    def sent(self, size: int) -> None:
        """Note that the client takes ``size`` bytes more."""
        self.window -= size
        self.unsent = self.unsent[size:]
        self._moved_s = time.monotonic()
        if self._room is not None and not self._room.done() and len(self.unsent) <= _MOST_UNSENT:
            self._room.set_result(None)

    def close(self, *, is_lost: bool = False) -> None:
        """Nothing more is sent. ``is_lost``: the client does not want it."""
        self.is_closed = True
        self.unsent = memoryview(b"")
        self._messages.clear()
        self.body.end()
        if is_lost and self.task is not None:
            self.task.cancel()
