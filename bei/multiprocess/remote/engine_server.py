"""The engines of a device's process, served to the batch manager's process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from bei.core import Engine
from bei.errors import BeiError, EngineDeadError, EngineError
from bei.multiprocess.remote.recorded_engine import end_process
from bei.multiprocess.transport.channel import Channel
from bei.multiprocess.transport.connect import ServiceServer
from bei.multiprocess.transport.messages import Failed, ModelInfo, Ran, Run, ToEngineServer, Welcome, carried

log = logging.getLogger(__name__)


class _Steps:
    """Runs the steps of one engine in the threads of its connections, as many at once as it has streams."""

    def __init__(self, engine: Engine, model_info: ModelInfo, on_dead: Callable[[], None]) -> None:
        self._engine = engine
        self._model_info = model_info
        self._on_dead = on_dead
        self._num_streams = engine.info.num_streams
        self._streams = threading.Semaphore(self._num_streams)
        self._is_closed = False

    def serve(self, channel: Channel[Any]) -> None:
        """Run the steps of one connection until it ends. Raises what says that the engine is dead."""
        channel.send(Welcome(self._model_info))
        while (frame := channel.receive()) is not None:
            with self._streams:
                answer = self._run(frame.message)
            channel.send(answer)
            del frame, answer

    def close(self) -> None:
        """End the running steps, close the engine. Blocks."""
        self._is_closed = True
        for _ in range(self._num_streams):
            self._streams.acquire()
        self._engine.close()
        self._streams.release(self._num_streams)

    def _run(self, message: Run) -> Ran | Failed:
        try:
            if self._is_closed:
                raise EngineError("The engine has been retired.")
            return Ran(dict(self._engine.run(message.batch, message.outputs)))
        except BaseException as error:  # a border: the batch manager decides what becomes of the step
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                log.exception("the engine is dead")
                self._on_dead()
                raise EngineDeadError("The engine is dead.") from error
            if isinstance(error, BeiError):
                return Failed(carried(error))
            log.exception("engine failed on a batch of %d sequences", message.batch.batch_size)
            return Failed(carried(EngineError(f"{type(error).__name__}: {error}")))


class EngineServer(ServiceServer[_Steps]):
    """Serves the engines of a process to batch managers.

    ``on_dead`` is called when an engine says that it is dead (EngineDeadError), or its library ends a thread; by
    default the process ends at once, to be replaced.
    """

    def __init__(self, listener: socket.socket, on_dead: Callable[[], None] = end_process) -> None:
        super().__init__(listener, ToEngineServer)
        self._on_dead = on_dead

    def add_engine(self, engine: Engine, model_info: ModelInfo) -> None:
        """A warm engine, which batch managers may ask for when this returns."""
        self._add(model_info.model, _Steps(engine, model_info, self._on_dead))
