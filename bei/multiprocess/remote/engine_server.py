"""The engines of a device's process, served to the batch manager's process."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from bei.core import Engine, PackedBatch
from bei.errors import BeiError, EngineDeadError, EngineError, ModelNotFoundError
from bei.multiprocess.remote.recorded_engine import end_process
from bei.multiprocess.shared_memory.arena import Arena, bound_of
from bei.multiprocess.transport.accept import Acceptor
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.multiprocess.transport.connect import started
from bei.multiprocess.transport.errors import carried
from bei.multiprocess.transport.lease import Lender
from bei.multiprocess.transport.messages import Failed, Open, Ran, Refused, Release, Run, ToEngineServer, Welcome
from bei.multiprocess.transport.model_info import Hello
from bei.multiprocess.transport.sequences import batch_of

log = logging.getLogger(__name__)

# A step's outputs wait so long for room in shared memory; then they go over the socket.
_ROOM_WAIT_S = 0.02
_TRIM_EVERY_S = 1.0
_FLUSH_S = 5.0

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToEngineServer)


@dataclass(frozen=True)
class ServedEngine:
    """A warm engine. ``hello.engine`` is ``engine.info``."""

    engine: Engine
    hello: Hello


class _Client(NamedTuple):
    """A batch manager's connection. Its arena ends with it, unused since: rows of it may still be read elsewhere."""

    channel: Channel[Any]
    lender: Lender
    arena: Arena


class _Job(NamedTuple):
    """A step to be run."""

    client: _Client
    message: Run
    batch: PackedBatch


class _Streams:
    """The threads that run one engine, one a stream."""

    def __init__(self, served: ServedEngine, on_dead: Callable[[], None]) -> None:
        self.served = served
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._is_closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        count = served.engine.info.num_streams
        self._threads = [started(self._work, f"bei-engine-{index}") for index in range(count)]

    def put(self, job: _Job) -> None:
        """Run it when a stream is free. Raises ChannelClosedError."""
        with self._lock:
            if not self._is_closed:
                self._jobs.put(job)
                return
        error = EngineError("The engine has been retired.")
        job.client.channel.send(Failed(job.message.number, carried(error)))

    def close(self) -> None:
        """Run what is there, close the engine. Blocks."""
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self.served.engine.close()

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._run(job)
                del job  # it may be the last that knows of its connection's memory
        except BaseException:  # whatever ends an engine's thread has ended the engine
            log.exception("the engine is dead")
            self._on_dead()

    def _run(self, job: _Job) -> None:
        """Raises what says that the engine is dead."""
        client, message, batch = job
        wanted = None if message.outputs is None else frozenset(message.outputs)
        try:
            try:
                outputs = self.served.engine.run(batch, wanted)
                (lent,), payload = client.lender.lend([outputs], _ROOM_WAIT_S)
            except EngineDeadError:
                raise
            except BeiError as error:
                client.channel.send(Failed(message.number, carried(error)))
            except ChannelClosedError:
                raise
            except Exception as error:  # a border: the batch manager decides what becomes of the step
                log.exception("engine failed on a batch of %d sequences", batch.batch_size)
                said = EngineError(f"{type(error).__name__}: {error}")
                client.channel.send(Failed(message.number, carried(said)))
            else:
                client.channel.send(Ran(message.number, lent), payload)
        except ChannelClosedError:  # nobody waits for it any more
            return


class EngineServer:
    """Accepts batch managers on ``listener``, a listening Unix socket that outlives it: it is not closed nor shut down.

    ``engines``: by what they are asked for, "NAME@DIGEST". ``on_dead`` is called when an engine says that it is dead
    (EngineDeadError), or one of its threads dies; by default the process ends at once, to be replaced.
    """

    def __init__(
        self,
        listener: socket.socket,
        engines: Mapping[str, ServedEngine],
        on_dead: Callable[[], None] | None = None,
    ) -> None:
        self._on_dead = on_dead or end_process
        self._lock = threading.Lock()
        self._engines = {model: _Streams(served, self._on_dead) for model, served in engines.items()}
        self._clients: list[_Client] = []
        self._stopped = threading.Event()
        self._acceptor = Acceptor(listener, lambda sock: started(partial(self._serve, sock), "bei-manager"))
        self._trimmer = threading.Thread(target=self._trim, name="bei-arena", daemon=True)

    def start(self) -> None:
        """Accept from now on."""
        self._trimmer.start()
        self._acceptor.start()

    def add_engine(self, model: str, served: ServedEngine) -> None:
        """Batch managers may ask for it when this returns."""
        streams = _Streams(served, self._on_dead)
        with self._lock:
            assert model not in self._engines, model
            self._engines[model] = streams

    def retire_engine(self, model: str) -> None:
        """Refuse it to who comes, end the running steps, close the engine. Blocks."""
        with self._lock:
            streams = self._engines.pop(model)
        streams.close()

    def close(self) -> None:
        """Accept nobody any more, ``retire_engine`` all. Blocks."""
        self._acceptor.close()
        for model in list(self._engines):
            self.retire_engine(model)
        self._stopped.set()
        if self._trimmer.ident is not None:
            self._trimmer.join()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.channel.flush(_FLUSH_S)
            client.channel.close()

    def _serve(self, sock: socket.socket) -> None:
        """The thread of one connection."""
        channel: Channel[Any] = Channel(sock, _decoder)
        try:
            streams = self._asked(channel)
            if streams is not None:
                self._serve_client(channel, streams)
        except ChannelClosedError:
            pass
        except Exception:  # a border: another connection takes the place of one that fails
            log.exception("the connection of a batch manager has failed")
        finally:
            channel.end()

    def _asked(self, channel: Channel[Any]) -> _Streams | None:
        """What is asked for; None where there is no such."""
        frame = channel.receive()
        if frame is None or not isinstance(frame.message, Open):
            return None
        with self._lock:
            streams = self._engines.get(frame.message.model)
        if streams is None:
            channel.send(Refused(carried(ModelNotFoundError(f"{frame.message.model} has no engine here."))))
            channel.flush(_FLUSH_S)
            return None
        return streams

    def _serve_client(self, channel: Channel[Any], streams: _Streams) -> None:
        arena = Arena(bound_of(streams.served.engine.info))
        client = _Client(channel, Lender(channel, arena), arena)
        with self._lock:
            self._clients.append(client)  # before it is told, so that ``close`` ends whoever has been welcome
        try:
            channel.send(Welcome(streams.served.hello))
            while (frame := channel.receive()) is not None:
                message = frame.message
                if isinstance(message, Run):
                    streams.put(_Job(client, message, batch_of(message, frame.payload)))
                elif isinstance(message, Release):
                    client.lender.release(message.leases)
                else:
                    raise AssertionError(f"unexpected message from a batch manager: {type(message).__name__}")
                del frame, message
        finally:
            with self._lock:
                self._clients.remove(client)

    def _trim(self) -> None:
        """The thread that gives back memory that is not used."""
        while not self._stopped.wait(_TRIM_EVERY_S):
            with self._lock:
                for client in self._clients:
                    client.arena.trim(time.monotonic())
