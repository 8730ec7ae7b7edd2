"""Accepting connections on a listening socket that others hold, too: it stays as it is when this process leaves."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Acceptor:
    """Calls ``on_connection`` for each connection, in a thread of its own."""

    def __init__(self, listener: socket.socket, on_connection: Callable[[socket.socket], object]) -> None:
        self._listener = listener
        self._on_connection = on_connection
        self._is_closed = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._accept_all, name="bei-accept", daemon=True)

    def start(self) -> None:
        """Accept from now on."""
        self._listener.setblocking(False)
        self._thread.start()

    def close(self) -> None:
        """Accept nobody any more. Who comes waits in the backlog for the next process. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        os.write(self._wake_write, b"\0")
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_read in ready:
                return
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # it was taken back, or there are no descriptors for now
                if not isinstance(error, BlockingIOError):
                    log.warning("a connection could not be accepted: %s", error)
                    select.select([self._wake_read], [], [], 0.1)
                continue
            sock.setblocking(True)
            self._on_connection(sock)
