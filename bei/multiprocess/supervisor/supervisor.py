"""The supervisor: the process that the user started, where a server has several. No model, no HTTP.

It binds the sockets, owns what the others share, starts them (``fleet``), swaps artifacts, and ends the processes in
order: front ends first, then the batch manager, then engines.

A swap (SIGHUP) has the steps of ``bei.server.lifecycle.swap``, each in the processes that can take it:

1. The supervisor verifies the artifact, as at start, and compares it with the one that is served.
2. Every engine process loads it beside the other, the first one alone, since it finds out what the others go by.
3. The process with the queues opens a port for it, to which every front end connects, and asks the canary.
4. Front ends give it the requests that come from now on.
5. When no front end has a request of the former any more, it is closed: by them, the batch manager, the engines.

Until 4 an error leaves everything as it was, and so does the end of a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

from bei.artifact.manifest import Artifact, Manifest
from bei.config.devices import devices_of, usable_cores
from bei.config.settings import ServeConfig
from bei.metrics.registry import SwapResult
from bei.multiprocess.control.messages import Abandon, Close, Drain, OpenModel, Reload, Served, Switch
from bei.multiprocess.supervisor.child import Child, Tasks
from bei.multiprocess.supervisor.fleet import Fleet
from bei.server.endpoint.aliases import alias_names
from bei.server.http.listen import Sockets, log_served
from bei.server.lifecycle.signals import exit_soon
from bei.server.lifecycle.swap import ArtifactSwaps, in_thread, log_closed, log_swapped
from bei.service.image_side import check_reads_images
from bei.service.loader import check_names, manifest_of, next_artifact, verified_at
from bei.utils.module_command import module_command
from bei.utils.sighup import remember

log = logging.getLogger(__name__)

# A child's command, to which its name is added.
COMMAND: Seq[str] = module_command("bei.multiprocess")

# From the second signal on; a second later bei.server.lifecycle.signals would end this process.
_ABANDON_S = 3.0

# While the server drains, what is accepted waits so long for a batch manager or an engine that is not there. Engines
# take seconds to load; service managers end a server 30 (Kubernetes) or 90 s (systemd) after they have asked it to.
_DRAIN_S = 20.0
_LOOK_EVERY_S = 0.5

# For a swap: processes that have ended are there again within seconds, if they can be started at all.
_READY_WITHIN_S = 60.0


def run(artifacts: Seq[Path | Artifact], config: ServeConfig, sockets: Sockets) -> None:
    """Serve ``artifacts`` on ``sockets`` until SIGTERM or SIGINT; returns when every accepted request is answered.

    Raises what ``bei.server.run.run`` raises, before it serves.
    """
    code = asyncio.run(Supervisor(artifacts, config, sockets).run())
    if code:
        logging.shutdown()
        os._exit(code)  # a thread may still be hashing an artifact


class Supervisor:
    """Runs a server of several processes from start to exit. Not thread-safe: used on one event loop."""

    _fleet: Fleet
    _swaps: Swaps

    def __init__(self, artifacts: Seq[Path | Artifact], config: ServeConfig, sockets: Sockets) -> None:
        self._sources = artifacts
        self._config = config
        self._sockets = sockets
        self._sighups = remember()
        self._has_started = False
        self._reloading = asyncio.Lock()
        self._num_signals = 0
        self._is_abandoned = False
        self._exit_code = 0
        self._tasks = Tasks()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit code. Raises what the module's ``run`` raises."""
        loop = asyncio.get_running_loop()
        self._serving = asyncio.ensure_future(self._serve())
        self._stopped = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._serving
        except asyncio.CancelledError:  # a signal has come while it started
            if not self._exit_code:
                raise
        return self._exit_code

    async def _serve(self) -> None:
        config, sockets = self._config, self._sockets
        manifests = [manifest_of(source) for source in self._sources]
        check_names(manifest.name for manifest in manifests)
        for manifest in manifests:
            check_reads_images(manifest)
        alias_names(config.alias, manifests)  # a wrong one ends the start here, and not in every front end
        targets = {manifest.name: manifest.target for manifest in manifests}
        devices = devices_of(config.devices, targets, os.environ, usable_cores())
        self._fleet = Fleet(config, len(manifests), devices, COMMAND, int(time.time()))
        try:
            await self._start()
            listening = sockets.listen()
            await self._fleet.serve(listening)
            for served in self._fleet.served.values():
                log_served(served.artifact.manifest, served.artifact.certificate)
            sockets.log_addresses()
            self._has_started = True
            if self._sighups.is_due:
                self._reload()
            await self._stopped
            await self._drain(sockets)
        finally:
            sockets.close()
            await self._fleet.close()
        log.info("stopped")

    async def _start(self) -> None:
        """Start the processes, load the models in all of them, and set up swaps.

        While this process verifies the artifacts, the others load their libraries and read API keys and certificates.
        """
        _, artifacts = await asyncio.gather(self._fleet.start(), in_thread(self._verified))
        for number, artifact in enumerate(artifacts):
            await self._fleet.load_first(artifact, number)
        await self._fleet.load()
        paths = {
            artifact.manifest.name: source if isinstance(source, Path) else source.path
            for artifact, source in zip(artifacts, self._sources, strict=True)
        }
        self._swaps = Swaps(self._fleet, paths, self._config)

    def _verified(self) -> list[Artifact]:
        """The verified artifacts. Only this process hashes their files; the others get the result."""
        return [verified_at(source, self._config) for source in self._sources]

    # Signals.

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and not self._sighups.terminal.is_closed:
            if self._has_started:
                self._reload()
            else:
                self._sighups.is_due = True
            return
        self._num_signals += 1
        if not self._has_started:
            self._exit_code = 128 + number
            self._serving.cancel()
        elif self._num_signals == 1:
            log.info("draining: new requests get 503")
            self._swaps.end()
            self._stopped.set_result(None)
        else:
            self._abandon()

    def _reload(self) -> None:
        self._tasks.start(self._look_anew())

    async def _look_anew(self) -> None:
        async with self._reloading:
            log.info("SIGHUP: API keys, certificates and artifacts are looked at anew")
            await self._fleet.tell("front", Reload())
            await self._swaps.reload()

    async def _drain(self, sockets: Sockets) -> None:
        """Drain the front ends, then end all processes: front ends, batch manager, engines.

        Each front end refuses new requests until every front end has answered the requests it had accepted.
        """
        fleet = self._fleet
        fleet.do_not_replace("front")
        looking = asyncio.ensure_future(self._abandon_where_nobody_answers())
        await fleet.tell("front", Drain())
        looking.cancel()
        # First: front ends accept the connections in the backlog when they stop, and no new ones may enter it.
        sockets.close()
        await fleet.stop("front")
        if self._is_abandoned:
            fleet.kill("manager", "engine")  # a step may hang, and nobody waits for its answer
        await fleet.stop("manager")
        await fleet.stop("engine")

    async def _abandon_where_nobody_answers(self) -> None:
        away_s = 0.0
        while away_s < _DRAIN_S:
            await asyncio.sleep(_LOOK_EVERY_S)
            away_s = 0.0 if self._fleet.can_answer() else away_s + _LOOK_EVERY_S
        log.error("no process could answer for %.0f s: requests that wait for an answer get 503", _DRAIN_S)
        self._refuse_what_waits()

    def _abandon(self) -> None:
        if self._num_signals > 2:
            return
        log.warning("second signal: requests that wait for an answer get 503")
        exit_soon()
        asyncio.get_running_loop().call_later(_ABANDON_S, self._give_up)
        self._refuse_what_waits()

    def _refuse_what_waits(self) -> None:
        self._is_abandoned = True
        self._tasks.start(self._fleet.tell("front", Abandon()))

    def _give_up(self) -> None:
        log.error("processes have not ended within %.0f s of the second signal: they are ended now", _ABANDON_S)
        self._exit_code = 1
        self._fleet.kill("front", "manager", "engine")


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

    def names(self) -> Iterable[str]:
        return self._paths

    def path(self, name: str) -> Path:
        return self._paths[name]

    def served(self, name: str) -> Manifest:
        return self._fleet.served[name].artifact.manifest

    def count(self, name: str, result: SwapResult) -> None:
        self._fleet.count(name, result)

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
        new = verified = fleet.hold(artifact, former.number)
        try:
            new = await self._load(new, former, engines[0], is_first=True)
            fleet.hold_as(verified, new)
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
        found = await self._fleet.load_in(child, OpenModel(new, is_first=is_first, replaces=former))
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
