"""An engine process: the engines of all models on one device. Small and replaceable.

Where the server has one device, the batch managers are in it, too, and front ends ask it. Else it runs the steps of the
batch manager's process.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import NoReturn, Protocol

import msgspec

from bei.config.settings import ServeConfig
from bei.metrics.registry import Metrics
from bei.multiprocess.control.channel import Channel
from bei.multiprocess.control.command_loop import obey
from bei.multiprocess.control.held_files import readable
from bei.multiprocess.control.messages import Close, Configure, Looked, Open, Served, Step, Stop
from bei.multiprocess.remote.engine_server import EngineServer, ServedEngine
from bei.multiprocess.remote.recorded_engine import NotedEngine
from bei.multiprocess.roles.queues import Queues
from bei.multiprocess.shared_memory.crash_ledger import Ledger
from bei.multiprocess.supervisor.heartbeat import PULSE
from bei.multiprocess.transport.model_info import Hello
from bei.scheduler.cost_model import CostModel
from bei.server.process_tuning import switch_quickly
from bei.service.loader import Standing, WarmEngine, warm_again, warm_first, warm_next


def run(channel: Channel) -> None:
    """Be one until the supervisor says stop."""
    obey(channel, EngineProcess(channel).act)


class _Service(Protocol):
    """To whom the engines answer."""

    def add(self, served: Served, warm: WarmEngine) -> None:
        """Serve an engine from now on."""

    def retire(self, key: str) -> None:
        """Run what waits for it, and close it. Blocks."""

    def close(self) -> None:
        """``retire`` all. Blocks."""


class EngineProcess:
    """What the supervisor asks of it. Of the main thread."""

    _config: ServeConfig
    _service: _Service

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._keys: set[str] = set()

    def act(self, step: Step, descriptors: list[int]) -> Served | None:
        """Raises what loading an engine raises."""
        if isinstance(step, Configure):
            if step.cores:
                os.sched_setaffinity(0, step.cores)  # and the threads that this one makes: those of the engines
            self._config = step.config
            self._service = self._configured(step, descriptors)
        elif isinstance(step, Open):
            return self._open(step, descriptors)
        elif isinstance(step, Close):
            if step.key in self._keys:
                self._keys.remove(step.key)
                self._service.retire(step.key)
        elif isinstance(step, Looked):
            assert isinstance(self._service, _ToFrontEnds), "it counts what becomes of artifacts"
            self._service.queues.count(step)
        elif isinstance(step, Stop):
            self._service.close()
        return None

    def _configured(self, step: Configure, descriptors: list[int]) -> _Service:
        listener = socket.socket(fileno=descriptors[0])
        if step.has_queues:
            return _ToFrontEnds(self._channel, listener, Ledger.attach(descriptors[1]), step.config)
        return _ToBatchManager(self._channel, listener)

    def _open(self, step: Open, descriptors: list[int]) -> Served:
        warm = self._warm(step, descriptors)
        info = warm.engine.info
        found = msgspec.structs.replace(step.served, artifact=warm.artifact, device=info.device)
        if step.is_first:
            found = msgspec.structs.replace(found, num_streams=info.num_streams, costs=warm.costs.to_json())
        self._service.add(found, warm)
        self._keys.add(found.key)
        return found

    def _warm(self, step: Open, descriptors: list[int]) -> WarmEngine:
        served, former = step.served, step.replaces
        if not step.is_first:
            assert served.costs is not None, "the first engine has said what steps cost"
            # Not every target has the option: only what was asked for is said, or found out by measuring.
            measured = self._config.engine_streams == 0 and served.artifact.manifest.target == "cpu"
            num_streams = served.num_streams if measured else self._config.engine_streams or None
            with readable(served.artifact, descriptors) as artifact:
                engine = warm_again(artifact, self._config, num_streams)
            return WarmEngine(served.artifact, engine, CostModel.from_json(served.costs))
        if former is None:
            return warm_first(served.artifact, self._config)
        assert former.costs is not None, "the first engine has said what steps cost"
        target = former.artifact.manifest.target
        standing = Standing(former.artifact.path, target, former.num_streams, CostModel.from_json(former.costs))
        return warm_next(served.artifact, standing, self._config)


class _ToBatchManager:
    """Runs the steps of another process."""

    def __init__(self, channel: Channel, listener: socket.socket) -> None:
        self._server = EngineServer(listener, {})
        self._server.start()
        channel.offer("metrics", Metrics().snapshot)
        channel.offer(PULSE, bytes)

    def add(self, served: Served, warm: WarmEngine) -> None:
        self._server.add_engine(
            served.key, ServedEngine(warm.engine, Hello.of(served.key, warm.engine.info, warm.costs))
        )

    def retire(self, key: str) -> None:
        self._server.retire_engine(key)

    def close(self) -> None:
        self._server.close()


class _ToFrontEnds:
    """Has the queues itself. A step that hangs is the end of the process, as it is with other devices beside it: what
    waits comes again, and what ran is in the ledger."""

    def __init__(self, channel: Channel, listener: socket.socket, ledger: Ledger, config: ServeConfig) -> None:
        switch_quickly()
        self._channel = channel
        self._ledger = ledger
        self._config = config
        self.queues = Queues(channel, listener, has_culprits=ledger.has_found_steps)

    def add(self, served: Served, warm: WarmEngine) -> None:
        engine = NotedEngine(warm.engine, served.key, self._ledger)
        self.queues.open(served, engine, warm.costs, self._config, reload=self._hang)

    def retire(self, key: str) -> None:
        self.queues.close(key)

    def close(self) -> None:
        self.queues.end()

    def _hang(self) -> NoReturn:
        """Instead of another engine beside the one that hangs: the operating system frees what this one holds."""
        self._channel.hung(0)
        while True:
            threading.Event().wait()
