"""The child processes of a server: starts them, replaces those that end, and passes questions between them.

The supervisor and swaps write the models to have open into ``Fleet.served`` and ``Fleet.open``; a process that is
started again opens and closes models until it has those.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from bei.artifact.held_files import HeldFiles
from bei.artifact.manifest import Artifact
from bei.config.devices import Device
from bei.config.settings import ServeConfig
from bei.errors import BeiError, ProcessDiedError
from bei.metrics.aggregate import counts_of_ended
from bei.metrics.registry import Metrics, SwapResult
from bei.multiprocess.control.messages import (
    COSTS,
    HEARTBEAT,
    Ailing,
    Ask,
    Close,
    Command,
    Configure,
    Failure,
    FromChild,
    Gathered,
    Hung,
    Offer,
    OpenModel,
    Reload,
    Serve,
    Served,
    second_key,
)
from bei.multiprocess.remote.recorded_engine import StepRecords
from bei.multiprocess.shared_memory.limits_page import SharedPage
from bei.multiprocess.supervisor.child import EVERY_S, LEAST_S, Backoff, Child, Place, Role, Silence, Tasks, how_ended
from bei.multiprocess.transport.connect import SocketEndpoint
from bei.server.lifecycle.swap import in_thread
from bei.server.status.peers import ENDED
from bei.server.status.whole_server import METRICS

log = logging.getLogger(__name__)

# The process name under which the supervisor adds its own answer.
SUPERVISOR = "supervisor"

_KEEP_EVERY_S = 1.0
_LOOK_EVERY_S = 0.05
_costs_decoder = msgspec.msgpack.Decoder(dict[str, dict[str, Any]])
# Clients have bei.server.lifecycle.drain.LINGER_S to take their answers.
_FRONT_STOP_S = 15.0
_STOP_S = 5.0


class MetricTotals:
    """Metric totals of exited processes: the last snapshot of each is added to a total, so that server-wide counters
    never decrease and nothing counts twice."""

    def __init__(self) -> None:
        self._total: list[bytes] = []

    def add(self, last: bytes | None) -> None:
        if last is not None:
            self._total = [counts_of_ended([*self._total, last])]

    def with_silent(self, silent: Seq[bytes]) -> dict[str, bytes]:
        """The total under ``ENDED``, with the last snapshots of processes that live and do not answer."""
        known = [*self._total, *silent]
        return {ENDED: counts_of_ended(known)} if known else {}


class ObservedCosts:
    """The observed costs of steps, by model. The supervisor keeps them for the next batch manager's process and the
    next artifact of the model."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Any]] = {}

    def note(self, answer: bytes | None) -> None:
        """Keep the costs in the batch manager's ``answer``; None: it has not answered in time."""
        if answer is not None:
            self._models.update(_costs_decoder.decode(answer))

    def applied(self, served: Served) -> Served:
        places = {"costs": served.key, "second_costs": second_key(served.key)}
        known = {field: self._models[key] for field, key in places.items() if key in self._models}
        return msgspec.structs.replace(served, **known) if known else served

    def forget(self, key: str) -> None:
        for known in (key, second_key(key)):
            self._models.pop(known, None)


