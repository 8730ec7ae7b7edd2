"""The engine ports of a batch manager's process, served to front ends."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bei.metrics import ModelMetrics
from bei.processes.hello import Hello
from bei.service import OpenPort


@dataclass(frozen=True)
class ServedModel:
    """A model that front ends may ask. ``open_port`` is called once, with ``metrics`` of this process.

    ``num_ready``: how many streams could run a step now (``RemoteEngines.num_ready``): while there are fewer than the
    engine has, front ends are told that waits are longer, and with none that it is stalled. None: all, always.
    ``hello.engine`` is that of the engine behind the port.
    """

    open_port: OpenPort
    hello: Hello
    metrics: ModelMetrics
    num_ready: Callable[[], int] | None = None


class PortServer:
    """Accepts front ends on ``listener``, a listening Unix socket that outlives it: it is not closed nor shut down.

    ``models``: by what front ends ask for them, "NAME@DIGEST". Each has one port, which is opened here.
    """

    def __init__(self, listener: socket.socket, models: Mapping[str, ServedModel]) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Accept from now on."""
        raise NotImplementedError

    def add_model(self, model: str, served: ServedModel) -> None:
        """Open its port; front ends may ask it when this returns."""
        raise NotImplementedError

    def retire_model(self, model: str) -> None:
        """Refuse it to who comes, run and answer what waits, close its port. Blocks. Its engine is closed with it."""
        raise NotImplementedError

    def close(self) -> None:
        """Accept nobody any more, ``retire_model`` all, end the connections. Blocks."""
        raise NotImplementedError
