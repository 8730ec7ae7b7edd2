"""The engine of a batch manager whose steps run in other processes: one a device, all behind one queue."""

from __future__ import annotations

from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from pathlib import Path

from bei.core import EngineInfo, Outputs, PackedBatch
from bei.costs import CostModel
from bei.processes.hello import Hello


class Devices:
    """How many steps run on each device, of all models of this process. Safe in threads."""


class RemoteEngines:
    """One ``Engine`` over the engine processes at ``addresses``, one a device; reconnects to each by itself.

    ``info``: that of the first, with the streams of all. ``devices`` is shared by the models of this process: a step goes
    to the device with the fewest steps of its streams. While no process is there, ``run`` waits, up to ``patience_s``.
    A step that takes longer than ``hang_timeout_s`` and twenty times what ``costs`` predict (0: never) ends by
    ``kill(index)`` of the process at ``addresses[index]``, or, without ``kill``, by giving up its connection. So the
    manager in front is to have no hang timeout of its own, and no ``reload``.
    """

    def __init__(
        self,
        addresses: Seq[Path],
        model: str,
        *,
        devices: Devices | None = None,
        kill: Callable[[int], None] | None = None,
        hang_timeout_s: float = 30.0,
        connect_timeout_s: float | None = None,
        patience_s: float = 600.0,
    ) -> None:
        """Blocks until one process has said hello, and a moment for the others. Raises ModelNotFoundError where they do
        not serve ``model``, EngineDiedError after ``connect_timeout_s``."""
        raise NotImplementedError

    @property
    def info(self) -> EngineInfo:
        """The facts."""
        raise NotImplementedError

    @property
    def hello(self) -> Hello:
        """Of the first process that said it, with ``info`` of all: for ``ServedModel.hello``."""
        raise NotImplementedError

    @property
    def costs(self) -> CostModel:
        """To be given to the batch manager, which corrects it."""
        raise NotImplementedError

    def num_ready(self) -> int:
        """The streams of the processes that are there now."""
        raise NotImplementedError

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """As engines do. The arrays lie in memory of the engine's process, which it gets back when the last is gone.

        Raises EngineDiedError if the process died meanwhile, EngineDeadError where none came back in time, EngineError.
        """
        raise NotImplementedError

    def warmup(self) -> None:
        """Nothing: engine processes have warmed theirs."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the engine processes; their engines stay loaded."""
        raise NotImplementedError
