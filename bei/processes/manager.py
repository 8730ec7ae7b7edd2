"""The batch manager's process: one queue and one batch manager a model, in front of the engines of all devices."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

from bei.batching.gate import DeviceGate
from bei.config import ServeConfig
from bei.costs import CostModel
from bei.loading import local_port
from bei.metrics import Metrics, ModelMetrics
from bei.processes.control import Channel
from bei.processes.messages import Close, Configure, Looked, Open, Served, Step, Stop
from bei.processes.observed_costs import COSTS, encoded
from bei.processes.port_server import PortServer, ServedModel
from bei.processes.pulse import PULSE
from bei.processes.remote_engine import Devices, RemoteEngines
from bei.processes.sockets import path_of
from bei.processes.steps import obey
from bei.server.interpreter import switch_quickly
from bei.server.whole import offer_steps


def run(channel: Channel) -> None:
    """Be it until the supervisor says stop."""
    switch_quickly()
    obey(channel, ManagerProcess(channel).act)


class ManagerProcess:
    """What the supervisor asks of it. Of the main thread."""

    _config: ServeConfig
    _addresses: list[Path]
    _server: PortServer

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._metrics = Metrics()
        self._gate = DeviceGate()
        self._engines: dict[str, RemoteEngines] = {}
        self._devices = Devices()
        offer_steps(channel, self._metrics)
        channel.offer(PULSE, self._pulse)
        channel.offer(COSTS, lambda: encoded({key: engines.costs for key, engines in [*self._engines.items()]}))

    def act(self, step: Step, descriptors: list[int]) -> Served | None:
        """Raises EngineError where an engine process does not answer."""
        if isinstance(step, Configure):
            self._config = step.config
            self._addresses = [path_of(address) for address in descriptors[1:]]
            self._server = PortServer(socket.socket(fileno=descriptors[0]), {})
            self._server.start()
        elif isinstance(step, Open):
            self._open(step.served)
        elif isinstance(step, Close):
            if step.key in self._engines:
                self._engines.pop(step.key).begin_close()
                self._server.retire_model(step.key)
        elif isinstance(step, Looked):
            self._metrics.swap(step.name, step.result)
        elif isinstance(step, Stop):
            for engines in self._engines.values():
                engines.begin_close()
            self._server.close()
        return None

    def _open(self, served: Served) -> None:
        """Serve the port of a model that every engine process has."""
        engines = RemoteEngines(
            self._addresses,
            served.key,
            devices=self._devices,
            kill=self._channel.hung,
            hang_timeout_s=self._config.hang_timeout,
            costs=None if served.costs is None else CostModel.from_json(served.costs),
        )
        rules = dataclasses.replace(self._config, hang_timeout=0.0)  # the engines look after it, each its own device
        is_embedder = any(task.startswith("embed") for task in served.artifact.manifest.tasks)
        metrics = ModelMetrics(self._metrics, served.name, is_embedder=is_embedder)
        port = local_port(engines, engines.costs, rules, self._gate)
        self._server.add_model(
            served.key, ServedModel(port, engines.hello, metrics, costs=engines.costs, num_ready=engines.num_ready)
        )
        self._engines[served.key] = engines

    def _pulse(self) -> bytes:
        """Nothing, when every queue has said how it stands: one whose lock is never free says nothing."""
        for _ in self._metrics.gauges.collect():
            pass
        return b""
