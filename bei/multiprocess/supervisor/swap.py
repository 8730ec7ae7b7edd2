"""SIGHUP, where a server has several processes: the steps of ``bei.server.lifecycle.swap``, each by those who can do it.

1. The supervisor verifies the artifact, as at start, and compares it with the one that is served.
2. Every engine process loads it beside the other, the first one alone, since it finds out what the others go by.
3. The process with the queues opens a port for it, to which every front end connects, and asks the canary.
4. Front ends give it the requests that come from now on.
5. When no front end has a request of the former any more, it is closed: by them, the batch manager, the engines.

Until 4 an error leaves everything as it was, and so does the end of a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from bei.artifact.manifest import Manifest
from bei.config.settings import ServeConfig
from bei.metrics.registry import SwapResult
from bei.multiprocess.control.messages import Close, Looked, Open, Served, Switch
from bei.multiprocess.supervisor.background_tasks import Tasks
from bei.multiprocess.supervisor.child import Child
from bei.multiprocess.supervisor.fleet import Fleet
from bei.server.lifecycle.swap import ArtifactSwaps, in_thread, log_closed, log_swapped
from bei.service.loader import next_artifact

# Processes that have ended are there again within seconds, if they can be started at all.
_READY_WITHIN_S = 60.0


class Following(NamedTuple):
    """A model that every front end has ready, and all children that know of it."""

    served: Served
    children: list[Child]


class Swaps(ArtifactSwaps[Following]):
    """Swaps what ``fleet`` serves. ``paths``: where the artifacts lie, by the models' names."""

    def __init__(self, fleet: Fleet, paths: Mapping[str, Path], config: ServeConfig) -> None:
        super().__init__()
        self._fleet = fleet
        self._paths = paths
        self._config = config
        self._tasks = Tasks()

    def names(self) -> Iterable[str]:
        """The models."""
        return self._paths

    def path(self, name: str) -> Path:
        """Where the artifact of the model lies."""
        return self._paths[name]

    def served(self, name: str) -> Manifest:
        """Of the artifact that is served."""
        return self._fleet.served[name].artifact.manifest

    def count(self, name: str, result: SwapResult) -> None:
        """The model was looked at."""
        self._tasks.start(self._fleet.count(Looked(name, result)))

    async def find(self, name: str) -> Following | None:
        """A model that may take the place of the served one; None: there is no other artifact.

        Raises what ``bei.service.loader.next_artifact`` and the processes raise, ProcessDiedError, ShuttingDownError.
        """
        fleet = self._fleet
        num_engines = len(fleet.of("engine"))
        artifact = await in_thread(next_artifact, self._paths[name], self.served(name), self._config, num_engines)
        if artifact is None:
            return None
        children = await fleet.all_ready(_READY_WITHIN_S)
        former = await fleet.observed(fleet.served[name])
        engines, manager, fronts = fleet.of("engine"), fleet.of("manager"), fleet.of("front")
        new = Served(artifact=artifact)
        try:
            new = await self._load(new, former, engines[0], is_first=True)
            await fleet.hold(new)
            await asyncio.gather(*(self._load(new, former, engine) for engine in engines[1:]))
            fleet.check_same(engines)
            fleet.open[new.key] = new  # of processes that end from now on, those that follow have it too
            for child in (*manager, *fronts):
                await self._load(new, former, child)
            fleet.check_same(children)
        except BaseException:
            await self._discard(new)
            raise
        return Following(new, children)

    async def _load(self, new: Served, former: Served, child: Child, *, is_first: bool = False) -> Served:
        found = await self._fleet.load_in(child, Open(new, is_first=is_first, replaces=former))
        self.check_serving()
        return found

    async def _discard(self, new: Served) -> None:
        self._fleet.open.pop(new.key, None)
        await self._close(new.key)
        self._fleet.let_go(new.key)

    async def swap(self, name: str, found: Following) -> None:
        """Let every front end switch, and close the former when none of them has a request of it."""
        fleet, new = self._fleet, found.served
        former, fleet.served[name] = fleet.served[name], new
        await fleet.tell("front", Switch(new.key))
        self.count(name, "swapped")
        log_swapped(former.artifact.manifest, new.artifact.manifest, new.artifact.certificate)
        await fleet.tell("front", Close(former.key))
        del fleet.open[former.key]
        for role in ("manager", "engine"):
            await fleet.tell(role, Close(former.key))
        fleet.let_go(former.key)
        log_closed(former.artifact.manifest)

    async def _close(self, key: str) -> None:
        for role in ("front", "manager", "engine"):
            await self._fleet.tell(role, Close(key))
