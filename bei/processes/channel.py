"""Frames over a Unix stream socket: a message, raw bytes behind it, and now and then a descriptor.

A frame is a prefix (sizes), the message in msgpack, and the bytes. Reading blocks; sending never does: what the peer
does not take at once is sent by a thread of its own, in order.
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

from bei.processes.memory import Segment
from bei.processes.wire import Message

# Bytes of the message, whether a descriptor comes along, bytes behind the message.
_PREFIX = struct.Struct("<I?xxxQ")
_READ_BYTES = 1 << 16
_MOST_BUFFERS = 256  # of one call; Linux takes 1,024
_DESCRIPTORS = socket.CMSG_SPACE(8 * array.array("i").itemsize)

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


class Channel(Generic[MessageT]):
    """One end of a connection. ``send`` and ``close`` in any thread, ``receive`` and ``end`` in one."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._sock = sock
        self._decoder = decoder
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._backlog: deque[_Outgoing] = deque()
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._input = bytearray(_READ_BYTES)
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
        prefix = _PREFIX.pack(len(header), segment is not None, sum(values.nbytes for values in arrays))
        buffers = [memoryview(prefix + header), *(values.data.cast("B") for values in arrays)]
        outgoing = _Outgoing(buffers, segment)
        with self._lock:
            if self._is_closed:
                raise ChannelClosedError
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
        prefix = self._read(_PREFIX.size)
        if prefix is None:
            return None
        header_size, has_fd, payload_size = _PREFIX.unpack(prefix)
        header = self._read(header_size)
        payload = None if header is None else self._read_array(payload_size)
        if header is None or payload is None:
            return None
        return Frame(self._decoder.decode(header), payload, self._fds.popleft() if has_fd else None)

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether ``receive`` has something to do by then."""
        if self._start < self._end:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

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

    # Sending, under the lock.

    def _push(self, outgoing: _Outgoing) -> bool:
        """Send without waiting; whether that was all. Raises ChannelClosedError."""
        buffers = outgoing.buffers
        while buffers:
            rights = []
            if outgoing.segment is not None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [outgoing.segment.fd]))]
            try:
                num_sent = self._sock.sendmsg(
                    buffers[:_MOST_BUFFERS], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                )
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self._close()
                raise ChannelClosedError from error
            outgoing.segment = None
            done = 0
            while done < len(buffers) and num_sent >= len(buffers[done]):
                num_sent -= len(buffers[done])
                done += 1
            del buffers[:done]
            if num_sent:
                buffers[0] = buffers[0][num_sent:]
        return True

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

    def _read(self, size: int) -> bytes | None:
        """``size`` bytes; None if the stream ends before."""
        missing = size - (self._end - self._start)
        if missing > 0:
            self._make_room(size)
            while self._end - self._start < size:
                num_read = self._receive_into(memoryview(self._input)[self._end :])
                if not num_read:
                    return None
                self._end += num_read
        found = bytes(memoryview(self._input)[self._start : self._start + size])
        self._start += size
        return found

    def _make_room(self, size: int) -> None:
        """For ``size`` bytes from where they begin."""
        kept = self._input[self._start : self._end]
        if size > len(self._input):
            self._input = bytearray(size)
        elif size <= _READ_BYTES < len(self._input):
            self._input = bytearray(_READ_BYTES)  # a large message is over
        self._input[: len(kept)] = kept
        self._start, self._end = 0, len(kept)

    def _read_array(self, size: int) -> npt.NDArray[np.uint8] | None:
        values = np.empty(size, np.uint8)
        known = min(size, self._end - self._start)
        values[:known] = np.frombuffer(self._input, np.uint8, known, self._start)
        self._start += known
        rest = values.data[known:]
        while len(rest):
            num_read = self._receive_into(rest)
            if not num_read:
                return None
            rest = rest[num_read:]
        return values

    def _receive_into(self, buffer: memoryview) -> int:
        """How many bytes came; 0 at the end. Descriptors come with the bytes that they were sent with, or before."""
        try:
            num_read, rights, flags, _ = self._sock.recvmsg_into([buffer], _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except OSError:  # reset
            return 0
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        assert not flags & socket.MSG_CTRUNC, "a frame has one descriptor at most"
        return num_read
