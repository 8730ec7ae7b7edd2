"""The engine of a batch manager whose steps run in other processes: one a device, all behind one queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from bei.core import EngineInfo, Outputs, PackedBatch
from bei.errors import EngineDeadError, EngineDiedError, ModelNotFoundError
from bei.multiprocess.remote.engine_client import EngineLink
from bei.multiprocess.transport.channel import ChannelClosedError
from bei.multiprocess.transport.model_info import Hello
from bei.scheduler.cost_model import CostModel

log = logging.getLogger(__name__)

# While the manager in front is being closed, a step waits no longer than this for a process that is away.
_CLOSING_PATIENCE_S = 5.0

# When one process is there, the others have so long to come too. Who comes later is taken to have as many streams.
_OTHERS_WAIT_S = 5.0

# As in the batch manager, which watches the engines of its own process.
_OVERDUE_FACTOR = 20.0
_WATCH_EVERY_S = 0.25


class Devices:
    """How many steps run on each device, of all models of this process. Safe in threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._num_running: Counter[Path] = Counter()

    def notify(self) -> None:
        """A process has come or gone, or is not waited for any longer."""
        with self.changed:
            self.changed.notify_all()

    def take(self, links: Seq[EngineLink], patience_s: Callable[[], float]) -> EngineLink | None:
        """A process with a free stream, on the device with the fewest steps; None after ``patience_s``, as it is then,
        without any process. To be given back."""
        with self.changed:
            away_s = time.monotonic()
            while True:
                free = [link for link in links if link.is_up and link.num_running < link.num_streams]
                if free:
                    link = min(free, key=lambda link: self._num_running[link.address])
                    link.num_running += 1
                    self._num_running[link.address] += 1
                    return link
                if any(link.is_up for link in links):
                    away_s = time.monotonic()
                left_s = away_s + patience_s() - time.monotonic()
                if left_s <= 0:
                    return None
                self.changed.wait(left_s)

    def give(self, link: EngineLink) -> None:
        """The step is over."""
        with self.changed:
            link.num_running -= 1
            self._num_running[link.address] -= 1
            self.changed.notify_all()


class RemoteEngines:
    """One ``Engine`` over the engine processes at ``addresses``, one a device; reconnects to each by itself.

    ``info``: that of the first, with the streams of all. ``devices`` is shared by the models of this process: a step
    goes to the device with the fewest steps. While no process is there, ``run`` waits, up to ``patience_s``. A step
    that takes longer than ``hang_timeout_s`` (0: never) and twenty times what ``costs`` predict ends by ``kill(index)``
    of the process at ``addresses[index]``, or, without ``kill``, by giving up its connection. So the manager in front
    is to have no hang timeout of its own, and no ``reload``. ``costs``: of the steps, where more is known of them than
    what the first process says.
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
        """Blocks until one process has said hello, and a moment for the others. Raises ModelNotFoundError where none
        serves ``model``, EngineDiedError after ``connect_timeout_s``."""
        self._devices = devices or Devices()
        self._kill = kill
        self._hang_timeout_s = hang_timeout_s
        self._patience_s = patience_s
        self._is_closing = False
        self._links = [EngineLink(address, model, self._devices.notify) for address in addresses]
        self._stopped = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="bei-watchdog", daemon=True)
        try:
            hellos = self._hellos(model, connect_timeout_s)
        except BaseException:
            self.close()
            raise
        num_streams = sum(hellos[min(index, len(hellos) - 1)].engine.num_streams for index in range(len(addresses)))
        self._info = _joined([hello.engine for hello in hellos], num_streams)
        self._costs = costs or hellos[0].cost_model()
        if hang_timeout_s:
            self._watchdog.start()

    @property
    def info(self) -> EngineInfo:
        """The facts."""
        return self._info

    @property
    def costs(self) -> CostModel:
        """To be given to the batch manager, which corrects it."""
        return self._costs

    def num_ready(self) -> int:
        """The streams of the processes that are there now."""
        return sum(link.num_streams for link in self._links if link.is_up)

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """As engines do. The arrays lie in memory of the engine's process, which it gets back when the last is gone.

        Raises EngineDiedError if the process died meanwhile, EngineDeadError where none came back in time, EngineError.
        """
        limit_s = inf
        if self._hang_timeout_s:
            longest = int(np.diff(batch.cu_seqlens).max())
            predicted_s = self._costs.seconds(batch.num_tokens, batch.batch_size, longest)
            limit_s = max(self._hang_timeout_s, _OVERDUE_FACTOR * predicted_s)
        wanted = None if outputs is None else frozenset(outputs)
        while (link := self._devices.take(self._links, lambda: self._patience_s)) is not None:
            try:
                return link.run(batch, wanted, limit_s)
            except ChannelClosedError:  # it ended before it got the step
                continue
            finally:
                self._devices.give(link)
        what_to_do = "ask another replica, as this one stops" if self._is_closing else "restart the server"
        raise EngineDeadError(f"No engine process has been available for {self._patience_s:.0f} s: {what_to_do}.")

    def warmup(self) -> None:
        """Nothing: engine processes have warmed theirs."""

    def begin_close(self) -> None:
        """The manager in front is about to be closed: from now on ``run`` waits for processes that are away as long as
        it takes to start one, and no longer. What waits then fails, and the manager can be closed."""
        self._is_closing, self._patience_s = True, min(self._patience_s, _CLOSING_PATIENCE_S)
        self._devices.notify()

    def close(self) -> None:
        """Leave the engine processes; their engines stay loaded."""
        self._stopped.set()
        for link in self._links:
            link.close()
        if self._watchdog.ident is not None:
            self._watchdog.join()

    def _hellos(self, model: str, timeout_s: float | None) -> list[Hello]:
        """Of the processes that are there, in their order: one at least."""

        def is_known(link: EngineLink) -> bool:
            return link.hello is not None or link.refusal is not None

        def is_anybody_there() -> bool:
            return any(link.hello is not None for link in self._links) or all(is_known(link) for link in self._links)

        with self._devices.changed:
            if not self._devices.changed.wait_for(is_anybody_there, timeout_s):
                raise EngineDiedError(f"No engine process serves {model}.")
            self._devices.changed.wait_for(lambda: all(is_known(link) for link in self._links), _OTHERS_WAIT_S)
        hellos = [link.hello for link in self._links if link.hello is not None]
        if not hellos:
            raise ModelNotFoundError(f"No engine process has an engine of {model}.")
        return hellos

    def _watch(self) -> None:
        """The watchdog's thread. Counts the time it is awake itself: a stopped process is no hung engine."""
        while not self._stopped.wait(_WATCH_EVERY_S):
            for index, link in enumerate(self._links):
                for step in link.steps:
                    step.watched_s += _WATCH_EVERY_S
                    if step.watched_s > step.limit_s and not step.is_given_up:
                        step.is_given_up = True
                        log.error("a step on the engine process at %s does not end: it is ended", link.address)
                        self._end(index, link)

    def _end(self, index: int, link: EngineLink) -> None:
        try:
            if self._kill is not None:
                self._kill(index)
        except Exception:  # a border: the watchdog watches the others, too
            log.exception("an engine process could not be ended")
        if self._kill is None:
            link.disconnect()


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
