"""Calls of one gRPC channel as connections of the load driver, which count more of an answer than they read.

All calls share one connection of HTTP/2, as those of a channel do. Frames are RFC 9113's. All calls of a channel have
one head, whose fields go into the server's table with the first call (RFC 7541, 6.2.1), and are indices from then on,
as gRPC's libraries send them. Of the server's heads only ``grpc-status`` is looked for, which without a dynamic table
stands as it is.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping

from bei.cli.bench.sockets import ClientConnection, ConnectionHandler

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_MOST_IN_FRAME = 16_384
_WINDOW, _WIDE = 65_535, 2**31 - 1
_OK = b"\x0bgrpc-status\x010"  # the literals of the name and of the value
_FIRST_INDEX = 62  # of the dynamic table, the newest
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ANSWERED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
_FAILED = b"HTTP/1.1 500 grpc\r\ncontent-length: %d\r\n\r\n%b"


def head_of(path: str, metadata: Mapping[str, str]) -> bytes:
    """The fields of a call, as they go into the table, behind a byte of their number."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers"}
    fields |= {"content-type": "application/grpc", **metadata}
    literals = (b"\x40" + _literal(name.lower()) + _literal(value) for name, value in fields.items())
    return bytes((len(fields), *b"".join(literals)))


def call_of(head: bytes, message: bytes) -> bytes:
    """What a connection of a channel sends: lengths of the head and of the message, and both."""
    return struct.pack("!II", len(head), len(message)) + head + message


def _literal(text: str) -> bytes:
    content = text.encode()
    size, found = len(content), bytearray()
    if size < 127:
        return bytes((size,)) + content
    size -= 127
    while size >= 128:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes((127, *found, size)) + content


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


class Channel:
    """One connection of HTTP/2. ``connect`` makes what calls are sent over, one at a time."""

    def __init__(self, connect: Callable[[ConnectionHandler], ClientConnection]) -> None:
        self._calls: dict[int, _Caller] = {}
        self._next_stream = 1
        self._head: bytes | None = None  # that the server knows
        self._unread = b""
        self._window = _WINDOW  # what may be sent, of all streams together
        self._first_window = _WINDOW  # of each
        self._num_taken = 0
        self._waiting: deque[Callable[[], bool]] = deque()
        self._connection = connect(self)
        settings = struct.pack("!HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, _WIDE)
        widened = _frame(_WINDOW_UPDATE, 0, 0, struct.pack("!I", _WIDE - _WINDOW))
        self._connection.send(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + widened)

    def connect(self, handler: ConnectionHandler) -> ClientConnection:
        """What sends a call and hands ``handler`` its answer, as one over HTTP/1.1: status 200 with the message and its
        prefix of five bytes, or status 500 with the trailers."""
        return _Caller(self, handler)

    def begin(self, caller: _Caller, content: bytes) -> int:
        """The number of the stream."""
        stream = self._next_stream
        self._next_stream += 2
        self._calls[stream] = caller
        head_size, size = struct.unpack_from("!II", content)
        head = self._block(content[8 : 8 + head_size])
        message = b"\0" + struct.pack("!I", size) + content[8 + head_size :]
        self._connection.send(_frame(_HEADERS, _END_HEADERS, stream, head))
        if self._waiting or not self._send(stream, message):
            self._waiting.append(lambda: self._send(stream, message))
        return stream

    def _block(self, head: bytes) -> bytes:
        if self._head is None:
            self._head = head
            return head[1:]
        assert head == self._head, "the calls of a channel have one head"
        return bytes(0x80 | _FIRST_INDEX + index for index in reversed(range(head[0])))

    def _send(self, stream: int, message: bytes) -> bool:
        """False: the connection's window is too small as yet."""
        if len(message) > self._first_window:
            raise ValueError(f"a message of {len(message)} bytes is too large for this client")
        if len(message) > self._window:
            return False
        self._window -= len(message)
        starts = range(0, len(message), _MOST_IN_FRAME)
        parts = [message[start : start + _MOST_IN_FRAME] for start in starts]
        frames = [_frame(_DATA, 0, stream, part) for part in parts[:-1]]
        self._connection.send(b"".join((*frames, _frame(_DATA, _END_STREAM, stream, parts[-1]))))
        return True

    def give_up(self, stream: int) -> None:
        """Cancel a call."""
        if self._calls.pop(stream, None) is not None:
            self._connection.send(_frame(_RST_STREAM, 0, stream, struct.pack("!I", 8)))

    def received(self, data: bytes) -> None:
        """Whole frames are handled."""
        data = self._unread + data if self._unread else data
        at, end = 0, len(data)
        while end - at >= 9:
            size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if end - at < 9 + size:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFF_FFFF
            self._handle(data[at + 3], data[at + 4], stream, data[at + 9 : at + 9 + size])
            at += 9 + size
        self._unread = data[at:]

    def ended(self, reason: str) -> None:
        """The connection is closed, and with it all calls are."""
        calls, self._calls = self._calls, {}
        for caller in calls.values():
            caller.handler.ended(reason)

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        caller = self._calls.get(stream)
        if kind == _DATA:
            self._num_taken += len(payload)
            if self._num_taken > _WIDE // 4:
                self._connection.send(_frame(_WINDOW_UPDATE, 0, 0, struct.pack("!I", self._num_taken)))
                self._num_taken = 0
            if caller is not None:
                caller.parts.append(payload)
        elif kind == _HEADERS:
            if caller is not None and flags & _END_STREAM:
                del self._calls[stream]
                body = b"".join(caller.parts) if _OK in payload else payload
                caller.handler.received((_ANSWERED if _OK in payload else _FAILED) % (len(body), body))
        elif kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack("!HI", payload):
                if name == _INITIAL_WINDOW_SIZE:
                    self._first_window = value
            self._connection.send(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._connection.send(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and stream == 0:
            self._window += struct.unpack("!I", payload)[0]
            while self._waiting and self._waiting[0]():
                self._waiting.popleft()
        elif kind == _RST_STREAM and caller is not None:
            del self._calls[stream]
            caller.handler.received(_FAILED % (len(payload), payload))


class _Caller:
    """Sends the calls of a link of the driver, one after the other."""

    def __init__(self, channel: Channel, handler: ConnectionHandler) -> None:
        self.handler = handler
        self.parts: list[bytes] = []
        self._channel = channel
        self._stream = 0

    def send(self, content: bytes) -> None:
        """Begin a call (``call_of``)."""
        self.parts = []
        self._stream = self._channel.begin(self, content)

    def close(self) -> None:
        """Give the call up, if it is under way."""
        self._channel.give_up(self._stream)
