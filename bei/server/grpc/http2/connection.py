"""A connection of HTTP/2, with limits on the time and memory that a client may take.

Only what gRPC needs is spoken: no push, no priorities, no CONNECT. What a client may make the server hold is bounded by
the streams that run (one that is reset counts until its work has ended), by the memory for bodies that all connections
share, and by the bytes that wait for it: who does not take those is not read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from bei.errors import BeiError, DeadlineExceededError, TooManyConnectionsError
from bei.server.grpc.http2 import frames
from bei.server.grpc.http2.frames import HEAD_BYTES, LARGEST_WINDOW, Http2Error, frame
from bei.server.grpc.http2.header_blocks import ACCEPTED_ENCODINGS, ANSWER, CallHead, HeaderReader, status_only
from bei.server.grpc.http2.stream import STREAM_WINDOW, Stream
from bei.server.http.connections import Connections

MOST_STREAMS: Final = 1_000  # at once, of a connection
_CONNECTION_WINDOW = 1 << 24
_FIRST_WINDOW = 65_535
_LARGEST_FRAME = 16_384  # that we take
_LARGEST_OURS = 1 << 16  # that we send, where the client takes such
_MOST_UNSENT = 1 << 20
_LINGER_S = 2.0
_NOT_HTTP_2 = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"This port speaks gRPC: --port is that of HTTP.\n"
)


class CallRunner(Protocol):
    """What answers calls (``bei.server.grpc.server``)."""

    def accept(self, stream: Stream) -> None:
        """The head of a call has arrived."""

    def begin(self, stream: Stream) -> None:
        """A call that is to have all messages has them."""

    def fail(self, stream: Stream, error: BeiError) -> None:
        """End a call of which the messages cannot be read."""

    def lost(self, connection: Http2Connection) -> None:
        """A connection is closed."""


class Http2Connection(asyncio.Protocol):
    """One connection. ``calls`` answers its calls."""

    def __init__(self, connections: Connections, calls: CallRunner, loop: asyncio.AbstractEventLoop) -> None:
        self.connections = connections
        self._calls = calls
        self._loop = loop
        self._limits = connections.config
        self.number = next(connections.numbers)
        self.deadline_s = math.inf
        self.streams: dict[int, Stream] = {}
        self._num_running = 0  # streams whose work has not ended, reset ones among them
        self._last_stream = 0
        self._reader = HeaderReader(self._limits.max_header_bytes)
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags: of HEADERS that go on
        self._unread = b""
        self._has_preface = False
        self._goes_away = False
        self._is_over = False
        self._taken = 0  # bytes for which the connection's window is not opened yet
        self._window = _FIRST_WINDOW
        self._first_window = _FIRST_WINDOW
        self._frame_size = _LARGEST_FRAME
        self._blocked: dict[Stream, None] = {}  # by the connection's window, or by the transport
        self._is_paused = False
        self._unsent_bytes: float = math.inf
        self._transport: asyncio.Transport
        self._handlers: Mapping[int, Callable[[int, int, bytes], None]] = {
            frames.DATA: self._data,
            frames.HEADERS: self._headers,
            frames.RST_STREAM: self._reset,
            frames.SETTINGS: self._settings,
            frames.PUSH_PROMISE: self._push,
            frames.PING: self._ping,
            frames.WINDOW_UPDATE: self._window_update,
            frames.CONTINUATION: self._continuation,
        }

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The connection is open."""
        self._transport = transport
        self.deadline_s = self._loop.time() + self.connections.header_timeout_s
        opened = frames.settings(
            max_concurrent_streams=MOST_STREAMS,
            initial_window_size=STREAM_WINDOW,
            max_header_list_size=self._limits.max_header_bytes,
        )
        transport.write(opened + frames.window_update(0, _CONNECTION_WINDOW - _FIRST_WINDOW))
        self.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: all calls are given up."""
        self._is_over = True
        for stream in [*self.streams.values()]:
            stream.body.is_lost = True
            self._close(stream, is_lost=True)
        self.connections.discard(self)
        self._calls.lost(self)

    def pause_writing(self) -> None:
        """The client does not take what is written: it is not read meanwhile."""
        self._is_paused = True
        self._transport.pause_reading()
        self._await_flush()

    def resume_writing(self) -> None:
        """The client has taken it."""
        self._is_paused = False
        self._unsent_bytes = math.inf
        self._transport.resume_reading()
        self._flush_blocked()
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are whole."""
        if self._is_over:
            return
        data = self._unread + data if self._unread else data
        at, end = 0, len(data)
        try:
            if not self._has_preface:
                at = self._preface(data)
            while end - at >= HEAD_BYTES and not self._is_over:
                size, kind, flags, stream = frames.head_at(data, at)
                if size > _LARGEST_FRAME:
                    raise Http2Error(frames.FRAME_SIZE_ERROR, f"a frame of more than {_LARGEST_FRAME} bytes")
                if end - at < HEAD_BYTES + size:
                    break
                at += HEAD_BYTES
                self._frame(kind, flags, stream, data[at : at + size])
                at += size
        except Http2Error as error:
            self._end(error.code, str(error))
            return
        self._unread = data[at:]

    def _preface(self, data: bytes) -> int:
        """The bytes of the preface, if it is there. Raises Http2Error."""
        preface = frames.PREFACE
        if not preface.startswith(data[: len(preface)]):
            self._transport.write(_NOT_HTTP_2)
            self._shut(lingers=True)
            return 0
        if len(data) < len(preface):
            return 0
        self._has_preface = True
        self._set_deadline()
        return len(preface)

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream != self._block[0]):
            raise Http2Error(frames.PROTOCOL_ERROR, "a header block is interrupted")
        handler = self._handlers.get(kind)
        if handler is not None:  # others are to be ignored
            handler(flags, stream, payload)

    # Frames.

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if number % 2 == 0:
            raise Http2Error(frames.PROTOCOL_ERROR, "a stream with an even number")
        block = frames.unpadded(flags, payload)
        if flags & frames.END_HEADERS:
            self._head(number, flags, block)
        else:
            self._block = number, flags, bytearray(block)

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(frames.PROTOCOL_ERROR, "a CONTINUATION of nothing")
        number, first, block = self._block
        block += payload
        if len(block) > self._limits.max_header_bytes or not payload:
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "the metadata are too large: send fewer")
        if flags & frames.END_HEADERS:
            self._block = None
            self._head(number, first, bytes(block))

    def _head(self, number: int, flags: int, block: bytes) -> None:
        head = self._reader.read(block)
        if number <= self._last_stream:
            self._trailers(number, flags)
        elif not self._goes_away:  # else the client sends it again elsewhere
            self._last_stream = number
            self._open(number, head, has_ended=bool(flags & frames.END_STREAM))

    def _trailers(self, number: int, flags: int) -> None:
        stream = self.streams.get(number)
        if stream is not None and flags & frames.END_STREAM:
            self._ended(stream)
        elif stream is not None:
            self._give_up(stream, frames.PROTOCOL_ERROR)

    def _open(self, number: int, head: CallHead, *, has_ended: bool) -> None:
        if head.is_malformed:
            self._transport.write(frames.reset(number, frames.PROTOCOL_ERROR))
            return
        if head.refused:
            flags = frames.END_HEADERS | frames.END_STREAM
            refused = frame(frames.HEADERS, flags, number, status_only(head.refused))
            self._transport.write(refused + (b"" if has_ended else frames.reset(number, frames.NO_ERROR)))
            return
        if self._num_running >= MOST_STREAMS:
            self._transport.write(frames.reset(number, frames.REFUSED_STREAM))
            return
        stream = Stream(self, number, head, self.connections.bodies, self._limits.payload_limit, self._first_window)
        if not self.streams:
            self.connections.set_busy(self)
        self.streams[number] = stream
        self._num_running += 1
        self._calls.accept(stream)
        if has_ended:
            self._ended(stream)
        else:
            self._set_deadline()

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        self._taken += len(payload)
        if self._taken > _CONNECTION_WINDOW:
            raise Http2Error(frames.FLOW_CONTROL_ERROR, "more data than the window")
        if self._taken >= _CONNECTION_WINDOW // 2:
            self._transport.write(frames.window_update(0, self._taken))
            self._taken = 0
        stream = self.streams.get(number)
        if stream is None or stream.has_ended:
            if number > self._last_stream and not self._goes_away:
                raise Http2Error(frames.PROTOCOL_ERROR, "data of no stream")
            return  # of one that is answered
        try:
            size = stream.receive(frames.unpadded(flags & ~0x20, payload), len(payload))
        except BeiError as error:
            self.fail(stream, error)
            return
        if flags & frames.END_STREAM:
            if not stream.is_closed:
                self._ended(stream)
        elif size:
            self.open_window(stream, size)

    def open_window(self, stream: Stream, size: int) -> None:
        """Let the client send ``size`` bytes more."""
        if not stream.has_ended and not stream.is_closed and not self._is_over:
            self._transport.write(frames.window_update(stream.number, size))

    def _ended(self, stream: Stream) -> None:
        stream.end()
        stream.body.complete = True
        stream.body.on_fail = None
        if stream.takes_all and stream.task is None and not stream.is_closed:
            self._calls.begin(stream)

    def _reset(self, flags: int, number: int, payload: bytes) -> None:
        frames.uint_in(payload)
        self._check_known(number)
        stream = self.streams.get(number)
        if stream is not None:
            stream.body.is_lost = True
            self._close(stream, is_lost=True)

    def _check_known(self, number: int) -> None:
        if number > self._last_stream and not self._goes_away:
            raise Http2Error(frames.PROTOCOL_ERROR, "a frame of a stream that has not begun")

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise Http2Error(frames.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            return
        for name, value in frames.settings_in(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > LARGEST_WINDOW:
                    raise Http2Error(frames.FLOW_CONTROL_ERROR, "a window beyond the largest")
                change, self._first_window = value - self._first_window, value
                for stream in self.streams.values():
                    stream.window += change
            elif name == frames.MAX_FRAME_SIZE:
                if not _LARGEST_FRAME <= value < 1 << 24:
                    raise Http2Error(frames.PROTOCOL_ERROR, "a size of frames that may not be")
                self._frame_size = min(value, _LARGEST_OURS)
        self._transport.write(frame(frames.SETTINGS, frames.ACK, 0))
        self._flush_blocked()

    def _push(self, flags: int, number: int, payload: bytes) -> None:
        raise Http2Error(frames.PROTOCOL_ERROR, "a client does not push")

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise Http2Error(frames.FRAME_SIZE_ERROR, "a PING has 8 bytes")
        if not flags & frames.ACK:
            self._transport.write(frame(frames.PING, frames.ACK, 0, payload))

    def _window_update(self, flags: int, number: int, payload: bytes) -> None:
        size = frames.uint_in(payload) & LARGEST_WINDOW
        if number == 0:
            self._window += size
            if size == 0 or self._window > LARGEST_WINDOW:
                raise Http2Error(frames.FLOW_CONTROL_ERROR, "a window that may not be")
            self._flush_blocked()
            return
        self._check_known(number)
        stream = self.streams.get(number)
        if stream is None:
            return
        stream.window += size
        if size == 0 or stream.window > LARGEST_WINDOW:
            self._give_up(stream, frames.FLOW_CONTROL_ERROR)
        else:
            self.flush(stream)

    # What is sent.

    def flush(self, stream: Stream) -> None:
        """Send what the client takes of a stream's answers."""
        if stream.is_closed or self._is_over:
            return
        parts: list[bytes | memoryview] = []
        if not stream.has_answered and (stream.unsent or stream.trailers is not None):
            stream.has_answered = True
            parts.append(self._header_frames(stream.number, ANSWER if stream.unsent else ANSWER + ACCEPTED_ENCODINGS))
        while stream.unsent and not self._is_paused:
            size = min(len(stream.unsent), self._frame_size, self._window, stream.window)
            if size <= 0:
                break
            parts += (frames.frame_head(size, frames.DATA, 0, stream.number), stream.unsent[:size])
            self._window -= size
            stream.sent(size)
        has_all = not stream.unsent
        # No RST_STREAM where the client has not sent all: some would make that an error of their own. What it still
        # sends is dropped, and its window is not opened any more.
        if has_all and stream.trailers is not None:
            parts.append(self._header_frames(stream.number, stream.trailers, ends=True))
        if parts:
            self._transport.write(b"".join(parts))
        if not has_all:
            self._blocked[stream] = None
            self._set_deadline()
        elif stream.trailers is not None:
            self._close(stream)
        else:
            self._blocked.pop(stream, None)

    def _header_frames(self, number: int, block: bytes, *, ends: bool = False) -> bytes:
        flags = frames.END_STREAM if ends else 0
        if len(block) <= _LARGEST_FRAME:
            return frame(frames.HEADERS, flags | frames.END_HEADERS, number, block)
        parts = [block[start : start + _LARGEST_FRAME] for start in range(0, len(block), _LARGEST_FRAME)]
        more = [frame(frames.CONTINUATION, 0, number, part) for part in parts[1:-1]]
        last = frame(frames.CONTINUATION, frames.END_HEADERS, number, parts[-1])
        return b"".join((frame(frames.HEADERS, flags, number, parts[0]), *more, last))

    def _flush_blocked(self) -> None:
        for stream in [*self._blocked]:
            if self._is_paused or self._window <= 0:
                return
            del self._blocked[stream]
            self.flush(stream)

    def fail(self, stream: Stream, error: BeiError) -> None:
        """End a call with an error that its messages have."""
        if stream.task is not None:
            stream.task.cancel()
        self._calls.fail(stream, error)

    def _give_up(self, stream: Stream, code: int) -> None:
        self._transport.write(frames.reset(stream.number, code))
        self._close(stream, is_lost=True)

    def _close(self, stream: Stream, *, is_lost: bool = False) -> None:
        if stream.is_closed:
            return
        stream.close(is_lost=is_lost)
        self._blocked.pop(stream, None)
        self.streams.pop(stream.number, None)
        if stream.task is None:
            self.work_ended()
        if not self.streams and not self._is_over:
            self.connections.set_idle(self)
            self._set_deadline()
            if self._goes_away:
                self._shut()

    def work_ended(self) -> None:
        """Nothing is done for a stream any more."""
        self._num_running -= 1

    # Called by other connections and the clock.

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not taken."""
        return self._transport.get_write_buffer_size()

    def go_away(self) -> None:
        """Take no more calls; who sends one sends it again, over another connection. Ends with the last answer."""
        if self._goes_away or self._is_over:
            return
        self._goes_away = True
        self._transport.write(frames.go_away(self._last_stream, frames.NO_ERROR))
        if not self.streams:
            self._shut()

    def refuse(self, error: BeiError) -> None:
        """Close, and say why."""
        assert isinstance(error, TooManyConnectionsError)
        self._end(frames.ENHANCE_YOUR_CALM, str(error))

    def drop(self) -> None:
        """Close at once."""
        self._is_over = True
        self._transport.abort()

    def expire(self, now_s: float) -> None:
        """Called when ``deadline_s`` has passed: end what takes too long, or wait on."""
        if self._is_over:
            self._transport.abort()
        elif not self._has_preface:
            self._end(frames.PROTOCOL_ERROR, "no preface of HTTP/2 has come")
        elif self._is_paused:
            self._expire_flush()
        elif not self.streams:
            self.go_away()
        else:
            for stream in [*self.streams.values()]:
                self._expire_stream(stream, now_s)
            self._set_deadline()

    def _expire_stream(self, stream: Stream, now_s: float) -> None:
        error = stream.overdue(now_s, self._limits.body_timeout)
        if error is None and now_s > stream.deadline_s:
            error = DeadlineExceededError("The deadline of the call has passed.")
        if error is not None:
            self.fail(stream, error)
        elif stream.is_stuck(now_s, self._limits.keep_alive_timeout):
            self._give_up(stream, frames.CANCEL)

    def _expire_flush(self) -> None:
        if self._transport.get_write_buffer_size() < self._unsent_bytes:
            self._await_flush()  # the client has taken a part since
        else:
            self.drop()

    def _await_flush(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self.deadline_s = self._loop.time() + self._limits.keep_alive_timeout

    def _set_deadline(self) -> None:
        """Look again when something may be overdue."""
        if self._is_paused or not self._has_preface:
            return
        now_s = self._loop.time()
        if not self.streams:
            self.deadline_s = now_s + self._limits.keep_alive_timeout
        elif self.deadline_s > now_s + self._limits.body_timeout or self.deadline_s < now_s:
            self.deadline_s = now_s + min(self._limits.body_timeout, self._limits.keep_alive_timeout)

    def _end(self, code: int, reason: str) -> None:
        """Close, with the reason."""
        if not self._is_over:
            self._transport.write(frames.go_away(self._last_stream, code, reason))
            self._shut(lingers=True)
            for stream in [*self.streams.values()]:
                self._close(stream, is_lost=True)

    def _shut(self, *, lingers: bool = False) -> None:
        """Close once the client has taken what is written. ``lingers``: it may still send, and would not see the reason
        if the connection were closed at once."""
        self._is_over = True
        self.deadline_s = self._loop.time() + _LINGER_S
        if lingers and self._transport.can_write_eof():  # within TLS there is no half of a connection
            self._transport.write_eof()
            self.connections.set_lingering(self)
        else:
            self._transport.close()
