"""The engine ports of a process with batch managers, served to front ends."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from bei.errors import BeiError, EngineError
from bei.metrics.registry import ModelMetrics
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.multiprocess.transport.connect import ServiceServer
from bei.multiprocess.transport.messages import (
    AnswerAt,
    Answers,
    Cancel,
    ModelInfo,
    PortState,
    Submit,
    ToPortServer,
    Welcome,
    carried,
)
from bei.port import Answer, Item, PortStats, Submission
from bei.scheduler.cost_model import CostModel
from bei.service.service import OpenPort
from bei.utils.threads import started

log = logging.getLogger(__name__)

# Front ends are told at once when so much more or less work waits than they know of, seconds of the engine; else every
# now and then.
_WORTH_TELLING_S = 0.002
# They are told a port's state when it changes, but not more often than this, and after a while in any case.
_TELL_AT_MOST_EVERY_S = 0.01
_TELL_EVERY_S = 0.1


@dataclass(frozen=True)
class PortModel:
    """A model that front ends may ask. ``open_port`` is called once, with ``metrics`` of this process.

    ``model_info`` is that of the engine behind the port. ``costs``: the port's cost model, whose corrections front ends
    follow; None: there are none. ``num_ready``: how many streams could run a step now
    (``RemoteEngines.num_ready``): while there are fewer than the engine has, front ends are told that waits are longer,
    and with none that it is stalled. None: all, always.
    """

    open_port: OpenPort
    model_info: ModelInfo
    metrics: ModelMetrics
    costs: CostModel | None = None
    num_ready: Callable[[], int] | None = None


class Client:
    """A front end's connection. ``asked``: the port's numbers of its requests, by its own. ``num_seen``: how many of
    its submissions the port has."""

    def __init__(self, channel: Channel[Any]) -> None:
        self.channel = channel
        self.asked: dict[int, int] = {}
        self.num_seen = 0

    def answer(self, answers: Seq[Answer]) -> None:
        """Send answers to its requests, under its own numbers of them."""
        found = [
            AnswerAt(number, place, carried(result) if isinstance(result, BeiError) else dict(result), step)
            for number, place, result, step in answers
        ]
        with suppress(ChannelClosedError):  # it has left
            self.channel.send(Answers(found, self.num_seen))


@dataclass(slots=True)
class _Asked:
    """A request of ``client``'s. ``remaining``: items without an answer. ``cost_s``: of an item, on average."""

    client: Client
    request_id: int
    cost_s: float
    remaining: int = 0


