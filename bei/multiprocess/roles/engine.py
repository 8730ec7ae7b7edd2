"""An engine process: the engines of all models on one device. Small and replaceable.

Where the server has one device, the batch managers are in it, too, and front ends ask it. Else it runs the steps of the
batch manager's process.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import NoReturn

import msgspec

from bei.artifact.manifest import Artifact
from bei.artifact.store import received
from bei.config.settings import ServeConfig
from bei.metrics.registry import Metrics
from bei.multiprocess.control.channel import ControlChannel, run_commands
from bei.multiprocess.control.messages import HEARTBEAT, Close, Command, Configure, OpenModel, Served, Stop
from bei.multiprocess.remote.engine_server import EngineServer
from bei.multiprocess.remote.recorded_engine import RecordedEngine, StepRecords
from bei.multiprocess.roles.batch_manager import ModelQueues
from bei.multiprocess.transport.messages import ModelInfo
from bei.scheduler.cost_model import CostModel
from bei.server.process_tuning import switch_quickly
from bei.server.status.whole_server import METRICS
from bei.service.loader import Standing, WarmEngine, warm_again, warm_first, warm_next


def run(channel: ControlChannel) -> None:
    """Be one until the supervisor says stop."""
    run_commands(channel, EngineProcess(channel).act)


class EngineProcess:
    """Carries out the supervisor's commands, in the main thread."""

    _config: ServeConfig
    _queues: ModelQueues | None = None
    _server: EngineServer | None = None  # of one, where another process has the queues
    _records: StepRecords

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._keys: set[str] = set()

    def act(self, command: Command, descriptors: list[int]) -> Served | None:
        """Raises what loading an engine raises."""
        if isinstance(command, Configure):
            self._configure(command, descriptors)
        elif isinstance(command, OpenModel):
            return self._open(command, descriptors)
        elif isinstance(command, Close) and command.key in self._keys:
            self._keys.remove(command.key)
            if self._queues is not None:
                self._queues.close(command.key)
            elif self._server is not None:
                self._server.retire(command.key)
        elif isinstance(command, Stop):
            if self._queues is not None:
                self._queues.end()
            elif self._server is not None:
                self._server.close()
        return None

    def _configure(self, command: Configure, descriptors: list[int]) -> None:
        if command.cores:
            os.sched_setaffinity(0, command.cores)  # and the threads that this one makes: those of the engines
        self._config = command.config
        listener = socket.socket(fileno=descriptors[0])
        if command.has_queues:
            switch_quickly()
            self._records = StepRecords.attach(descriptors[1])
            self._queues = ModelQueues(self._channel, listener, has_culprits=self._records.has_found_steps)
        else:
            self._server = EngineServer(listener)
            self._server.start()
            self._channel.offer(METRICS, Metrics().snapshot)
            self._channel.offer(HEARTBEAT, bytes)

    def _open(self, command: OpenModel, descriptors: list[int]) -> Served:
        with received(command.served.artifact, descriptors) as artifact:
            warm = self._warm(command, artifact)
        info = warm.engine.info
        found = msgspec.structs.replace(command.served, artifact=warm.artifact.without_files(), device=info.device)
        if command.is_first:
            found = msgspec.structs.replace(found, num_streams=info.num_streams, costs=warm.costs.to_json())
        if self._queues is not None:
            engine = RecordedEngine(warm.engine, found.key, self._records)
            self._queues.open(found, engine, warm.costs, self._config, reload=self._hang)
        elif self._server is not None:
            self._server.add_engine(warm.engine, ModelInfo.of(found.key, info, warm.costs))
        self._keys.add(found.key)
        return found

    def _warm(self, command: OpenModel, artifact: Artifact) -> WarmEngine:
        served, former = command.served, command.replaces
        if not command.is_first:
            assert served.costs is not None, "the first engine has said what steps cost"
            # Not every target has the option: only what was asked for is said, or found out by measuring.
            measured = self._config.engine_streams == 0 and artifact.manifest.target == "cpu"
            num_streams = served.num_streams if measured else self._config.engine_streams or None
            engine = warm_again(artifact, self._config, num_streams)
            return WarmEngine(artifact, engine, CostModel.from_json(served.costs))
        if former is None:
            return warm_first(artifact, self._config)
        assert former.costs is not None, "the first engine has said what steps cost"
        target = former.artifact.manifest.target
        standing = Standing(former.artifact.path, target, former.num_streams, CostModel.from_json(former.costs))
        return warm_next(artifact, standing, self._config)

    def _hang(self) -> NoReturn:
        """Instead of another engine beside the one that hangs: the process ends, and the operating system frees what it
        holds. What waits is submitted to the next process, and what ran is on record."""
        self._channel.hung(0)
        while True:
            threading.Event().wait()
