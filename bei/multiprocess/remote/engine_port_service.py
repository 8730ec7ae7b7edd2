"""One engine port that several front ends ask: who asked what, and the way back of each answer."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.core import Row
from bei.errors import BeiError, EngineError
from bei.metrics.registry import ModelMetrics
from bei.multiprocess.shared_memory.arena import Arena, bound_of
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.multiprocess.transport.errors import carried
from bei.multiprocess.transport.lease import Lender
from bei.multiprocess.transport.messages import Answers, ErrorAt, ItemHead, RowAt, Stats, Submit
from bei.multiprocess.transport.model_info import Hello
from bei.multiprocess.transport.sequences import submission_of
from bei.port import Answer, PortStats, StepTimes
from bei.scheduler.cost_model import CostModel
from bei.service.service import OpenPort

log = logging.getLogger(__name__)

# Front ends are told at once when so much more or less work waits than they know of, seconds of the engine; else every
# now and then.
_WORTH_TELLING_S = 0.002


@dataclass(frozen=True)
class ServedModel:
    """A model that front ends may ask. ``open_port`` is called once, with ``metrics`` of this process.

    ``hello.engine`` is that of the engine behind the port. ``costs``: the port's cost model, whose corrections front
    ends follow; None: there are none. ``num_ready``: how many streams could run a step now
    (``RemoteEngines.num_ready``): while there are fewer than the engine has, front ends are told that waits are longer,
    and with none that it is stalled. None: all, always.
    """

    open_port: OpenPort
    hello: Hello
    metrics: ModelMetrics
    costs: CostModel | None = None
    num_ready: Callable[[], int] | None = None


class Client:
    """A front end's connection. ``asked``: the port's numbers of its requests, by its own. ``num_seen``: how many of
    its submissions the port has."""

    def __init__(self, channel: Channel[Any], arena: Arena) -> None:
        self.channel = channel
        self.lender = Lender(channel, arena)
        self.asked: dict[int, int] = {}
        self.num_seen = 0

    def answer(self, answers: Seq[Answer]) -> None:
        """Send answers to its requests, under its own numbers of them. To nobody, where it has left."""
        try:
            self._answer(answers)
        except ChannelClosedError:
            return
        except Exception:  # a border: one front end's answers must not cost others theirs
            log.exception("answers could not be sent to a front end")
            error = EngineError("The answer could not be handed over; the server's log says why.")
            try:
                self._answer([answer._replace(result=error) for answer in answers])
            except ChannelClosedError:
                return

    def _answer(self, answers: Seq[Answer]) -> None:
        steps: dict[StepTimes, int] = {}
        rows: list[Row] = []
        lent_at: list[tuple[int, int, int]] = []
        errors: list[ErrorAt] = []
        for request_id, place, result, times in answers:
            step = -1 if times is None else steps.setdefault(times, len(steps))
            if isinstance(result, BeiError):
                errors.append(ErrorAt(request_id, place, step, carried(result)))
            else:
                rows.append(result)
                lent_at.append((request_id, place, step))
        lent, payload = self.lender.lend(rows)
        at = [RowAt(*where, row) for where, row in zip(lent_at, lent, strict=True)]
        self.channel.send(Answers(list(steps), at, errors, self.num_seen), payload)


@dataclass(slots=True)
class _Asked:
    """A request of ``client``'s. ``remaining``: items without an answer. ``cost_s``: of an item, on average."""

    client: Client
    request_id: int
    cost_s: float
    remaining: int = 0


