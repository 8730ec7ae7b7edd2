"""The engines of a device's process, served to the batch manager's process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bei.core import Engine
from bei.processes.hello import Hello


@dataclass(frozen=True)
class ServedEngine:
    """A warm engine. ``hello.engine`` is ``engine.info``."""

    engine: Engine
    hello: Hello


class EngineServer:
    """Accepts batch managers on ``listener``, a listening Unix socket that outlives it: it is not closed nor shut down.

    ``engines``: by what they are asked for, "NAME@DIGEST". ``on_dead`` is called when an engine says that it is dead
    (EngineDeadError), or one of its threads dies; by default the process ends at once, to be replaced.
    """

    def __init__(
        self,
        listener: socket.socket,
        engines: Mapping[str, ServedEngine],
        on_dead: Callable[[], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Accept from now on."""
        raise NotImplementedError

    def add_engine(self, model: str, served: ServedEngine) -> None:
        """Batch managers may ask for it when this returns."""
        raise NotImplementedError

    def retire_engine(self, model: str) -> None:
        """Refuse it to who comes, end the running steps, close the engine. Blocks."""
        raise NotImplementedError

    def close(self) -> None:
        """Accept nobody any more, ``retire_engine`` all. Blocks."""
        raise NotImplementedError
