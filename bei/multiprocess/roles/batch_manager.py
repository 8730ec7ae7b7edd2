"""The batch managers of a process, one a model; and the batch manager's process, where there are several devices: one
queue a model, in front of the engines of all.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from bei.config.settings import ServeConfig
from bei.core import Engine
from bei.metrics.registry import Metrics, ModelMetrics
from bei.multiprocess.control.channel import ControlChannel, run_commands
from bei.multiprocess.control.messages import (
    COSTS,
    HEARTBEAT,
    Close,
    Command,
    Configure,
    OpenModel,
    Served,
    Stop,
    second_key,
)
from bei.multiprocess.remote.engine_pool import Devices, RemoteEngines
from bei.multiprocess.remote.engine_port_server import PortModel, PortServer
from bei.multiprocess.transport.connect import path_of
from bei.multiprocess.transport.messages import ModelInfo
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.server.process_tuning import collect_rarely, switch_quickly
from bei.server.status.whole_server import offer_steps
from bei.service.loader import config_of_tower, local_port


class ModelQueues:
    """Front ends connect to ``listener``. ``has_culprits``: see ``Welcome``. Answers the questions to a process with
    queues."""

    def __init__(self, channel: ControlChannel, listener: socket.socket, *, has_culprits: bool = False) -> None:
        self._metrics = Metrics()
        self._gate = DeviceGate()
        self._costs: dict[str, CostModel] = {}  # by key
        self._server = PortServer(listener, has_culprits=has_culprits)
        self._server.start()
        offer_steps(channel, self._metrics)
        channel.offer(HEARTBEAT, self._heartbeat)
        channel.offer(COSTS, lambda: observed_costs(dict(self._costs)))

    def open(
        self,
        served: Served,
        engine: Engine,
        costs: CostModel,
        config: ServeConfig,
        *,
        num_ready: Callable[[], int] | None = None,
        reload: Callable[[], Engine] | None = None,
    ) -> None:
        """Serve the port of a model or a tower. ``costs`` are corrected. ``num_ready``: see ``PortModel``;
        ``reload``: see ``BatchManager``."""
        is_embedder = any(task.startswith("embed") for task in served.artifact.manifest.tasks)
        metrics = ModelMetrics(self._metrics, served.name, is_embedder=is_embedder)
        config = config_of_tower(config, served.artifact)
        port = local_port(engine, costs, config, self._gate, reload)
        model_info = ModelInfo.of(served.key, engine.info, costs)
        if not self._costs:  # later ones come while it serves, and must not stop it
            collect_rarely()
        self._server.add_model(PortModel(port, model_info, metrics, costs=costs, num_ready=num_ready))
        self._costs[served.key] = costs

    def close(self, key: str) -> None:
        """Answer what waits for the model or tower, close its port and its engine. Blocks."""
        del self._costs[key]
        self._server.retire(key)

    def end(self) -> None:
        """``close`` all, and end the connections. Blocks."""
        self._server.close()

    def _heartbeat(self) -> bytes:
        """Answered when the state of every queue could be read: not while a lock is never free."""
        for _ in self._metrics.gauges.collect():
            pass
        return b""


def observed_costs(models: Mapping[str, CostModel]) -> bytes:
    """The cost models by their keys, each with the speed that was observed so far."""
    return msgspec.msgpack.encode({key: {**costs.to_json(), "speed": costs.speed} for key, costs in models.items()})


def run(channel: ControlChannel) -> None:
    """Be the batch manager's process until the supervisor says stop."""
    switch_quickly()
    run_commands(channel, ManagerProcess(channel).act)


class ManagerProcess:
    """Carries out the supervisor's commands, in the main thread."""

    _config: ServeConfig
    _addresses: list[Path]
    _queues: ModelQueues

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._engines: dict[str, RemoteEngines] = {}
        self._devices = Devices()

    def act(self, command: Command, descriptors: list[int]) -> None:
        """Raises EngineError if an engine process does not answer."""
        if isinstance(command, Configure):
            self._config = command.config
            self._addresses = [path_of(address) for address in descriptors[1:]]
            self._queues = ModelQueues(self._channel, socket.socket(fileno=descriptors[0]))
        elif isinstance(command, OpenModel):
            for tower in command.served.towers:
                self._open(tower)
        elif isinstance(command, Close):
            for key in (command.key, second_key(command.key)):
                if key in self._engines:
                    self._engines.pop(key).begin_close()
                    self._queues.close(key)
        elif isinstance(command, Stop):
            for engines in self._engines.values():
                engines.begin_close()
            self._queues.end()

    def _open(self, served: Served) -> None:
        engines = RemoteEngines(
            self._addresses,
            served.key,
            devices=self._devices,
            kill=self._channel.hung,
            hang_timeout_s=self._config.hang_timeout,
            costs=None if served.costs is None else CostModel.from_json(served.costs),
        )
        config = dataclasses.replace(self._config, hang_timeout=0.0)  # the engines look after it, each its own device
        self._queues.open(served, engines, engines.costs, config, num_ready=engines.num_ready)
        self._engines[served.key] = engines