class Fleet:
    """All child processes. Not thread-safe: used on one event loop.

    Raises ConfigError if the system has no room for their sockets.
    """

    def __init__(
        self, config: ServeConfig, num_models: int, devices: Seq[Device], command: Seq[str], started_s: int
    ) -> None:
        self.served: dict[str, Served] = {}  # by name; new requests get these
        self.open: dict[str, Served] = {}  # by key; these, and replaced ones that still have requests
        self._held: dict[str, HeldFiles] = {}  # by key
        self._costs = ObservedCosts()
        self._config = config
        self._num_models = num_models
        self._devices = devices
        self._command = command
        self._started_s = started_s
        self._page = SharedPage.create(config.http_workers, num_models)
        self._ports = SocketEndpoint()
        # A single engine process also holds the queues: there is no batch manager.
        self._engines = [SocketEndpoint() for _ in devices] if len(devices) > 1 else []
        self._records = StepRecords.create() if len(devices) == 1 else None
        managers = [Place("manager", 0)] if len(devices) > 1 else []
        engines = [Place("engine", index, device.variables) for index, device in enumerate(devices)]
        self._places = [*engines, *managers, *(Place("front", index) for index in range(config.http_workers))]
        self._children: dict[Place, Child] = {}
        self._ready: set[Child] = set()
        self._listening: Seq[socket.socket] = ()
        self._stopping: set[Role] = set()
        self._totals, self._metrics = MetricTotals(), Metrics()
        self._offers: dict[str, set[str]] = {}  # names of processes, by kind
        self._tasks = Tasks()

    # The start.

    async def start(self) -> None:
        """Start all processes and send them the configuration. Raises the error of a process that refuses it."""
        for place in self._places:
            self._spawn(place)
        await asyncio.gather(*map(self._configure, self._children.values()))

    async def load_first(self, artifact: Artifact, number: int) -> None:
        """Let the first engine process load a model, and keep what it finds out, for the other processes.

        ``artifact``: verified, with its files.

        Raises ArtifactError, ConfigError, MissingDependencyError, EngineError, VerificationError, OSError.
        """
        served = self.hold(artifact, number)
        found = await self._load(self.of("engine")[0], OpenModel(served, is_first=True))
        self.hold_as(served, found)
        self.served[found.name] = self.open[found.key] = found

    async def load(self) -> None:
        """Let all other processes load the models. Raises what ``load_first`` raises, and errors of the canary."""
        _, *others = self.of("engine")
        await asyncio.gather(*map(self._catch_up, others))
        for roles in ("manager", "front"):
            await asyncio.gather(*map(self._catch_up, self.of(roles)))
        self._ready.update(self._children.values())

    async def serve(self, listening: Seq[socket.socket]) -> None:
        """Let the front ends accept connections. From now on, replace processes that end."""
        self._listening = listening
        await asyncio.gather(*(front.call(Serve(), self._listeners()) for front in self.of("front")))
        for place in self._places:
            self._tasks.start(self._keep(place))
        self._tasks.start(self._keep_answers())

    # For swaps.

    def of(self, *roles: Role) -> list[Child]:
        """The current children that have one of ``roles``, in order."""
        return [child for place, child in self._children.items() if place.role in roles]

    def with_queues(self) -> Child:
        (child,) = self.of("engine" if self._records is not None else "manager")
        return child

    async def all_ready(self, patience_s: float) -> list[Child]:
        """Wait until all children are ready, and return them. Raises ProcessDiedError after ``patience_s``."""
        until_s = time.monotonic() + patience_s
        while missing := [child for child in self._children.values() if child not in self._ready]:
            if time.monotonic() > until_s:
                raise ProcessDiedError(f"The process {missing[0].name} is being started again: try it later.")
            await asyncio.sleep(_LOOK_EVERY_S)
        return [*self._children.values()]

    def check_same(self, children: Iterable[Child]) -> None:
        """Raise ProcessDiedError if one of ``children`` has ended or was replaced."""
        for child in children:
            if self._children[child.place] is not child or not child.is_alive:
                raise ProcessDiedError(f"The process {child.name} has ended meanwhile: try it again.")

    def hold(self, artifact: Artifact, number: int) -> Served:
        """Keep the files of ``artifact``, which was just verified, for all processes that open the model: they read
        what was verified, also after its folder was replaced."""
        assert artifact.files is not None, "it was verified here"
        served = Served(artifact=artifact.without_files(), number=number)
        self._held[served.key] = artifact.files
        return served

    def hold_as(self, served: Served, found: Served) -> None:
        """``served`` is ``found`` from now on: the first engine may have completed its certificate."""
        self._held[found.key] = self._held.pop(served.key)

    def let_go(self, key: str) -> None:
        """Close the files of the model ``key``: no process will open it any more. No-op if they are not held."""
        self._costs.forget(key)
        if key in self._held:
            self._held.pop(key).close()

    async def load_in(self, child: Child, command: OpenModel) -> Served:
        """Let ``child`` open a model, whose files must be held (``hold``); returns ``command.served``, or what the
        child has found out about the model. Raises the child's error, ProcessDiedError, ArtifactHashMismatchError."""
        if child.place.role == "manager":
            return await child.call(command) or command.served
        held = self._held[command.served.key]
        await in_thread(held.check)
        with held.lent() as descriptors:
            return await child.call(command, descriptors) or command.served

    async def observed(self, served: Served) -> Served:
        """``served`` with the step costs that the batch manager has observed."""
        await self._note_costs()
        return self._costs.applied(served)

    def can_answer(self) -> bool:
        """True if processes are ready to run accepted requests."""
        return self.with_queues() in self._ready and any(child in self._ready for child in self.of("engine"))

    async def tell(self, role: Role, command: Command) -> None:
        """Send ``command`` to all ready children of ``role`` and wait for them. Errors are in the children's logs."""
        ready = [child for child in self.of(role) if child in self._ready]
        await asyncio.gather(*(child.call(command) for child in ready), return_exceptions=True)

    def count(self, name: str, result: SwapResult) -> None:
        """Count the result of a check of the model's artifact."""
        self._metrics.swap(name, result)

    # The end.

    async def stop(self, role: Role) -> None:
        """End all processes of ``role`` without replacement."""
        self._stopping.add(role)
        patience_s = _FRONT_STOP_S if role == "front" else _STOP_S
        for child in self.of(role):
            if child not in self._ready or (role != "front" and child.is_asked):
                child.kill()  # no request waits for its answer
        await asyncio.gather(*(child.stop(patience_s) for child in self.of(role)))

    def do_not_replace(self, role: Role) -> None:
        """From now on, do not replace processes of ``role`` that end; kill those that are still starting."""
        self._stopping.add(role)
        for child in self.of(role):
            if child not in self._ready:
                child.kill()

    def kill(self, *roles: Role) -> None:
        self._stopping.update(roles)
        for child in self.of(*roles):
            child.kill()

    async def close(self) -> None:
        """Kill the processes that are left, and free what the processes shared."""
        self.kill("front", "manager", "engine")
        self._tasks.cancel()
        await asyncio.gather(*(child.wait() for child in self._children.values()))
        for endpoint in (self._ports, *self._engines):
            endpoint.close()
        self._page.close()
        if self._records is not None:
            self._records.close()
        for key in list(self._held):
            self.let_go(key)

    # Children.

    def _spawn(self, place: Place) -> Child:
        child = self._children[place] = Child(place, self._command, self._on_message, self._on_end)
        return child

    async def _configure(self, child: Child) -> None:
        role, index = child.place.role, child.place.index
        has_queues = role == "engine" and self._records is not None
        if role == "front":
            descriptors = [self._ports.address, self._page.fileno()]
        elif role == "manager":
            descriptors = [self._ports.listener.fileno(), *(endpoint.address for endpoint in self._engines)]
        elif self._records is not None:
            descriptors = [self._ports.listener.fileno(), self._records.fileno()]
        else:
            descriptors = [self._engines[index].listener.fileno()]
        cores: tuple[int, ...] = self._devices[index].cores if role == "engine" else ()
        configure = Configure(self._config, index, self._num_models, self._started_s, cores, has_queues)
        await child.call(configure, descriptors)

    async def _catch_up(self, child: Child) -> None:
        """Open and close models until the child has those that it should have."""
        is_front = child.place.role == "front"
        opened: set[str] = set()
        while True:
            wanted = {served.key: served for served in (self.served if is_front else self.open).values()}
            missing, extra = wanted.keys() - opened, opened - wanted.keys()
            if not (missing or extra):
                return
            for key in extra:
                await child.call(Close(key))
                opened.discard(key)
            for key in [key for key in wanted if key in missing]:
                if key not in self._held:  # it was closed meanwhile
                    continue
                found = await self._load(child, OpenModel(self._costs.applied(wanted[key])))
                opened.add(key)
                if child.place.role == "engine" and found.device != wanted[key].device:
                    log.warning(
                        "%s: device %s is %s, but the costs of steps were measured on %s",
                        *(found.name, self._devices[child.place.index].name, found.device, wanted[key].device),
                    )

    async def _load(self, child: Child, command: OpenModel) -> Served:
        """As ``load_in``; with several devices, an error of an engine process names its device."""
        try:
            return await self.load_in(child, command)
        except BeiError as error:
            if child.place.role != "engine" or len(self._devices) == 1 or isinstance(error, ProcessDiedError):
                raise
            name = self._devices[child.place.index].name
            raise Failure(error.code, f"Device {name}: {error}").error() from error

    async def _keep(self, place: Place) -> None:
        """Whenever the process of ``place`` ends, start another one."""
        backoff = Backoff()
        while True:
            child = self._children[place]
            code = await child.wait()
            if place.role in self._stopping:
                return
            log.error("%s %s: another one is started", child.name, how_ended(code))
            self._metrics.restarted(child.name)
            while not await self._is_there_again(place, backoff.delay_s(time.monotonic())):
                if place.role in self._stopping:
                    return

    async def _is_there_again(self, place: Place, delay_s: float) -> bool:
        await asyncio.sleep(delay_s)
        if place.role in self._stopping:
            return False
        started_s, child = time.monotonic(), None
        try:
            child = self._spawn(place)
            await self._configure(child)
            await self._catch_up(child)
            if place.role == "front":
                await child.call(Serve(), self._listeners())
        except (BeiError, OSError) as error:  # OSError: there are no descriptors, or no processes, for now
            if place.role not in self._stopping:
                code = error.code if isinstance(error, BeiError) else BeiError.code
                log.error("%s cannot be started: %s: %s", place.name, code, error)
            if child is not None:
                child.kill()
                await child.wait()
            return False
        self._ready.add(child)
        if place.role == "front":  # a SIGHUP since it was configured was told to those that were ready
            await asyncio.gather(child.call(Reload()), return_exceptions=True)
        log.info("%s is ready again after %.1f s", child.name, time.monotonic() - started_s)
        return True

    def _listeners(self) -> list[int]:
        return [listener.fileno() for listener in self._listening]

    # Their messages.

    def _on_message(self, child: Child, message: FromChild) -> None:
        if isinstance(message, Ask):
            self._tasks.start(self._answer(child, message))
        elif isinstance(message, Ailing):
            log.error("%s: %s: it is replaced", child.name, message.reason)
            self._tasks.start(child.stop(_FRONT_STOP_S))
        elif isinstance(message, Hung):
            self._end_hung(self.of("engine")[message.index], "a step of %s does not end: the process is ended")
        elif isinstance(message, Offer):
            self._offers.setdefault(message.kind, set()).add(child.name)
            if message.kind == HEARTBEAT and self._config.hang_timeout:
                self._tasks.start(self._watch(child))

    def _on_end(self, child: Child) -> None:
        """Called when ``child`` ends: its last counts go into the totals before anyone can ask for metrics again."""
        self._totals.add(child.answers.get(METRICS))
        self._ready.discard(child)
        if child.place.role == "front":
            self._page.clear(child.place.index)

    async def _watch(self, child: Child) -> None:
        """Kill ``child`` if it does not answer heartbeats for the hang timeout."""
        limit_s, silence = max(self._config.hang_timeout, LEAST_S), Silence(time.monotonic())
        while silence.seconds < limit_s:
            await asyncio.sleep(EVERY_S)
            has_answered = await child.ask(HEARTBEAT) is not None
            if not child.is_alive:
                return
            # An engine's library may keep the interpreter to itself while it loads.
            is_loading = child.place.role == "engine" and child.is_asked
            silence.note(time.monotonic(), has_answered=has_answered or is_loading)
        self._end_hung(child, f"%s has not answered for {math.floor(silence.seconds)} s: the process is ended")

    def _end_hung(self, child: Child, said: str) -> None:
        """Kill ``child``, once. ``said``: the log message, with %s for its name."""
        if child.is_alive and not child.is_given_up:
            child.is_given_up = True
            log.error(said, child.name)
            self._metrics.hung(child.name)
            child.kill()

    async def _answer(self, asker: Child, question: Ask) -> None:
        """Send ``asker`` the answers of all other processes that offer this kind of question.

        An answer to METRICS also has the asker's own, and the kept totals of processes that have ended.
        """
        kind, is_kept = question.kind, question.kind == METRICS
        asked = [
            child
            for child in self._children.values()
            if child.name in self._offers.get(kind, ()) and (child is not asker or is_kept)
        ]
        found = await asyncio.gather(*(child.ask(kind) for child in asked))
        # From here on nothing changes until the answer is made: no process is counted twice, or not at all.
        answers = {
            child.name: data
            for child, data in zip(asked, found, strict=True)
            if data is not None and child.is_alive  # the totals have the counts of one that has ended
        }
        silent = [child for child in asked if child.name not in answers]
        if is_kept:
            last = [child.answers[kind] for child in silent if child.is_alive and kind in child.answers]
            answers |= self._totals.with_silent(last)
            answers[SUPERVISOR] = self._metrics.snapshot()
        asker.tell(Gathered(question.id, answers, tuple(child.name for child in silent)))

    async def _keep_answers(self) -> None:
        """Fetch the metrics and observed costs of all processes every second, so that a kill loses little."""
        while True:
            await asyncio.sleep(_KEEP_EVERY_S)
            await asyncio.gather(*(child.ask(METRICS) for child in self._children.values()))
            await self._note_costs()

    async def _note_costs(self) -> None:
        self._costs.note(await self.with_queues().ask(COSTS))
