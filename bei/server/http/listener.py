"""A listener that goes on when file descriptors run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from bei.server.http.tls import SHUTDOWN_S, TLS

log = logging.getLogger(__name__)

# TLS handshakes under way. Of more the oldest ends: clients that never finish theirs keep nobody out.
MOST_HANDSHAKES = 256

_ACCEPTS_AT_ONCE = 64  # then the loop's turn: who is connected already is served between
_MOST_WAITING = 4096  # more than a socket's queue holds (bei.server.http.listen): clients may keep coming
# Clients whose handshake is under way when nothing more is accepted have so long to end it.
_LAST_HANDSHAKES_S = 0.5
_RETRY_S = 0.1
# A connection that is left to other processes is accepted here after all if it is still there then: the others compute.
_LEAVE_S = 0.005
_LOOK_EVERY_S = 0.001  # meanwhile; the others may have got as many
_LOG_EVERY_S = 10.0
_OUT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Gate(Protocol):
    """Coordinates accepting among processes (``bei.server.http.connections.Connections``)."""

    def is_left_to_others(self) -> bool:
        """True if another process that listens on the same socket is to accept the next connection."""

    def coming(self, change: int) -> None:
        """Change the number of connections that were accepted and are not made yet."""

    def listening(self, change: int) -> None:
        """Change the number of listeners that accept connections."""


class Listener:
    """Accepts connections. In place of the loop's own server, which closes its socket when it runs out of descriptors:
    this one makes room, waits a little, and the clients wait in the socket's queue.

    ``make_protocol`` is called for each connection, ``make_room`` when there is no descriptor for one. With ``tls`` a
    connection is made when its handshake is done. Other processes may listen on the same socket: ``gate`` says when
    one of them is to accept.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        make_room: Callable[[], object],
        tls: TLS | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._make_room = make_room
        self._tls = tls
        self._gate = gate
        self._accepting: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._pause: asyncio.TimerHandle | None = None
        self._logged_s = float("-inf")
        listener.setblocking(False)
        if gate is not None:
            gate.listening(1)
        self._start()

    def close(self) -> None:
        """Accept who waits in the socket's queue, and no more. The socket is its owner's to close, at once: who comes
        into its queue meanwhile is connected, and reset when it is closed."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._accept_waiting()
        if self._gate is not None:
            self._gate.listening(-1)
        if self._accepting and self._tls is not None:
            self._loop.call_later(_LAST_HANDSHAKES_S, self._end_handshakes)

    async def wait_closed(self) -> None:
        """Return when what was accepted is connected, or has failed."""
        await asyncio.gather(*self._accepting, return_exceptions=True)

    def _start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _leave(self, until_s: float) -> None:
        """Look away until others have as many connections, or that takes too long."""
        if self._gate is None or not self._gate.is_left_to_others():
            self._start()
        elif self._loop.time() < until_s:
            self._pause = self._loop.call_later(_LOOK_EVERY_S, self._leave, until_s)
        else:
            self._start()
            self._accept(leaves=False)

    def _accept(self, *, leaves: bool = True) -> None:
        """``leaves`` False: the first one in any case."""
        for number in range(_ACCEPTS_AT_ONCE):
            if self._gate is not None and (leaves or number) and self._gate.is_left_to_others():
                if not number:
                    self._loop.remove_reader(self._listener)
                    self._leave(self._loop.time() + _LEAVE_S)
                return  # whether there is another one at all is seen in the loop's next turn
            try:
                self._accept_one()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF:
                    self._wait_for_room(error)
                    return

    def _accept_waiting(self) -> None:
        for _ in range(_MOST_WAITING):
            try:
                self._accept_one()
            except OSError as error:
                if error.errno in _OUT_OF or isinstance(error, BlockingIOError):
                    return

    def _accept_one(self) -> None:
        """Accept one connection. Raises BlockingIOError: the queue is empty; OSError: no descriptor is left, or the
        client or its network is gone (accept(2))."""
        connection, _ = self._listener.accept()
        if self._gate is not None:
            self._gate.coming(1)
        task = self._loop.create_task(self._connect(connection))
        self._accepting[task] = None
        task.add_done_callback(self._connected)
        if self._tls is not None and len(self._accepting) > MOST_HANDSHAKES:
            oldest = next(iter(self._accepting))
            del self._accepting[oldest]
            oldest.cancel()

    def _end_handshakes(self) -> None:
        for handshake in self._accepting:
            handshake.cancel()

    def _connected(self, task: asyncio.Task[None]) -> None:
        """The task has ended, by success, failure or cancellation."""
        self._accepting.pop(task, None)
        if self._gate is not None:
            self._gate.coming(-1)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._make_protocol, connection)
            else:
                await self._loop.connect_accepted_socket(
                    self._make_protocol,
                    connection,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=self._tls.handshake_s,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
        except OSError:  # the client has left, or does not speak TLS, or has no certificate that we ask for
            connection.close()

    def _wait_for_room(self, error: OSError) -> None:
        now_s = self._loop.time()
        if now_s - self._logged_s > _LOG_EVERY_S:
            self._logged_s = now_s
            log.error("cannot accept connections (%s): idle ones are closed, new ones wait", error)
        self._loop.remove_reader(self._listener)
        self._make_room()
        self._pause = self._loop.call_later(_RETRY_S, self._start)
