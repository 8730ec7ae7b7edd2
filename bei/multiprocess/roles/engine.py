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
from bei.multiprocess.control.messages import (
    HEARTBEAT,
    Close,
    Command,
    Configure,
    OpenModel,
    Served,
    Stop,
    second_key,
)
from bei.multiprocess.remote.engine_server import EngineServer
from bei.multiprocess.remote.recorded_engine import RecordedEngine, StepRecords
from bei.multiprocess.roles.batch_manager import ModelQueues
from bei.multiprocess.transport.messages import ModelInfo
from bei.scheduler.cost_model import CostModel
from bei.server.process_tuning import collect_rarely, switch_quickly
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
        elif isinstance(command, Close):
            self._close(command.key)
            self._close(second_key(command.key))
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
        served, standing = command.served, _standing_of(command.replaces)
        with received(served.artifact, descriptors) as artifact:
            warm = self._warm(served, artifact, standing, is_first=command.is_first)
            try:
                second = self._warm_second(command, warm.artifact, standing)
            except BaseException:  # raised again: the first engine would keep its memory
                warm.engine.close()
                raise
        found = msgspec.structs.replace(served, artifact=warm.artifact.without_files(), device=warm.engine.info.device)
        if command.is_first:
            found = _found_out(found, warm, second)
        for tower, engine in zip(found.towers, (warm,) if second is None else (second, warm), strict=True):
            self._add(tower, engine)
        return found

    def _warm_second(self, command: OpenModel, artifact: Artifact, standing: Standing | None) -> WarmEngine | None:
        if (tower := command.served.of_second) is None:
            return None
        former = None if standing is None else standing.of_second
        return self._warm(tower, artifact.of_second, former, is_first=command.is_first)

    def _add(self, served: Served, warm: WarmEngine) -> None:
        if self._queues is not None:
            engine = RecordedEngine(warm.engine, served.key, self._records)
            self._queues.open(served, engine, warm.costs, self._config, reload=self._hang)
        elif self._server is not None:
            if not self._keys:
                collect_rarely()
            self._server.add_engine(warm.engine, ModelInfo.of(served.key, warm.engine.info, warm.costs))
        self._keys.add(served.key)

    def _close(self, key: str) -> None:
        if key not in self._keys:
            return
        self._keys.remove(key)
        if self._queues is not None:
            self._queues.close(key)
        elif self._server is not None:
            self._server.retire(key)

    def _warm(self, served: Served, artifact: Artifact, standing: Standing | None, *, is_first: bool) -> WarmEngine:
        if not is_first:
            assert served.costs is not None, "the first engine has said what steps cost"
            # Not every target has the option: only what was asked for is said, or found out by measuring.
            measured = self._config.engine_streams == 0 and artifact.manifest.target == "cpu"
            num_streams = served.num_streams if measured else self._config.engine_streams or None
            engine = warm_again(artifact, self._config, num_streams)
            return WarmEngine(artifact, engine, CostModel.from_json(served.costs))
        if standing is None:
            return warm_first(artifact, self._config)
        return warm_next(artifact, standing, self._config)

    def _hang(self) -> NoReturn:
        """Instead of another engine beside the one that hangs: the process ends, and the operating system frees what it
        holds. What waits is submitted to the next process, and what ran is on record."""
        self._channel.hung(0)
        while True:
            threading.Event().wait()


def _found_out(served: Served, warm: WarmEngine, second: WarmEngine | None) -> Served:
    """With what the first process has found out by loading it."""
    found = msgspec.structs.replace(served, num_streams=warm.engine.info.num_streams, costs=warm.costs.to_json())
    if second is None:
        return found
    streams, costs = second.engine.info.num_streams, second.costs.to_json()
    return msgspec.structs.replace(found, second_streams=streams, second_costs=costs)


def _standing_of(former: Served | None) -> Standing | None:
    if former is None:
        return None
    assert former.costs is not None, "the first engine has said what steps cost"
    path, target = former.artifact.path, former.artifact.manifest.target
    of_second = None if former.second_costs is None else CostModel.from_json(former.second_costs)
    costs = CostModel.from_json(former.costs)
    return Standing(path, target, former.num_streams, costs, former.second_streams, of_second)
