"""The batch manager's process, where there are several devices: one queue a model, in front of the engines of all."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

from bei.config.settings import ServeConfig
from bei.multiprocess.control.channel import Channel
from bei.multiprocess.control.command_loop import obey
from bei.multiprocess.control.messages import Close, Configure, Looked, Open, Served, Step, Stop
from bei.multiprocess.remote.engine_pool import Devices, RemoteEngines
from bei.multiprocess.roles.queues import Queues
from bei.multiprocess.transport.unix_sockets import path_of
from bei.scheduler.cost_model import CostModel
from bei.server.process_tuning import switch_quickly


def run(channel: Channel) -> None:
    """Be it until the supervisor says stop."""
    switch_quickly()
    obey(channel, ManagerProcess(channel).act)


class ManagerProcess:
    """What the supervisor asks of it. Of the main thread."""

    _config: ServeConfig
    _addresses: list[Path]
    _queues: Queues

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._engines: dict[str, RemoteEngines] = {}
        self._devices = Devices()

    def act(self, step: Step, descriptors: list[int]) -> Served | None:
        """Raises EngineError where an engine process does not answer."""
        if isinstance(step, Configure):
            self._config = step.config
            self._addresses = [path_of(address) for address in descriptors[1:]]
            self._queues = Queues(self._channel, socket.socket(fileno=descriptors[0]))
        elif isinstance(step, Open):
            self._open(step.served)
        elif isinstance(step, Close):
            if step.key in self._engines:
                self._engines.pop(step.key).begin_close()
                self._queues.close(step.key)
        elif isinstance(step, Looked):
            self._queues.count(step)
        elif isinstance(step, Stop):
            for engines in self._engines.values():
                engines.begin_close()
            self._queues.end()
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
        config = dataclasses.replace(self._config, hang_timeout=0.0)  # the engines look after it, each its own device
        self._queues.open(served, engines, engines.costs, config, num_ready=engines.num_ready)
        self._engines[served.key] = engines
