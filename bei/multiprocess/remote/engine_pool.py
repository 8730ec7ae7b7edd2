"""The engine of a batch manager whose steps run in other processes: one a device, all behind one queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from bei.core import EngineInfo, Outputs, PackedBatch
from bei.errors import BeiError, EngineDeadError, EngineDiedError, ModelNotFoundError
from bei.multiprocess.remote.recorded_engine import digests_of
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.multiprocess.transport.connect import connect
from bei.multiprocess.transport.messages import Failed, ModelInfo, Ran, Run, ToRemoteEngine, arrived
from bei.scheduler.cost_model import CostModel
from bei.scheduler.execution import longest_s
from bei.utils.threads import started

log = logging.getLogger(__name__)

# While the manager in front is being closed, a step waits no longer than this for a process that is away.
_CLOSING_PATIENCE_S = 5.0

# When one process is there, the others have so long to come too. Who comes later is taken to have as many streams.
_OTHERS_WAIT_S = 5.0

_WATCH_EVERY_S = 0.25
# Between attempts, where the process refuses: it may be about to load the engine.
_PAUSE_S = 0.2
_MOST_SUSPECTS = 4096
# A step waits so long for a connection to a process that may have ended just now.
_CONNECT_S = 0.5


class EngineLink:
    """One engine process. ``on_change`` is called when it has come or gone. Thread-safe.

    A thread keeps one connection, and makes it again when the process has ended. Steps run over others, one each.

    ``model_info``: the latest; None before the first one. ``refusal``: the error that it refused with, if it did.
    """

    def __init__(self, address: Path, model: str, on_change: Callable[[], None]) -> None:
        self.address = address
        self.model_info: ModelInfo | None = None
        self.refusal: BeiError | None = None
        self.is_up = False
        self.num_running = 0  # counted by the ``Devices`` that give the streams
        self._model = model
        self._on_change = on_change
        self._stopped = threading.Event()
        self._connect = partial(connect, address, model, ToRemoteEngine, stopped=self._stopped)
        self._lock = threading.Lock()
        self._kept: Channel[Any] | None = None
        self._idle: list[Channel[Any]] = []
        self._thread = started(self._keep, "bei-link")

    @property
    def num_streams(self) -> int:
        """Those that the process has, also while it is away; 0 before it was ever there."""
        return 0 if self.model_info is None else self.model_info.engine.num_streams

    def run(
        self, batch: PackedBatch, outputs: frozenset[str] | None, limit_s: float, kill: Callable[[], None] | None
    ) -> Outputs:
        """Run a step there; one that takes longer than ``limit_s`` ends with the process (``kill``), or with its
        connection. Raises EngineDiedError if the process ends before the step, the engine's error, and
        ChannelClosedError if the process has ended before it got the step."""
        channel = self._connection()
        is_idle = False
        try:
            channel.send(Run(batch, outputs))
            watched_s = 0.0  # a process that is stopped watches nothing, and takes no engine to hang
            while not channel.wait_readable(_WATCH_EVERY_S):
                watched_s += _WATCH_EVERY_S
                if watched_s > limit_s:
                    limit_s = inf
                    log.error("a step on the engine process at %s does not end: it is ended", self.address)
                    (kill or channel.close)()
            frame = channel.receive()
            if frame is None:
                raise EngineDiedError("The engine's process ended while it ran this input.")
            is_idle = True
        finally:
            with self._lock:
                is_idle = is_idle and self.is_up
                if is_idle:
                    self._idle.append(channel)
            if not is_idle:
                channel.end()
        if isinstance(frame.message, Failed):
            raise arrived(frame.message.error)
        assert isinstance(frame.message, Ran), f"an engine process says {type(frame.message).__name__}"
        return frame.message.outputs

    def close(self) -> None:
        """Leave the process for good."""
        self._stopped.set()
        with self._lock:
            if self._kept is not None:
                self._kept.close()
        self._thread.join()

    def _connection(self) -> Channel[Any]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect(_CONNECT_S)[0]
        except BeiError as error:  # it has just ended; the next one has not loaded the engine
            self._stopped.wait(_PAUSE_S)
            raise ChannelClosedError from error

    def _keep(self) -> None:
        while not self._stopped.is_set():
            try:
                channel, welcome = self._connect()
            except ChannelClosedError:
                return
            except BeiError as error:
                self.refusal = error
                self._on_change()
                self._stopped.wait(_PAUSE_S)
                continue
            self._set(channel, welcome.model_info)
            channel.receive()  # at its end
            self._set(None)
            channel.end()
            if not self._stopped.is_set():
                log.error("%s: the engine process at %s has ended", self._model, self.address)

    def _set(self, channel: Channel[Any] | None, model_info: ModelInfo | None = None) -> None:
        with self._lock:
            self._kept, self.is_up = channel, channel is not None
            if model_info is not None:
                self.model_info, self.refusal = model_info, None
            idle, self._idle = self._idle, []
            if self._stopped.is_set() and channel is not None:  # meanwhile, before there was a channel to close
                channel.close()
        for other in idle:
            other.end()
        self._on_change()


class Devices:
    """How many steps run on each device, of all models of this process. Safe in threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._num_running: Counter[Path] = Counter()
        self._reserved: set[Path] = set()  # for one step alone, which may wait for others to end

    def notify(self) -> None:
        """A process has come or gone, or is not waited for any longer."""
        with self.changed:
            self.changed.notify_all()

    def take(
        self, links: Seq[EngineLink], patience_s: Callable[[], float], *, alone: bool = False
    ) -> EngineLink | None:
        """A process with a free stream, on the device with the fewest steps; None after ``patience_s``, as it is then,
        without any process. To be given back. ``alone``: no other step runs there until then."""
        with self.changed:
            away_s = time.monotonic()
            while True:
                up = [link for link in links if link.is_up]
                free = [link for link in up if link.num_running < link.num_streams]
                if link := self._least_busy(free):
                    if alone and not self._reserve(link):
                        continue
                    link.num_running += 1
                    self._num_running[link.address] += 1
                    return link
                if up:
                    away_s = time.monotonic()
                left_s = away_s + patience_s() - time.monotonic()
                if left_s <= 0:
                    return None
                self.changed.wait(left_s)

    def give(self, link: EngineLink, *, alone: bool = False) -> None:
        with self.changed:
            link.num_running -= 1
            self._num_running[link.address] -= 1
            if alone:
                self._release(link)
            self.changed.notify_all()

    def _least_busy(self, links: Seq[EngineLink]) -> EngineLink | None:
        others = [link for link in links if link.address not in self._reserved]
        return min(others, key=lambda link: self._num_running[link.address], default=None)

    def _reserve(self, link: EngineLink) -> bool:
        """Wait until nothing runs on its device; False: the process has ended meanwhile."""
        self._reserved.add(link.address)
        self.changed.wait_for(lambda: not link.is_up or not self._num_running[link.address])
        if not link.is_up:
            self._release(link)
        return link.is_up

    def _release(self, link: EngineLink) -> None:
        self._reserved.discard(link.address)
        self.changed.notify_all()