class ServedPort:
    """The port of one model and its front ends. ``on_change`` is called when its state is worth telling."""

    def __init__(self, served: PortModel, on_change: Callable[[], None], *, has_culprits: bool) -> None:
        self._served = served
        self._on_change = on_change
        self._has_culprits = has_culprits
        self._lock = threading.Lock()
        self.clients: set[Client] = set()
        self._asked: dict[int, _Asked] = {}
        self._ids = itertools.count(1)
        self._told: tuple[PortStats, float] | None = None
        self._untold_s = 0.0  # by how much more, or less, waits since
        self._port = served.open_port(self._on_answers, served.metrics)

    def serve(self, channel: Channel[Any]) -> None:
        """A front end, until ``channel`` ends; then its requests are cancelled."""
        client = Client(channel)
        with suppress(ChannelClosedError):  # then there is nothing to receive either
            channel.send(Welcome(self._served.model_info, self.state(0), self._has_culprits))
        with self._lock:
            self.clients.add(client)
        try:
            while (frame := channel.receive()) is not None:
                message = frame.message
                if isinstance(message, Submit):
                    self._submit(client, message.submission)
                    client.num_seen = message.number  # after the submission: what has been seen is in the state
                elif isinstance(message, Cancel):
                    self._cancel(client, message.request_id)
                else:
                    raise AssertionError(f"unexpected message from a front end: {type(message).__name__}")
                del frame
        finally:
            self._leave(client)

    def state(self, num_seen: int) -> PortState:
        """The port's, for a front end of whose submissions ``num_seen`` are in it."""
        stats = self._port.stats()
        if self._served.num_ready is not None:
            num_ready = self._served.num_ready()
            if not num_ready:
                stats = stats._replace(is_stalled=True)
            elif num_ready < stats.num_streams:
                stats = stats._replace(slowdown=stats.slowdown * stats.num_streams / num_ready)
        return PortState(stats, 0.0 if self._served.costs is None else self._served.costs.speed, num_seen)

    def tell(self, *, in_any_case: bool) -> None:
        """Tell all front ends the port's state, if it has changed."""
        with self._lock:
            seen = {client: client.num_seen for client in self.clients}  # before the state: none may be missing there
            self._untold_s = 0.0
        if not seen:
            return
        state = self.state(0)
        if not in_any_case and (state.stats, state.speed) == self._told:
            return
        self._told = state.stats, state.speed
        for client, num_seen in seen.items():
            if not client.channel.is_behind:
                with suppress(ChannelClosedError):  # its own thread sees to it
                    client.channel.send(PortState(state.stats, state.speed, num_seen))

    def close(self) -> None:
        self._port.close()

    def _submit(self, client: Client, submission: Submission) -> None:
        """Hand the submission to the port; if that refuses it, each item is answered with the error."""
        cost_s = self._cost_s(submission.items)
        with self._lock:
            number = client.asked.get(submission.request_id)
            if number is None:
                number = client.asked[submission.request_id] = next(self._ids)
                self._asked[number] = _Asked(client, submission.request_id, cost_s / len(submission.items))
            self._asked[number].remaining += len(submission.items)
            self._untold_s += cost_s
        try:
            self._port.submit(msgspec.structs.replace(submission, request_id=number))
        except Exception as error:  # a border: every item has its answer
            if not isinstance(error, BeiError):
                log.exception("a submission failed")
                error = EngineError("The submission failed; the server's log says why.")
            self._on_answers([Answer(number, item.place, error) for item in submission.items])
        self._tell_of_much()

    def _cancel(self, client: Client, request_id: int) -> None:
        with self._lock:
            number = client.asked.pop(request_id, None)
            if number is None:
                return
            self._asked.pop(number, None)
        self._port.cancel(number)
        self._on_change()

    def _leave(self, client: Client) -> None:
        with self._lock:
            self.clients.discard(client)
            numbers = list(client.asked.values())
            client.asked.clear()
            for number in numbers:
                self._asked.pop(number, None)
        for number in numbers:
            self._port.cancel(number)
        self._on_change()

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
            try:
                client.answer(its_answers)
            except Exception:  # a border: one front end's answers must not cost others theirs
                log.exception("answers could not be sent to a front end")
                error = EngineError("The answer could not be handed over; the server's log says why.")
                client.answer([answer._replace(result=error) for answer in its_answers])
        self._tell_of_much()

    def _tell_of_much(self) -> None:
        if abs(self._untold_s) >= _WORTH_TELLING_S:
            self._on_change()

    def _cost_s(self, items: Seq[Item]) -> float:
        """Seconds of the engine; without a cost model all is worth telling."""
        if self._served.costs is None:
            return _WORTH_TELLING_S * len(items)
        return sum([self._served.costs.sequence_seconds(item.encoding.num_tokens) for item in items])


class PortServer(ServiceServer[ServedPort]):
    """Serves the ports of a process to front ends. ``has_culprits``: see ``Welcome``."""

    def __init__(self, listener: socket.socket, *, has_culprits: bool = False) -> None:
        super().__init__(listener, ToPortServer)
        self._has_culprits = has_culprits
        self._has_changed = threading.Event()
        self._stopped = threading.Event()
        self._retired: list[ServedPort] = []
        self._teller: threading.Thread | None = None

    def start(self) -> None:
        self._teller = started(self._tell, "bei-stats")
        super().start()

    def add_model(self, served: PortModel) -> None:
        """Open its port; front ends may ask it when this returns."""
        self._add(served.model_info.model, ServedPort(served, self._has_changed.set, has_culprits=self._has_culprits))

    def retire(self, model: str) -> None:
        """Refuse it to new clients, run and answer what waits, close its port and its engine. Blocks."""
        with self._lock:
            self._retired.append(self._services[model])  # front ends that still ask it are told that it is not alive
        super().retire(model)

    def close(self) -> None:
        """Accept no more clients, ``retire`` all, end the connections. Blocks."""
        super().close()
        self._stopped.set()
        self._has_changed.set()
        if self._teller is not None:
            self._teller.join()

    def _tell(self) -> None:
        """The thread that tells front ends the state of the ports."""
        told_s = time.monotonic()
        while not self._stopped.is_set():
            self._has_changed.wait(_TELL_EVERY_S)
            self._has_changed.clear()
            now_s = time.monotonic()
            is_due = now_s - told_s >= _TELL_EVERY_S
            with self._lock:
                self._retired = [port for port in self._retired if port.clients]
                ports = [*self._services.values(), *self._retired]
            try:
                for port in ports:
                    port.tell(in_any_case=is_due)
            except Exception:  # a border: front ends take a server that is silent to hang
                log.exception("front ends could not be told the state of a port")
            if is_due:
                told_s = now_s
            self._stopped.wait(_TELL_AT_MOST_EVERY_S)