class ServedPort:
    """The port of one model and its front ends. ``on_change`` is called when its state is worth telling."""

    def __init__(self, served: ServedModel, on_change: Callable[[], None]) -> None:
        self.hello = served.hello
        self.arena = Arena(bound_of(served.hello.engine))
        self._costs = served.costs
        self._num_ready = served.num_ready
        self._on_change = on_change
        self._lock = threading.Lock()
        self._clients: set[Client] = set()
        self._asked: dict[int, _Asked] = {}
        self._ids = itertools.count(1)
        self._told: tuple[PortStats, float] | None = None
        self._untold_s = 0.0  # by how much more, or less, waits since
        self._port = served.open_port(self._on_answers, served.metrics)

    @property
    def has_clients(self) -> bool:
        """Whether front ends are there."""
        return bool(self._clients)

    def enter(self, client: Client) -> None:
        """It is told the port's state from now on."""
        with self._lock:
            self._clients.add(client)

    def leave(self, client: Client) -> None:
        """Cancel what it waits for. May be called twice."""
        with self._lock:
            self._clients.discard(client)
            numbers = list(client.asked.values())
            client.asked.clear()
            for number in numbers:
                self._asked.pop(number, None)
        for number in numbers:
            self._port.cancel(number)
        self._on_change()

    def submit(self, client: Client, message: Submit, payload: npt.NDArray[np.uint8]) -> None:
        """Hand the submission to the port; what that refuses is answered with the error."""
        cost_s = self._cost_s(message.items)
        with self._lock:
            number = client.asked.get(message.request_id)
            if number is None:
                number = client.asked[message.request_id] = next(self._ids)
                self._asked[number] = _Asked(client, message.request_id, cost_s / len(message.items))
            self._asked[number].remaining += len(message.items)
            self._untold_s += cost_s
        try:
            self._port.submit(submission_of(message, payload, number))
        except Exception as error:  # a border: every item has its answer
            if not isinstance(error, BeiError):
                log.exception("a submission failed")
                error = EngineError("The submission failed; the server's log says why.")
            self._on_answers([Answer(number, item.place, error) for item in message.items])
        self._tell_of_much()

    def cancel(self, client: Client, request_id: int) -> None:
        """Forget the request."""
        with self._lock:
            number = client.asked.pop(request_id, None)
            if number is None:
                return
            self._asked.pop(number, None)
        self._port.cancel(number)
        self._on_change()

    def state(self, num_seen: int) -> Stats:
        """The port's, for a front end of whose submissions ``num_seen`` are in it."""
        stats = self._port.stats()
        if self._num_ready is not None:
            num_ready = self._num_ready()
            if not num_ready:
                stats = stats._replace(is_stalled=True)
            elif num_ready < stats.num_streams:
                stats = stats._replace(slowdown=stats.slowdown * stats.num_streams / num_ready)
        return Stats(stats, 0.0 if self._costs is None else self._costs.speed, num_seen)

    def tell(self, *, in_any_case: bool) -> None:
        """Tell all front ends the port's state, if it has changed."""
        with self._lock:
            seen = {client: client.num_seen for client in self._clients}  # before the state: none may be missing there
            self._untold_s = 0.0
        if not seen:
            return
        state = self.state(0)
        if not in_any_case and (state.stats, state.speed) == self._told:
            return
        self._told = state.stats, state.speed
        for client, num_seen in seen.items():
            try:
                client.lender.forget_segments()
                if not client.channel.is_behind:
                    client.channel.send(Stats(state.stats, state.speed, num_seen))
            except ChannelClosedError:  # its own thread sees to it
                continue

    def close(self) -> None:
        """Run and answer what waits. Blocks."""
        self._port.close()

    def _on_answers(self, answers: Seq[Answer]) -> None:
        of_clients: dict[Client, list[Answer]] = {}
        with self._lock:
            for answer in answers:
                asked = self._asked.get(answer.request_id)
                if asked is None:  # cancelled meanwhile
                    continue
                asked.remaining -= 1
                self._untold_s -= asked.cost_s
                if not asked.remaining:
                    del self._asked[answer.request_id]
                    del asked.client.asked[asked.request_id]
                own = Answer(asked.request_id, answer.place, answer.result, answer.step)
                of_clients.setdefault(asked.client, []).append(own)
        for client, its_answers in of_clients.items():
            client.answer(its_answers)
        self._tell_of_much()

    def _tell_of_much(self) -> None:
        if abs(self._untold_s) >= _WORTH_TELLING_S:
            self._on_change()

    def _cost_s(self, items: Seq[ItemHead]) -> float:
        """What they take of the engine; without a cost model all is worth telling."""
        if self._costs is None:
            return _WORTH_TELLING_S * len(items)
        return sum([self._costs.sequence_seconds(item.num_tokens) for item in items])