class RemoteEngines:
    """One ``Engine`` over the engine processes at ``addresses``, one a device; reconnects to each by itself.

    ``info``: that of the first, with the streams of all. ``devices`` is shared by the models of this process: a step
    goes to the device with the fewest steps. While no process is there, ``run`` waits, up to ``patience_s``. A step
    that takes longer than ``hang_timeout_s`` (0: never) and twenty times what ``costs`` predict ends by ``kill(index)``
    of the process at ``addresses[index]``, or, without ``kill``, by giving up its connection. So the manager in front
    is to have no hang timeout of its own, and no ``reload``. ``costs``: of the steps, where more is known of them than
    what the first process says.

    A sequence whose step's process has ended runs alone on its device, where it comes again by itself: a step of
    another model may have ended the process, and would do it twice.
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
        costs: CostModel | None = None,
    ) -> None:
        """Blocks until one process has answered, and a moment for the others. Raises ModelNotFoundError where none
        serves ``model``, EngineDiedError after ``connect_timeout_s``."""
        self._devices = devices or Devices()
        self._kill = kill
        self._hang_timeout_s = hang_timeout_s
        self._patience_s = patience_s
        self._is_closing = False
        self._suspects: dict[bytes, None] = {}  # digests of sequences, the oldest first
        self._links = [EngineLink(address, model, self._devices.notify) for address in addresses]
        try:
            found = self._found(model, connect_timeout_s)
        except BaseException:
            self.close()
            raise
        num_streams = sum([info.engine.num_streams for info in found])
        num_streams += (len(addresses) - len(found)) * found[-1].engine.num_streams
        self._info = _joined([info.engine for info in found], num_streams)
        self._costs = costs or found[0].cost_model()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def costs(self) -> CostModel:
        """To be given to the batch manager, which corrects it."""
        return self._costs

    def num_ready(self) -> int:
        """The streams of the processes that are there now."""
        return sum(link.num_streams for link in self._links if link.is_up)

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """As engines do. Raises EngineDiedError if the process died meanwhile, EngineDeadError if none came back in
        time, EngineError."""
        longest = int(np.diff(batch.cu_seqlens).max())
        predicted_s = self._costs.seconds(batch.num_tokens, batch.batch_size, longest)
        limit_s = longest_s(predicted_s, self._hang_timeout_s)
        wanted = None if outputs is None else frozenset(outputs)
        alone = self._is_suspect(batch)
        while (link := self._devices.take(self._links, lambda: self._patience_s, alone=alone)) is not None:
            try:
                return link.run(batch, wanted, limit_s, self._killing(link))
            except ChannelClosedError:  # it ended before it got the step
                continue
            except EngineDiedError:
                if not alone:
                    self._suspect(batch)
                raise
            finally:
                self._devices.give(link, alone=alone)
        what_to_do = "ask another replica, as this one stops" if self._is_closing else "restart the server"
        raise EngineDeadError(f"No engine process has been available for {self._patience_s:.0f} s: {what_to_do}.")

    def warmup(self) -> None:
        """Engine processes have warmed theirs."""

    def begin_close(self) -> None:
        """The manager in front is about to be closed: from now on ``run`` waits for processes that are away as long as
        it takes to start one, and no longer. What waits then fails, and the manager can be closed."""
        self._is_closing, self._patience_s = True, min(self._patience_s, _CLOSING_PATIENCE_S)
        self._devices.notify()

    def close(self) -> None:
        """Leave the engine processes; their engines stay loaded."""
        for link in self._links:
            link.close()

    def _found(self, model: str, timeout_s: float | None) -> list[ModelInfo]:
        """Of the processes that are there, in their order: one at least."""
        links = self._links

        def have_all_answered() -> bool:
            return all(link.model_info is not None or link.refusal is not None for link in links)

        with self._devices.changed:
            if not self._devices.changed.wait_for(
                lambda: any(link.model_info is not None for link in links) or have_all_answered(), timeout_s
            ):
                raise EngineDiedError(f"No engine process serves {model}.")
            self._devices.changed.wait_for(have_all_answered, _OTHERS_WAIT_S)
        found = [link.model_info for link in links if link.model_info is not None]
        if not found:
            raise ModelNotFoundError(f"No engine process has an engine of {model}.")
        return found

    def _suspect(self, batch: PackedBatch) -> None:
        self._suspects.update(dict.fromkeys(digests_of(batch)))
        while len(self._suspects) > _MOST_SUSPECTS:  # which nobody waits for any longer
            self._suspects.pop(next(iter(self._suspects)), None)

    def _is_suspect(self, batch: PackedBatch) -> bool:
        """True, once, for a sequence by itself that is suspected."""
        if not self._suspects or batch.batch_size > 1:
            return False
        return any([self._suspects.pop(digest, False) is None for digest in digests_of(batch)])

    def _killing(self, link: EngineLink) -> Callable[[], None] | None:
        return None if self._kill is None else partial(self._kill, self._links.index(link))


def _joined(infos: Seq[EngineInfo], num_streams: int) -> EngineInfo:
    """What is said of all devices together."""
    names = Counter(info.device for info in infos)
    memory = [info.memory_bytes for info in infos if info.memory_bytes is not None]
    return replace(
        infos[0],
        device=", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items()),
        num_streams=num_streams,
        memory_bytes=sum(memory) if memory else None,
        is_replaceable=False,
    )
