"""The batch managers of a process, one a model, and the port server in front of them."""

from __future__ import annotations

import socket
from collections.abc import Callable

from bei.config.settings import ServeConfig
from bei.core import Engine
from bei.metrics.registry import Metrics, ModelMetrics
from bei.multiprocess.control.channel import Channel
from bei.multiprocess.control.messages import Looked, Served
from bei.multiprocess.remote.engine_port_server import PortServer, ServedModel
from bei.multiprocess.supervisor.heartbeat import PULSE
from bei.multiprocess.supervisor.observed_costs import COSTS, encoded
from bei.multiprocess.transport.model_info import Hello
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.server.status.whole_server import offer_steps
from bei.service.loader import local_port


class Queues:
    """Front ends connect to ``listener``. ``has_culprits``: see ``PortServer``. Answers the questions that a process
    with queues is asked."""

    def __init__(self, channel: Channel, listener: socket.socket, *, has_culprits: bool = False) -> None:
        self._metrics = Metrics()
        self._gate = DeviceGate()
        self._costs: dict[str, CostModel] = {}  # by key
        self._server = PortServer(listener, {}, has_culprits=has_culprits)
        self._server.start()
        offer_steps(channel, self._metrics)
        channel.offer(PULSE, self._pulse)
        channel.offer(COSTS, lambda: encoded(dict(self._costs)))

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
        """Serve the port of a model. ``costs`` are corrected. ``num_ready``: see ``ServedModel``; ``reload``: see
        ``BatchManager``."""
        is_embedder = any(task.startswith("embed") for task in served.artifact.manifest.tasks)
        metrics = ModelMetrics(self._metrics, served.name, is_embedder=is_embedder)
        port = local_port(engine, costs, config, self._gate, reload)
        hello = Hello.of(served.key, engine.info, costs)
        self._server.add_model(served.key, ServedModel(port, hello, metrics, costs=costs, num_ready=num_ready))
        self._costs[served.key] = costs

    def close(self, key: str) -> None:
        """Answer what waits for the model, close its port and its engine. Blocks."""
        del self._costs[key]
        self._server.retire_model(key)

    def count(self, looked: Looked) -> None:
        """A model's artifact was looked at again."""
        self._metrics.swap(looked.name, looked.result)

    def end(self) -> None:
        """``close`` all, and leave the front ends. Blocks."""
        self._server.close()

    def _pulse(self) -> bytes:
        """Nothing, when every queue has said how it stands: one whose lock is never free says nothing."""
        for _ in self._metrics.gauges.collect():
            pass
        return b""
