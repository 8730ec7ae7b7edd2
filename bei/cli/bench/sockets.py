"""Clock and sockets of the load generator: non-blocking connections, with TLS or without, and waits exact to 0.1 ms.

Event loops of asyncio, uvloop included, wait whole milliseconds: requests would be sent half a millisecond late on
average, a fifth of what a short text takes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

_MOST_READ = 1 << 18
_TRY_S = 5.0  # for each of several addresses
_EXACT_S = 0.05  # shorter waits are exact; epoll alone waits whole milliseconds


class ConnectionHandler(Protocol):
    """Receives a connection's events."""

    def received(self, data: bytes) -> None:
        """Data was received."""

    def ended(self, reason: str) -> None:
        """The connection was closed; ``reason``: why it could not be opened, else empty. The last event."""


class ClientConnection(Protocol):
    """A connection, open or being opened."""

    def send(self, data: bytes) -> None:
        """Send ``data``, now or when possible."""

    def close(self) -> None:
        """Close the connection, without an event."""


class Network(Protocol):
    """Clock and connections of the driver."""

    def now(self) -> float:
        """Seconds of a monotonic clock."""

    def connect(self, handler: ConnectionHandler) -> ClientConnection:
        """Begin to connect to the server. Raises OSError."""

    def wait(self, timeout_s: float) -> None:
        """Wait for events, ``timeout_s`` at most, and dispatch them."""

    def close(self) -> None:
        """Close all connections."""


class ServerAddress:
    """A server's address, resolved once: the first of several (as of localhost) on which a server listens. Raises
    OSError."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.host = host
        self.tls = tls
        found = [(one[0], one[4]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        while len(found) > 1 and not _is_listening(*found[0]):
            found.pop(0)
        self.family, self.socket_address = found[0]


def _is_listening(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.settimeout(_TRY_S)
        return tried.connect_ex(address) == 0


class SocketNetwork:
    """Clock and sockets on Linux."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._closing: list[socket.socket] = []
        self._connections: set[SocketConnection] = set()

    def now(self) -> float:
        """CLOCK_MONOTONIC, which all processes share."""
        return time.monotonic()

    def connect(self, handler: ConnectionHandler, address: ServerAddress | None = None) -> SocketConnection:
        """Begin to connect, to another ``address`` if given. Raises OSError."""
        connection = SocketConnection(self, address or self._address, handler)
        self._connections.add(connection)
        return connection

    def wait(self, timeout_s: float) -> None:
        """Wait for events and dispatch them."""
        if 0 < timeout_s < _EXACT_S:
            select.select([self._epoll.fileno()], [], [], timeout_s)
            timeout_s = 0
        for number, events in self._epoll.poll(max(0.0, timeout_s)):
            handle = self._handlers.get(number)
            if handle is not None:  # closed by an earlier event in this list
                handle(events)
        self._close_later()

    def watch(self, number: int, events: int, handle: Callable[[int], None]) -> None:
        """Call ``handle(events)`` when a file descriptor is ready."""
        if number in self._handlers:
            self._epoll.modify(number, events)
        else:
            self._epoll.register(number, events)
        self._handlers[number] = handle

    def unwatch(self, number: int) -> None:
        """Stop calling the handler of a file descriptor."""
        if self._handlers.pop(number, None) is not None:
            self._epoll.unregister(number)

    def forget(self, connection: SocketConnection, its_socket: socket.socket) -> None:
        """Close a connection's socket after all pending events are handled, so that its number is not reused before."""
        self.unwatch(its_socket.fileno())
        self._connections.discard(connection)
        self._closing.append(its_socket)

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._close_later()
        self._epoll.close()

    def _close_later(self) -> None:
        while self._closing:
            self._closing.pop().close()


class SocketConnection:
    """A TCP connection. Data sent before it is open is buffered."""

    def __init__(self, network: SocketNetwork, address: ServerAddress, handler: ConnectionHandler) -> None:
        self._network = network
        self._address = address
        self._handler = handler
        self._unsent = memoryview(b"")
        self._is_open = False
        self._is_closed = False
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        self._step = self._finish_connecting
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                self._socket.connect(address.socket_address)
        except OSError:
            self._socket.close()
            raise
        self._events = select.EPOLLOUT
        network.watch(self._socket.fileno(), self._events, self._handle)

    def send(self, data: bytes) -> None:
        """Send what the kernel accepts, and the rest later."""
        self._unsent = memoryview(bytes(self._unsent) + data if self._unsent else data)
        if self._is_open:
            self._flush()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._network.forget(self, self._socket)

    def _handle(self, events: int) -> None:
        try:
            self._step(events)
        except (ssl.SSLError, OSError) as error:
            self._end("" if self._is_open else str(error))

    # States: connecting, TLS handshake, open.

    def _finish_connecting(self, events: int) -> None:
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise ConnectionError(error, f"cannot connect: {os.strerror(error)}")
        if self._address.tls is None:
            self._open()
            return
        self._socket = self._wrapped(self._address.tls)
        self._step = self._shake_hands
        self._shake_hands(events)

    def _wrapped(self, tls: ssl.SSLContext) -> ssl.SSLSocket:
        self._network.unwatch(self._socket.fileno())
        wrapped = tls.wrap_socket(self._socket, server_hostname=self._address.host, do_handshake_on_connect=False)
        self._network.watch(wrapped.fileno(), self._events, self._handle)
        return wrapped

    def _shake_hands(self, events: int) -> None:
        assert isinstance(self._socket, ssl.SSLSocket)
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._watch(select.EPOLLOUT)
        else:
            self._open()

    def _open(self) -> None:
        self._is_open = True
        self._step = self._transfer
        self._watch(select.EPOLLIN)
        self._flush()

    def _transfer(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if not events & ~select.EPOLLOUT:
            return
        try:
            data = self._socket.recv(_MOST_READ)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        if isinstance(self._socket, ssl.SSLSocket) and data:
            while rest := self._socket.pending():
                data += self._socket.recv(rest)
        if data:
            self._handler.received(data)
        else:
            self._end("")

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:  # closed before all was sent: an answer with the reason may still have arrived
            self._unsent = memoryview(b"")
        self._watch(select.EPOLLIN | select.EPOLLOUT if self._unsent else select.EPOLLIN)

    def _watch(self, events: int) -> None:
        if events != self._events and not self._is_closed:
            self._events = events
            self._network.watch(self._socket.fileno(), events, self._handle)

    def _end(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._handler.ended(reason)


def allow_files() -> None:
    """Raise the limit of open files to the maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
