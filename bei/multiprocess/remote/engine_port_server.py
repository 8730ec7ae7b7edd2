"""The engine ports of a batch manager's process, served to front ends."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from bei.errors import ModelNotFoundError
from bei.multiprocess.remote.engine_port_service import Client, ServedModel, ServedPort
from bei.multiprocess.transport.accept import Acceptor
from bei.multiprocess.transport.channel import Channel, ChannelClosedError, Frame
from bei.multiprocess.transport.connect import started
from bei.multiprocess.transport.errors import carried
from bei.multiprocess.transport.messages import Bye, Cancel, Open, Refused, Release, Submit, ToPortServer, Welcome

__all__ = ["PortServer", "ServedModel"]

log = logging.getLogger(__name__)

# Front ends hear of a port's state when it changes, but not more often than this, and after a while in any case.
_TELL_AT_MOST_EVERY_S = 0.01
_TELL_EVERY_S = 0.1
# Who leaves, or is refused, has so long to take what was sent.
_FLUSH_S = 5.0

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToPortServer)


class PortServer:
    """Accepts front ends on ``listener``, a listening Unix socket that outlives it: it is not closed nor shut down.

    ``models``: by what front ends ask for them, "NAME@DIGEST". Each has one port, which is opened here.
    ``has_culprits``: see ``Welcome``.
    """

    def __init__(
        self, listener: socket.socket, models: Mapping[str, ServedModel], *, has_culprits: bool = False
    ) -> None:
        self._has_culprits = has_culprits
        self._lock = threading.Lock()
        self._has_changed = threading.Event()
        self._stopped = threading.Event()
        self._ports = {model: ServedPort(served, self._has_changed.set) for model, served in models.items()}
        self._retired: list[ServedPort] = []
        # Also those that have been ended here: what they were lent stays as it is until this process ends.
        self._clients: set[Client] = set()
        self._acceptor = Acceptor(listener, lambda sock: started(partial(self._serve, sock), "bei-front"))
        self._teller = threading.Thread(target=self._tell, name="bei-stats", daemon=True)

    def start(self) -> None:
        """Accept from now on."""
        self._teller.start()
        self._acceptor.start()

    def add_model(self, model: str, served: ServedModel) -> None:
        """Open its port; front ends may ask it when this returns."""
        port = ServedPort(served, self._has_changed.set)
        with self._lock:
            assert model not in self._ports, model
            self._ports[model] = port

    def retire_model(self, model: str) -> None:
        """Refuse it to who comes, run and answer what waits, close its port. Blocks. Its engine is closed with it."""
        with self._lock:
            port = self._ports.pop(model)
            self._retired.append(port)  # front ends that still ask it hear that it is not alive
        port.close()

    def close(self) -> None:
        """Accept nobody any more, ``retire_model`` all, end the connections. Blocks."""
        self._acceptor.close()
        for model in list(self._ports):
            self.retire_model(model)
        self._stopped.set()
        self._has_changed.set()
        if self._teller.ident is not None:
            self._teller.join()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.channel.flush(_FLUSH_S)
            client.channel.close()

    def _serve(self, sock: socket.socket) -> None:
        """The thread of one connection."""
        channel: Channel[Any] = Channel(sock, _decoder)
        try:
            port = self._asked(channel)
            if port is not None:
                self._serve_client(Client(channel, port.arena), port)
        except ChannelClosedError:
            pass
        except Exception:  # a border: one front end's connection must not cost the others theirs
            log.exception("the connection of a front end has failed")
        finally:
            channel.end()

    def _asked(self, channel: Channel[Any]) -> ServedPort | None:
        """The port that is asked for; None where there is no such."""
        frame = channel.receive()
        if frame is None or not isinstance(frame.message, Open):
            return None
        with self._lock:
            port = self._ports.get(frame.message.model)
        if port is None:
            channel.send(Refused(carried(ModelNotFoundError(f"{frame.message.model} is not served here."))))
            channel.flush(_FLUSH_S)
            return None
        return port

    def _serve_client(self, client: Client, port: ServedPort) -> None:
        with self._lock:
            self._clients.add(client)  # before it is told, so that ``close`` ends whoever has been welcome
        with suppress(ChannelClosedError):  # then there is nothing to receive either
            client.channel.send(Welcome(port.hello, port.state(0), self._has_culprits))
        port.enter(client)
        try:
            while (frame := client.channel.receive()) is not None:
                _handle(frame, client, port)
                del frame
            if not self._stopped.is_set():  # it has ended, or has left; else it may still read what was lent
                client.lender.release_all()
                with self._lock:
                    self._clients.discard(client)
        finally:
            port.leave(client)

    def _tell(self) -> None:
        """The thread that tells front ends how things stand."""
        told_s = trimmed_s = time.monotonic()
        while not self._stopped.is_set():
            self._has_changed.wait(_TELL_EVERY_S)
            self._has_changed.clear()
            now_s = time.monotonic()
            with self._lock:
                self._retired = [port for port in self._retired if port.has_clients or port.arena.num_bytes]
                ports = [*self._ports.values(), *self._retired]
            try:
                for port in ports:
                    port.tell(in_any_case=now_s - told_s >= _TELL_EVERY_S)
                if now_s - trimmed_s >= 1.0:
                    trimmed_s = now_s
                    for port in ports:
                        port.arena.trim(now_s)
            except Exception:  # a border: front ends take a server that says nothing to hang
                log.exception("front ends could not be told the state of a port")
            if now_s - told_s >= _TELL_EVERY_S:
                told_s = now_s
            self._stopped.wait(_TELL_AT_MOST_EVERY_S)


def _handle(frame: Frame[Any], client: Client, port: ServedPort) -> None:
    message = frame.message
    if isinstance(message, Submit):
        port.submit(client, message, frame.payload)
        client.num_seen = message.number  # behind it: what has been seen is in the state
    elif isinstance(message, Cancel):
        port.cancel(client, message.request_id)
    elif isinstance(message, Release):
        client.lender.release(message.leases)
    elif isinstance(message, Bye):
        port.leave(client)
    else:
        raise AssertionError(f"unexpected message from a front end: {type(message).__name__}")
