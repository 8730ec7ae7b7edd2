"""An engine whose steps are noted, so that an input that ends its process is found though the queue ends with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Set

from bei.core import Engine, EngineInfo, Outputs, PackedBatch
from bei.errors import EngineDeadError, EngineDiedError
from bei.multiprocess.shared_memory.crash_ledger import GUILTY, Ledger

log = logging.getLogger(__name__)

# What a process whose engine is dead exits with.
EXIT_ENGINE_DEAD = 70


def end_process() -> None:
    """At once: threads may be inside an engine that does not return."""
    os._exit(EXIT_ENGINE_DEAD)


class NotedEngine:
    """``engine``, of the model ``name``. What it runs is in ``ledger`` meanwhile.

    A step with an input that a process has ended with raises EngineDiedError, as ``RemoteEngines`` does when a
    process ends: so the batch manager runs each of the sequences alone. Alone, such an input is run once more, and
    raises EngineDiedError if that has ended a process too. ``on_dead`` is called when the engine says that it is
    dead, or its library ends a thread; by default the process ends, to be replaced.
    """

    def __init__(self, engine: Engine, name: str, ledger: Ledger, on_dead: Callable[[], None] = end_process) -> None:
        self._engine = engine
        self._ledger = ledger
        self._on_dead = on_dead
        self._region = ledger.region(name, engine.info.limits, engine.info.num_streams)
        self._slots = list(self._region.slots)

    @property
    def info(self) -> EngineInfo:
        """Of the engine."""
        return self._engine.info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """As engines do. Raises EngineDiedError too."""
        suspect = self._suspect(batch) if self._ledger.has_suspects else None
        slot = self._slots.pop()
        slot.begin(batch)
        try:
            return self._engine.run(batch, outputs)
        except BaseException as error:  # raised again; but a library that ends threads is as good as dead
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                log.exception("the engine is dead")
                self._on_dead()
            raise
        finally:
            slot.end()
            self._slots.append(slot)
            if suspect is not None:
                self._ledger.acquit(suspect)

    def warmup(self) -> None:
        """Of the engine."""
        self._engine.warmup()

    def close(self) -> None:
        """Of the engine."""
        self._engine.close()
        self._ledger.give_back(self._region)

    def _suspect(self, batch: PackedBatch) -> bytes | None:
        """The digest of what is alone in ``batch`` and suspected, and may be run. Raises EngineDiedError."""
        digests = self._region.digests(batch)
        num_ended = max(map(self._ledger.num_ended, digests))
        if not num_ended:
            return None
        if len(digests) > 1 or num_ended >= GUILTY:
            raise EngineDiedError("The engine's process ended while it ran this input.")
        return digests[0]
