"""Messages over a Unix stream socket: msgpack, with the bytes of arrays, and descriptors, behind it.

A thread reads with ``receive``, which blocks; an event loop with ``fill`` and ``next_frame``, which do not. ``send``
never blocks: what the peer does not take at once is sent by a writer thread, in order. Arrays are copied by nobody but
the kernel.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

# Bytes of the message, descriptors, bytes behind the message.
_PREFIX = struct.Struct("<IIQ")
_PREFIX_BYTES = _PREFIX.size
_READ_BYTES = 1 << 16
_MANY_BYTES = 1 << 12  # an array of so many that is in a message again is sent once: labels stand beside each text
_MOST_BUFFERS = 256  # of one call; Linux takes 1,024
MOST_DESCRIPTORS = 250  # of a frame; Linux takes 253
_DESCRIPTORS = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
_NO_BYTES = np.empty(0, np.uint8)

# Plain numbers: flags of Python's enumerations take a microsecond to be put together.
_AT_ONCE = int(socket.MSG_DONTWAIT)
_SENDING = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVING = int(socket.MSG_CMSG_CLOEXEC)

MessageT = TypeVar("MessageT")


class ChannelClosedError(Exception):
    """The channel has been closed, or the peer has ended. Never leaves this package."""


@dataclass(slots=True)
class Frame(Generic[MessageT]):
    """A received message. Its arrays are views of one memory. ``descriptors`` belong to the reader."""

    message: MessageT
    descriptors: Seq[int]
    num_bytes: int  # of arrays


class Channel(Generic[MessageT]):
    """One end of a connection, which receives the types ``messages``. ``send``, ``flush``, ``close``,
    ``has_arrived`` and ``has_ended`` are thread-safe; reading, and ``end``, are for one thread at a time."""

    def __init__(self, sock: socket.socket, messages: Any) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._plain)
        self._decoder = msgspec.msgpack.Decoder(messages, dec_hook=self._typed)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Unsent buffers, each with the descriptors that go with its first byte.
        self._backlog: deque[tuple[memoryview, Seq[int]]] = deque()
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._arrays: list[npt.NDArray[Any]] = []  # of the message that is being encoded
        self._places: dict[int, int] = {}  # of its large arrays, by what they are
        self._found: list[npt.NDArray[Any]] = []  # of the message that is being decoded
        self._input = bytearray()  # what has been read and not been used
        self._fds: deque[int] = deque()
        # Of the frame that is being read, once its message is there: its message, its descriptors, its arrays.
        self._header: tuple[bytearray, int] | None = None
        self._payload = _NO_BYTES
        self._num_read = 0
        self._num_used = 0

    def fileno(self) -> int:
        """To be watched by an event loop."""
        return self._sock.fileno()

    @property
    def is_behind(self) -> bool:
        """Whether the peer has not taken what was sent."""
        return bool(self._backlog)

    def send(self, message: object, descriptors: Seq[int] = ()) -> None:
        """Send, or queue; returns at once. Arrays of ``message`` must not be written to afterwards.

        Raises ChannelClosedError.
        """
        with self._lock:
            if self._is_closed:
                raise ChannelClosedError
            self._arrays, self._places = [], {}
            header = self._encoder.encode(message)
            arrays = self._arrays
            payload_size = sum([values.nbytes for values in arrays])
            head = _PREFIX.pack(len(header), len(descriptors), payload_size) + header
            is_first, num_sent = not self._backlog, 0
            if is_first:
                num_sent = self._send_some([head, *arrays[: _MOST_BUFFERS - 1]], descriptors)
                if num_sent == len(head) + payload_size:  # nearly always
                    return
            self._backlog.append((memoryview(head), descriptors))
            self._backlog.extend((values.data.cast("B"), ()) for values in arrays if values.nbytes)
            if is_first:
                self._advance(num_sent)
                self._push()
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="bei-writer", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until the socket has taken everything, the channel is closed, or the time is over."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or not self._backlog, timeout_s)

    def receive(self) -> Frame[MessageT] | None:
        """The next frame, waiting for it; None at the end of the stream. Raises msgspec.DecodeError."""
        while (frame := self.next_frame()) is None:
            if not self._read(0):
                return None
        return frame

    def fill(self) -> bool:
        """Read once without waiting; False at the end of the stream."""
        try:
            return self._read(_AT_ONCE)
        except BlockingIOError:
            return True

    def next_frame(self) -> Frame[MessageT] | None:
        """The next frame if it has been read. Raises msgspec.DecodeError."""
        if self._header is None and not self._has_header():
            return None
        if self._num_read < len(self._payload):
            return None
        assert self._header is not None
        (header, num_fds), self._header, self._num_used = self._header, None, 0
        descriptors = [self._fds.popleft() for _ in range(num_fds)]
        try:
            return Frame(self._decoder.decode(header), descriptors, len(self._payload))
        finally:
            self._found = []

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether ``receive`` has something to do by then."""
        return bool(self._input) or self._polled(timeout_s)

    def has_arrived(self) -> bool:
        """Whether there are unread bytes, or the peer has ended. Not after ``end``."""
        return self._polled(0.0)

    def has_ended(self) -> bool:
        """Whether the peer has ended, or ``close`` was called: what was sent before can still be read. Not after
        ``end``."""
        return self._polled(0.0, 0)  # poll tells the end of both directions always

    def close(self) -> None:
        """End both directions. The reader sees the end of the stream, and calls ``end``."""
        with self._lock:
            self._close()

    def end(self) -> None:
        """Free the socket. By the thread that reads, when it reads no more."""
        self.close()
        if self._writer is not None:
            self._writer.join()
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _polled(self, timeout_s: float | None, events: int = select.POLLIN) -> bool:
        poll = select.poll()
        poll.register(self._sock, events)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    # Sending, under the lock.

    def _send_some(self, buffers: Seq[Any], descriptors: Seq[int]) -> int:
        """How many bytes the socket takes now. Raises ChannelClosedError."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            return self._sock.sendmsg(buffers, rights, _SENDING)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._close()
            raise ChannelClosedError from error

    def _advance(self, num_sent: int) -> None:
        """The socket has taken so many bytes of the backlog."""
        while num_sent:
            buffer, _ = self._backlog.popleft()
            if num_sent < len(buffer):
                self._backlog.appendleft((buffer[num_sent:], ()))
            num_sent -= min(num_sent, len(buffer))

    def _push(self) -> None:
        """Send what the socket takes now of the backlog. Raises ChannelClosedError."""
        while self._backlog:
            buffers: list[memoryview] = []
            for buffer, descriptors in islice(self._backlog, _MOST_BUFFERS):
                if descriptors and buffers:
                    break
                buffers.append(buffer)
            num_sent = self._send_some(buffers, self._backlog[0][1])
            if not num_sent:
                return
            self._advance(num_sent)

    def _write_all(self) -> None:
        """The writer's thread: send the backlog as the peer takes it."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._is_closed or bool(self._backlog))
                if self._is_closed:
                    return
            poll.poll()  # also returns when the socket is shut down
            with self._lock, contextlib.suppress(ChannelClosedError):
                if not self._is_closed:
                    self._push()
                    self._changed.notify_all()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._backlog.clear()
            with contextlib.suppress(OSError):  # the other end is gone already
                self._sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    # Reading.

    def _has_header(self) -> bool:
        """Whether the message of the next frame is there. Then there is room for its arrays."""
        data = self._input
        if len(data) < _PREFIX_BYTES:
            return False
        header_size, num_fds, payload_size = _PREFIX.unpack_from(data)
        size = _PREFIX_BYTES + header_size
        if len(data) < size:
            return False
        self._header = data[_PREFIX_BYTES:size], num_fds
        self._payload, self._num_read = _NO_BYTES, 0
        if payload_size:
            self._payload, self._num_read = np.empty(payload_size, np.uint8), min(payload_size, len(data) - size)
            self._payload.data[: self._num_read] = data[size : size + self._num_read]
        del data[: size + self._num_read]
        return True

    def _read(self, flags: int) -> bool:
        """Read once; False at the end of the stream. Raises BlockingIOError with ``_AT_ONCE``."""
        try:
            if self._header is not None:
                rest = self._payload.data[self._num_read :]
                num_read, rights, _, _ = self._sock.recvmsg_into([rest], _DESCRIPTORS, _RECEIVING | flags)
                self._num_read += num_read
            else:
                data, rights, _, _ = self._sock.recvmsg(_READ_BYTES, _DESCRIPTORS, _RECEIVING | flags)
                num_read = len(data)
                self._input += data
        except BlockingIOError:
            raise
        except OSError:  # reset
            return False
        for _, _, data in rights:  # with the bytes that they were sent with, or before
            fds = array.array("i")
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            self._fds.extend(fds)
        return num_read > 0

    # What msgpack does not know.

    def _plain(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.nbytes >= _MANY_BYTES:
                place = self._places.setdefault(id(value), len(self._arrays))
                if place < len(self._arrays):
                    return place
            self._arrays.append(np.ascontiguousarray(value))
            return (value.dtype.str, *value.shape)
        if isinstance(value, Path):
            return str(value)
        raise NotImplementedError(f"{type(value)} is in no message")  # what msgspec asks of an enc_hook

    def _typed(self, kind: Any, value: Any) -> Any:
        if isinstance(value, str):
            return kind(value)
        if isinstance(value, int):
            return self._found[value]
        dtype, *shape = value
        values: npt.NDArray[Any] = np.ndarray(shape, dtype, self._payload.data, self._num_used)
        self._num_used += values.nbytes
        self._found.append(values)
        return values
