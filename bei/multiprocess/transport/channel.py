"""Frames over a Unix stream socket: a message, raw bytes behind it, and now and then a descriptor.

A frame is a prefix (sizes), the message in msgpack, and the bytes. A thread reads with ``receive``, which blocks; an
event loop reads small frames with ``fill`` and ``buffered``, which do not. Sending never blocks: what the peer does not
take at once is sent by a thread of its own, in order.
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
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from bei.multiprocess.shared_memory.segment import Segment
from bei.multiprocess.transport.messages import Message

# Bytes of the message, whether a descriptor comes along, bytes behind the message.
_PREFIX = struct.Struct("<I?xxxQ")
# Of the buffer that is read into. Frames that do not fit in it are large.
_READ_BYTES = 1 << 16
_MOST_BUFFERS = 256  # of one call; Linux takes 1,024
_DESCRIPTORS = socket.CMSG_SPACE(8 * array.array("i").itemsize)
_NO_BYTES = np.empty(0, np.uint8)

# Plain numbers: flags of Python's enumerations take a microsecond to be put together.
_AT_ONCE = int(socket.MSG_DONTWAIT)
_SENDING = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVING = int(socket.MSG_CMSG_CLOEXEC)
_CUT_OFF = int(socket.MSG_CTRUNC)

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()


class ChannelClosedError(Exception):
    """The channel has been closed, or the other process has ended. Never leaves this package."""


@dataclass(slots=True)
class Frame(Generic[MessageT]):
    """What was received. ``payload`` uint8 [n], aligned for any type; ``fd`` belongs to the reader."""

    message: MessageT
    payload: npt.NDArray[np.uint8]
    fd: int | None


class _Outgoing:
    """What is still to be sent of a frame."""

    def __init__(self, buffers: list[memoryview], segment: Segment | None) -> None:
        self.buffers = buffers
        self.segment = segment  # its descriptor goes with the first byte

    def advance(self, num_sent: int) -> None:
        """So many bytes more have been sent."""
        done = 0
        while done < len(self.buffers) and num_sent >= len(self.buffers[done]):
            num_sent -= len(self.buffers[done])
            done += 1
        del self.buffers[:done]
        if num_sent:
            self.buffers[0] = self.buffers[0][num_sent:]


class Channel(Generic[MessageT]):
    """One end of a connection. ``send``, ``close`` and ``has_arrived`` in any thread; what reads, and ``end``, in one
    thread at a time."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._sock = sock
        self._decoder = decoder
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._backlog: deque[_Outgoing] = deque()
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._input = memoryview(bytearray(_READ_BYTES))
        self._start = self._end = 0  # what has been read and not been used
        self._fds: deque[int] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether the other process has not taken what was sent."""
        return bool(self._backlog)

    def send(self, message: Message, payload: Seq[npt.NDArray[Any]] = (), segment: Segment | None = None) -> None:
        """Send, or have it sent; returns at once. ``payload``: contiguous arrays, which must stay as they are.

        Raises ChannelClosedError.
        """
        header = _encoder.encode(message)
        arrays = [values for values in payload if values.nbytes]
        payload_size = sum([values.nbytes for values in arrays])
        head = _PREFIX.pack(len(header), segment is not None, payload_size) + header
        with self._lock:
            if self._is_closed:
                raise ChannelClosedError
            num_sent = 0
            if segment is None and not self._backlog:  # the way of nearly every frame: all of it is taken at once
                num_sent = self._send_some([head, *arrays[: _MOST_BUFFERS - 1]])
                if num_sent == len(head) + payload_size:
                    return
            outgoing = _Outgoing([memoryview(head), *(values.data.cast("B") for values in arrays)], segment)
            outgoing.advance(num_sent)
            if self._backlog or not self._push(outgoing):
                self._backlog.append(outgoing)
                self._start_writer()
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until the socket has taken everything, or the channel is closed; so long at most."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or not self._backlog, timeout_s)

    def receive(self) -> Frame[MessageT] | None:
        """The next frame, waiting for it; None when there are no more. Raises msgspec.DecodeError for anything else."""
        while (frame := self.buffered()) is None:
            if self.is_next_large():
                return self._receive_large()
            if not self._fill(0):
                return None
        return frame

    def fill(self) -> bool:
        """Read what has come, as far as the buffer holds it, without waiting; False at the end of the stream.

        Not while ``is_next_large``: the buffer may be full.
        """
        try:
            return self._fill(_AT_ONCE) > 0
        except BlockingIOError:
            return True

    def buffered(self, max_header_size: int = _READ_BYTES) -> Frame[MessageT] | None:
        """The next frame if it has been read to its end and its message has at most ``max_header_size`` bytes.

        Raises msgspec.DecodeError for what is no message.
        """
        if self._end - self._start < _PREFIX.size:
            return None
        header_size, has_fd, payload_size = _PREFIX.unpack_from(self._input, self._start)
        header_start = self._start + _PREFIX.size
        payload_start = header_start + header_size
        end = payload_start + payload_size
        if end > self._end or header_size > max_header_size:
            return None
        self._start = end
        message = self._decoder.decode(self._input[header_start:payload_start])
        payload = np.frombuffer(bytes(self._input[payload_start:end]), np.uint8) if payload_size else _NO_BYTES
        return Frame(message, payload, self._fds.popleft() if has_fd else None)

    def is_next_large(self, max_header_size: int = _READ_BYTES) -> bool:
        """Whether ``buffered`` will never give the next frame, as far as is known: its message has more bytes, or all
        of it more than the buffer."""
        if self._end - self._start < _PREFIX.size:
            return False
        header_size, _, payload_size = _PREFIX.unpack_from(self._input, self._start)
        return bool(header_size > max_header_size or _PREFIX.size + header_size + payload_size > _READ_BYTES)

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether ``receive`` has something to do by then."""
        return self._start < self._end or self._polled(timeout_s)

    def has_arrived(self) -> bool:
        """Whether the other process has sent something, or has ended, and nobody has read that yet. Not after
        ``end``."""
        return self._polled(0.0)

    def watched(self) -> socket.socket:
        """The same socket under a descriptor of its own, for who waits for its bytes. The caller closes it."""
        return self._sock.dup()

    def close(self) -> None:
        """Both directions end now. The reader finds out, and calls ``end``."""
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

    def _polled(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    # Sending, under the lock.

    def _push(self, outgoing: _Outgoing) -> bool:
        """Send without waiting; whether that was all. Raises ChannelClosedError."""
        while outgoing.buffers:
            num_sent = self._send_some(outgoing.buffers[:_MOST_BUFFERS], outgoing.segment)
            if not num_sent:
                return False
            outgoing.segment = None
            outgoing.advance(num_sent)
        return True

    def _send_some(self, buffers: Seq[Any], segment: Segment | None = None) -> int:
        """How many bytes the socket takes now, of ``_MOST_BUFFERS`` at most. Raises ChannelClosedError."""
        rights = []
        if segment is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fd]))]
        try:
            return self._sock.sendmsg(buffers, rights, _SENDING)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._close()
            raise ChannelClosedError from error

    def _start_writer(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="bei-writer", daemon=True)
            self._writer.start()

    def _write_all(self) -> None:
        """The writer's thread: send the backlog as the other process takes it."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._is_closed or bool(self._backlog))
                if self._is_closed:
                    return
            poll.poll()  # also when the socket is shut down
            with self._lock:
                try:
                    while self._backlog and not self._is_closed and self._push(self._backlog[0]):
                        self._backlog.popleft()
                except ChannelClosedError:
                    return
                self._changed.notify_all()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._backlog.clear()
            with contextlib.suppress(OSError):  # the other end is gone already
                self._sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    # Reading.

    def _fill(self, flags: int) -> int:
        """Read once into the buffer; how many bytes came, 0 at the end. Raises BlockingIOError with ``_AT_ONCE``."""
        if self._start:
            kept = self._end - self._start
            self._input[:kept] = self._input[self._start : self._end]
            self._start, self._end = 0, kept
        num_read = self._receive_into(self._input[self._end :], flags)
        self._end += num_read
        return num_read

    def _receive_large(self) -> Frame[MessageT] | None:
        """A frame that the buffer does not hold, each part in memory of its own; None if the stream ends before."""
        header_size, has_fd, payload_size = _PREFIX.unpack_from(self._input, self._start)
        self._start += _PREFIX.size
        header = self._read_array(header_size)
        payload = None if header is None else self._read_array(payload_size)
        if header is None or payload is None:
            return None
        return Frame(self._decoder.decode(header.data), payload, self._fds.popleft() if has_fd else None)

    def _read_array(self, size: int) -> npt.NDArray[np.uint8] | None:
        values = np.empty(size, np.uint8)
        known = min(size, self._end - self._start)
        values[:known] = self._input[self._start : self._start + known]
        self._start += known
        rest = values.data[known:]
        while len(rest):
            num_read = self._receive_into(rest, 0)
            if not num_read:
                return None
            rest = rest[num_read:]
        return values

    def _receive_into(self, buffer: memoryview, flags: int) -> int:
        """How many bytes came; 0 at the end. Descriptors come with the bytes that they were sent with, or before."""
        while True:
            try:
                found = self._sock.recvmsg_into([buffer], _DESCRIPTORS, _RECEIVING | flags)
                break
            except BlockingIOError:
                if flags & _AT_ONCE:
                    raise
                self._polled(None)  # libuv makes a socket that it has watched non-blocking
            except OSError:  # reset
                return 0
        num_read, rights, found_flags, _ = found
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        assert not found_flags & _CUT_OFF, "a frame has one descriptor at most"
        return num_read
