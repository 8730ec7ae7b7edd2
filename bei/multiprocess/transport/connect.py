"""Connections between the processes of a server: sockets without files, a client that reconnects, an accept loop.

The supervisor owns the listening sockets. A client that connects while a process is being replaced waits in the backlog
of its socket and is accepted by the next process.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from bei.errors import ConfigError, EngineDiedError, ModelNotFoundError
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.multiprocess.transport.messages import OpenConnection, Refused, Welcome, arrived, carried
from bei.utils.threads import started

log = logging.getLogger(__name__)

_BACKLOG = 128
# Between attempts, where nobody listens or the connection ends again.
_PAUSE_S = 0.05
# How often a wait looks at the clock.
_LOOK_EVERY_S = 0.25
_CONNECT_TIMEOUT_S = 1.0
# A client that is left, or refused, has so long to take what was sent.
_FLUSH_S = 5.0


class SocketEndpoint:
    """A listening Unix socket whose file is gone once it is bound. ``address``: a descriptor (``O_PATH``) of the file.

    Only processes that were given the descriptor can connect (``path_of``), and nothing is left behind, whichever
    process is killed. Raises ConfigError where there is no folder for temporary files.
    """

    def __init__(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="bei-") as folder:  # of mode 700
                path = os.path.join(folder, "socket")
                self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.listener.bind(path)
                self.listener.listen(_BACKLOG)
                self.address = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"Processes of the server need a folder for temporary files (TMPDIR) to make their sockets: {error}."
            ) from error

    def close(self) -> None:
        self.listener.close()
        os.close(self.address)


def path_of(address: int) -> Path:
    """The path to connect to in order to reach the endpoint of the descriptor ``address``."""
    return Path(f"/proc/self/fd/{address}")


def connect(
    address: Path, model: str, messages: Any, timeout_s: float | None = None, stopped: threading.Event | None = None
) -> tuple[Channel[Any], Welcome]:
    """A channel to a process that serves the model at ``address``, and sends ``messages``. Blocks until there is one.

    Raises EngineDiedError after ``timeout_s``, the error that the peer refuses with, ChannelClosedError when
    ``stopped`` is set.
    """
    stopped = stopped or threading.Event()
    until_s = inf if timeout_s is None else time.monotonic() + timeout_s

    def check() -> None:
        if stopped.is_set():
            raise ChannelClosedError
        if time.monotonic() > until_s:
            raise EngineDiedError(f"No process serves {model} at {address}.")

    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel: Channel[Any] = Channel(sock, messages)
        welcome: Welcome | None = None
        try:
            with suppress(OSError, ChannelClosedError):  # no process listens, or it leaves at once
                sock.settimeout(_CONNECT_TIMEOUT_S)
                sock.connect(str(address))
                sock.settimeout(None)
                channel.send(OpenConnection(model))
                welcome = _answer(channel, check)
        finally:
            if welcome is None:
                channel.end()
        if welcome is not None:
            return channel, welcome
        check()
        stopped.wait(_PAUSE_S)


def _answer(channel: Channel[Any], check: Callable[[], None]) -> Welcome | None:
    """None if the peer leaves before it has answered, or ``check`` raises ChannelClosedError."""
    while not channel.wait_readable(_LOOK_EVERY_S):
        check()
    frame = channel.receive()
    if frame is None:
        return None
    if isinstance(frame.message, Refused):
        raise arrived(frame.message.error)
    assert isinstance(frame.message, Welcome)
    return frame.message


class Service(Protocol):
    """What a connection may ask for."""

    def serve(self, channel: Channel[Any]) -> None:
        """Answer one client, until ``channel`` ends. In a thread of the connection."""

    def close(self) -> None:
        """Run and answer what waits. Blocks."""


ServiceT = TypeVar("ServiceT", bound=Service)


class ServiceServer(Generic[ServiceT]):
    """Accepts clients on ``listener``, a listening Unix socket that outlives it: it is neither closed nor shut down.

    ``messages``: the types that clients send. Each connection has a thread.
    """

    def __init__(self, listener: socket.socket, messages: Any) -> None:
        self._lock = threading.Lock()
        self._services: dict[str, ServiceT] = {}  # by what clients ask for, "NAME@DIGEST"
        self._listener = listener
        self._messages = messages
        self._channels: set[Channel[Any]] = set()
        self._thread: threading.Thread | None = None
        self._is_accepting = True

    def start(self) -> None:
        self._listener.settimeout(_LOOK_EVERY_S)
        self._thread = started(self._accept_all, "bei-accept")

    def retire(self, model: str) -> None:
        """Refuse it to new clients, and close it. Blocks."""
        with self._lock:
            service = self._services.pop(model)
        service.close()

    def close(self) -> None:
        """Accept no more clients, ``retire`` all, end the connections. Blocks."""
        self._stop_accepting()
        for model in list(self._services):
            self.retire(model)
        self._end_connections()

    def _add(self, model: str, service: ServiceT) -> None:
        with self._lock:
            assert model not in self._services, model
            self._services[model] = service

    def _stop_accepting(self) -> None:
        """Clients that come now wait in the backlog for the next process."""
        self._is_accepting = False
        if self._thread is not None:
            self._thread.join()

    def _end_connections(self, flush_s: float = _FLUSH_S) -> None:
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.flush(flush_s)
            channel.close()

    def _accept_all(self) -> None:
        while self._is_accepting:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no descriptors for now
                if self._listener.fileno() < 0:
                    return
                log.warning("a connection could not be accepted: %s", error)
                time.sleep(_PAUSE_S)
                continue
            sock.settimeout(None)
            started(partial(self._serve, sock), "bei-connection")

    def _serve(self, sock: socket.socket) -> None:
        channel: Channel[Any] = Channel(sock, self._messages)
        with self._lock:
            self._channels.add(channel)  # before it is answered, so that ``close`` ends every client that was welcome
        try:
            frame = channel.receive()
            if frame is not None and isinstance(frame.message, OpenConnection):
                with self._lock:
                    service = self._services.get(frame.message.model)
                if service is not None:
                    service.serve(channel)
                else:
                    error = ModelNotFoundError(f"{frame.message.model} is not served here.")
                    channel.send(Refused(carried(error)))
                    channel.flush(_FLUSH_S)
        except ChannelClosedError:
            pass
        except Exception:  # a border: a connection that fails must not cost others theirs
            log.exception("a connection of another process has failed")
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.end()
