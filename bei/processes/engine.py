"""An engine process: the engines of all models on one device, for the batch manager. Small and replaceable."""

from __future__ import annotations

import os
import socket

import msgspec

from bei.config import ServeConfig
from bei.costs import CostModel
from bei.loading import Standing, WarmEngine, warm_again, warm_first, warm_next
from bei.metrics import Metrics
from bei.processes.control import Channel
from bei.processes.engine_server import EngineServer, ServedEngine
from bei.processes.held_files import readable
from bei.processes.hello import Hello
from bei.processes.messages import Close, Configure, Open, Served, Step, Stop
from bei.processes.pulse import PULSE
from bei.processes.steps import obey


def run(channel: Channel) -> None:
    """Be one until the supervisor says stop."""
    obey(channel, EngineProcess(channel).act)


class EngineProcess:
    """What the supervisor asks of it. Of the main thread."""

    _config: ServeConfig
    _server: EngineServer

    def __init__(self, channel: Channel) -> None:
        self._keys: set[str] = set()
        channel.offer("metrics", Metrics().snapshot)
        channel.offer(PULSE, bytes)

    def act(self, step: Step, descriptors: list[int]) -> Served | None:
        """Raises what loading an engine raises."""
        if isinstance(step, Configure):
            if step.cores:
                os.sched_setaffinity(0, step.cores)  # and the threads that this one makes: those of the engines
            self._config = step.config
            self._server = EngineServer(socket.socket(fileno=descriptors[0]), {})
            self._server.start()
        elif isinstance(step, Open):
            return self._open(step, descriptors)
        elif isinstance(step, Close):
            if step.key in self._keys:
                self._keys.remove(step.key)
                self._server.retire_engine(step.key)
        elif isinstance(step, Stop):
            self._server.close()
        return None

    def _open(self, step: Open, descriptors: list[int]) -> Served:
        warm = self._warm(step, descriptors)
        info = warm.engine.info
        found = msgspec.structs.replace(step.served, artifact=warm.artifact, device=info.device)
        if step.is_first:
            found = msgspec.structs.replace(found, num_streams=info.num_streams, costs=warm.costs.to_json())
        self._server.add_engine(found.key, ServedEngine(warm.engine, Hello.of(found.key, info, warm.costs)))
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
