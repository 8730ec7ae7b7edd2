"""Connecting to a process that may be away: who waits in its socket's backlog is heard when the next one starts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from bei.errors import EngineDiedError
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.multiprocess.transport.errors import arrived
from bei.multiprocess.transport.messages import Open, Refused, Welcome

# Between attempts, where nobody listens or the connection ends again.
_PAUSE_S = 0.05
# How often a wait looks at the clock.
_LOOK_EVERY_S = 0.25
_CONNECT_TIMEOUT_S = 1.0

Decoder: TypeAlias = "msgspec.msgpack.Decoder[Any]"


class Connector:
    """Makes connections to ``address`` that ask for ``model``. ``stop`` ends ``connect`` in another thread."""

    def __init__(self, address: Path, model: str, decoder: Decoder) -> None:
        self._address = address
        self._model = model
        self._decoder = decoder
        self._stopped = threading.Event()

    def connect(self, timeout_s: float | None = None) -> tuple[Channel[Any], Welcome]:
        """A channel whose other end has said hello. Blocks until there is one.

        Raises EngineDiedError after ``timeout_s``, or what the other end refuses with; ChannelClosedError after
        ``stop``.
        """
        until_s = inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            channel = self._channel()
            if channel is not None:
                try:
                    welcome = self._welcome(channel, until_s)
                except BaseException:
                    channel.end()
                    raise
                if welcome is not None:
                    return channel, welcome
                channel.end()
            self._check(until_s)
            self._stopped.wait(_PAUSE_S)

    def stop(self) -> None:
        """No further attempts."""
        self._stopped.set()

    def pause(self, seconds: float) -> None:
        """Wait, but for ``stop``."""
        self._stopped.wait(seconds)

    def _channel(self) -> Channel[Any] | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_TIMEOUT_S)
            sock.connect(str(self._address))
            sock.settimeout(None)
        except OSError:
            sock.close()
            return None
        return Channel(sock, self._decoder)

    def _welcome(self, channel: Channel[Any], until_s: float) -> Welcome | None:
        """None if the other end leaves before it has said anything."""
        try:
            channel.send(Open(self._model))
        except ChannelClosedError:
            return None
        while not channel.wait_readable(_LOOK_EVERY_S):
            self._check(until_s)
        frame = channel.receive()
        if frame is None:
            return None
        if isinstance(frame.message, Refused):
            raise arrived(frame.message.error)
        assert isinstance(frame.message, Welcome)
        return frame.message

    def _check(self, until_s: float) -> None:
        if self._stopped.is_set():
            raise ChannelClosedError
        if time.monotonic() > until_s:
            raise EngineDiedError(f"No process serves {self._model} at {self._address}.")


def started(work: Callable[[], None], name: str) -> threading.Thread:
    """A thread that does ``work``."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
