"""The engine port of a front end, whose batch manager is in another process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bei.core import Row
from bei.errors import BeiError, EngineDeadError, EngineError, ShuttingDownError
from bei.metrics.registry import ModelMetrics
from bei.multiprocess.transport.channel import Channel, ChannelClosedError, Frame
from bei.multiprocess.transport.connect import connect
from bei.multiprocess.transport.messages import (
    Answers,
    Cancel,
    CarriedError,
    ModelInfo,
    PortState,
    Submit,
    ToRemotePort,
    Welcome,
    arrived,
)
from bei.port import LANES, Answer, EnginePort, Item, LaneStats, OnAnswers, PortStats, Submission
from bei.scheduler.cost_model import CostModel
from bei.service.service import OpenPort
from bei.utils.threads import started

log = logging.getLogger(__name__)

# An item is given to so many processes, one after the other: it may be the item that ends them, unless the next process
# knows better.
_MOST_TRIES = 3
# The peer sends its state every 100 ms. Silent for so long, it is taken to hang.
_SILENT_S = 3.0
# What waits is given up when no process has been there for so long.
_PATIENCE_S = 600.0
_PAUSE_S = 0.2
_LOOK_EVERY_S = 0.25
# Rows of several requests that came in one message are copied where it is larger: one of them would keep it in memory.
_SHARED_BYTES = 1 << 16

_NOTHING = LaneStats(0, 0, 0.0)


def ask_model_info(address: Path, model: str, timeout_s: float | None = None) -> ModelInfo:
    """The facts of ``model`` by the process at ``address``. Blocks until it is there (None: however long that takes).

    Raises ModelNotFoundError where it does not serve it, EngineDiedError after ``timeout_s``.
    """
    channel, welcome = connect(address, model, ToRemotePort, timeout_s)
    channel.end()
    return welcome.model_info


def remote_port(address: Path, model: str, costs: CostModel | None = None) -> OpenPort:
    """Opens ``RemotePort`` for a service, on its event loop. ``costs``: the service's, which is corrected as the other
    side corrects its own."""

    def open_port(on_answers: OnAnswers, metrics: ModelMetrics) -> EnginePort:
        return RemotePort(address, model, on_answers, metrics, asyncio.get_running_loop(), costs)

    return open_port


@dataclass(eq=False, slots=True)
class Given:
    """A submission, and how many processes have been given it. ``number``: on the connection; 0: not sent. ``stats``:
    of its items, once they were asked for."""

    submission: Submission
    num_tries: int = 0
    number: int = 0
    stats: LaneStats | None = None


class InFlight:
    """Items without an answer, resubmitted when their process is replaced. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[int, dict[int, tuple[Given, Item]]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, submission: Submission) -> Given:
        given = Given(submission)
        items = self._requests.setdefault(submission.request_id, {}) if submission.items else {}
        for item in submission.items:
            items[item.place] = given, item
        return given

    def settle(self, request_id: int, place: int) -> bool:
        """The item is answered; False if it was before, or was cancelled."""
        items = self._requests.get(request_id)
        if items is None or items.pop(place, None) is None:
            return False
        if not items:
            del self._requests[request_id]
        return True

    def forget(self, request_id: int) -> set[Given]:
        """The request is cancelled. Returns its submissions that have unanswered items."""
        return {given for given, _ in self._requests.pop(request_id, {}).values()}

    def remaining(self) -> Iterator[Given]:
        """Every submission with its unanswered items, in the order in which they came."""
        for items in self._requests.values():
            by_given: dict[Given, list[Item]] = {}
            for given, item in items.values():
                by_given.setdefault(given, []).append(item)
            for given, rest in by_given.items():
                given.submission = msgspec.structs.replace(given.submission, items=rest)
                given.number, given.stats = 0, None
                yield given


class RemotePort:
    """Implements ``EnginePort`` over a socket to a ``PortServer``. Reconnects by itself and submits again what is
    unanswered; an item that three processes have been given without an answer gets an EngineError.

    Made in any thread; returns when the peer has answered (call ``ask_model_info`` before, where that may take long).
    ``stats().is_stalled`` while the batch manager's process, or every engine process, is away. ``loop`` reads the
    answers, and calls ``on_answers``: so ``close`` may be called in any other thread.
    """

    def __init__(
        self,
        address: Path,
        model: str,
        on_answers: OnAnswers,
        metrics: ModelMetrics,
        loop: asyncio.AbstractEventLoop,
        costs: CostModel | None = None,
    ) -> None:
        self._model = model
        self._on_answers = on_answers
        self._metrics = metrics
        self._loop = loop
        self._stopped = threading.Event()
        self._connect = partial(connect, address, model, ToRemotePort, stopped=self._stopped)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._in_flight = InFlight()
        # What the peer's state does not have yet, in the order of its numbers; without a peer, all that waits.
        self._unseen: OrderedDict[Given, None] = OrderedDict()
        self._number = 0
        self._channel: Channel[Any] | None = None
        self._is_delivering = False
        self._is_closing = False
        self._death: str | None = None
        channel, welcome = self._connect()
        self._costs = costs or welcome.model_info.cost_model()
        self._adopt(channel, welcome)
        self._on_loop(self._watch, channel)
        metrics.watch(self.stats, welcome.model_info.engine.limits)

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    # The port.

    def submit(self, submission: Submission) -> None:
        """As the port says. Never blocks, whatever the other process does."""
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)
            if self._is_closing:
                raise ShuttingDownError("The server is shutting down: send the request to another replica.")
            given = self._in_flight.add(submission)
            if self._channel is None:
                self._unseen[given] = None
            else:
                self._give(self._channel, given)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            cancelled = self._in_flight.forget(request_id)
            for given in cancelled:
                self._unseen.pop(given, None)
            if cancelled and self._channel is not None:
                _try_send(self._channel, Cancel(request_id))
            self._changed.notify_all()

    def stats(self) -> PortStats:
        """The state that the peer sent last, and what has been submitted since."""
        now_s = time.monotonic()
        with self._lock:
            stats, silent_s = self._stats, now_s - self._heard_s
            lanes = dict(stats.lanes)
            for unseen in self._unseen:
                unseen.stats = unseen.stats or self._stats_of(unseen.submission)
                lane = unseen.submission.lane
                lanes[lane] = lanes[lane].plus(unseen.stats)
            return stats._replace(
                lanes=lanes,
                running_s=max(0.0, stats.running_s - silent_s),
                is_alive=stats.is_alive and self._death is None and not self._is_closing,
                is_stalled=stats.is_stalled or self._channel is None or self._is_silent(self._channel, silent_s),
                is_busy=stats.is_busy or bool(self._unseen),
            )

    def close(self) -> None:
        """Wait until all is answered, or the loop has ended; then leave. Not on the loop."""
        with self._lock:
            self._is_closing = True
            while not self._changed.wait_for(lambda: not self._in_flight and not self._is_delivering, _LOOK_EVERY_S):
                if self._loop.is_closed():
                    break
            self._stopped.set()
            self._metrics.forget(self.stats)
            if self._channel is not None:
                (self._channel.end if self._loop.is_closed() else self._channel.close)()

    # Under the lock.

    def _give(self, channel: Channel[Any], given: Given) -> None:
        """Submit to the process at the other end."""
        given.num_tries += 1
        given.number = self._number = self._number + 1
        self._unseen[given] = None
        _try_send(channel, Submit(given.number, without_spans(given.submission)))

    def _stats_of(self, submission: Submission) -> LaneStats:
        lengths = [encoding.num_tokens for _, encoding in submission.items]
        cost_s = sum([self._costs.sequence_seconds(length) for length in lengths])
        return LaneStats(len(lengths), sum(lengths), cost_s)

    def _is_silent(self, channel: Channel[Any], silent_s: float) -> bool:
        """Whether the peer has sent nothing for too long. Unread bytes do not count as silence: then this process's
        event loop was busy."""
        return silent_s > _SILENT_S and not channel.has_arrived()

    def _note(self, message: PortState) -> None:
        self._stats = message.stats
        self._heard_s = time.monotonic()
        if message.speed:
            self._costs.follow(message.speed)
        self._note_seen(message.num_seen)

    def _note_seen(self, num_seen: int) -> None:
        while self._unseen and next(iter(self._unseen)).number <= num_seen:
            self._unseen.popitem(last=False)

    # The event loop.

    def _on_loop(self, work: Any, *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing waits any more
            self._loop.call_soon_threadsafe(work, *args)

    def _watch(self, channel: Channel[Any]) -> None:
        self._loop.add_reader(channel.fileno(), self._on_readable, channel)
        self._on_readable(channel)  # more than the first message may have been read

    def _on_readable(self, channel: Channel[Any]) -> None:
        try:
            is_open = self._read(channel)
            # A process that is killed before it has read everything leaves a socket with an error. uvloop tells of that
            # once and then watches it no longer, although its last answers may still have to be read.
            while is_open and channel.has_ended():
                is_open = self._read(channel)
        except Exception as error:  # a bug: whoever waits must hear of it
            log.exception("a port has failed")
            self._die(f"The port has failed ({type(error).__name__}): restart the server.")
            is_open = False
        if not is_open:
            self._loop.remove_reader(channel.fileno())
            self._lose(channel)

    def _read(self, channel: Channel[Any]) -> bool:
        is_open = channel.fill()
        while (frame := channel.next_frame()) is not None:
            self._handle(frame)
            del frame
        return is_open

    def _handle(self, frame: Frame[Any]) -> None:
        message = frame.message
        if isinstance(message, Answers):
            self._deliver(self._settled(message, frame.num_bytes))
        else:
            assert isinstance(message, PortState), f"unexpected message from an engine port: {type(message).__name__}"
            with self._lock:
                self._note(message)

    def _settled(self, message: Answers, num_bytes: int) -> list[Answer]:
        copies = num_bytes > _SHARED_BYTES and len({at.request_id for at in message.answers}) > 1
        found = [Answer(at.request_id, at.place, _result(at.result, copies=copies), at.step) for at in message.answers]
        with self._lock:
            self._note_seen(message.num_seen)
            answers = [one for one in found if self._in_flight.settle(one.request_id, one.place)]
            self._is_delivering = True
        return answers

    def _deliver(self, answers: Seq[Answer]) -> None:
        if answers:
            try:
                self._on_answers(answers)
            except Exception:  # a border: the service's bug must not end the port
                log.exception("answers could not be handed over")
        with self._lock:
            self._is_delivering = False
            self._changed.notify_all()

    def _fail(self, lost: Iterable[Given], error: BeiError) -> None:
        """Answer everything of these submissions with ``error``."""
        answers = []
        with self._lock:
            for given in lost:
                for item in given.submission.items:
                    if self._in_flight.settle(given.submission.request_id, item.place):
                        answers.append(Answer(given.submission.request_id, item.place, error))
            self._is_delivering = True
        self._deliver(answers)

    def _adopt(self, channel: Channel[Any], welcome: Welcome) -> None:
        """Submit all that is in flight to the process at the other end."""
        assert welcome.stats is not None, "ports say it"
        lost = []
        with self._lock:
            self._unseen.clear()
            self._number = 0
            self._model_info = welcome.model_info
            self._note(welcome.stats)
            self._channel = channel
            for given in list(self._in_flight.remaining()):
                if welcome.has_culprits:  # and this is none, or is known to be one
                    given.num_tries = max(0, given.num_tries - 1)
                if given.num_tries < _MOST_TRIES:
                    self._give(channel, given)
                else:
                    lost.append(given)
            if self._stopped.is_set():
                channel.close()
        self._fail(
            lost,
            EngineError(
                f"{_MOST_TRIES} processes ended, one after the other, while they had this input: do not send it again."
            ),
        )

    def _lose(self, channel: Channel[Any]) -> None:
        """The connection has ended: make another one."""
        with self._lock:
            self._channel = None
            self._stats = self._stats._replace(
                lanes=dict.fromkeys(LANES, _NOTHING), num_running=0, running_s=0.0, is_busy=False
            )
            self._unseen = OrderedDict.fromkeys(self._in_flight.remaining())
            is_over = self._death is not None or (self._is_closing and not self._in_flight)
        channel.end()
        if not is_over:
            started(self._reconnect, "bei-port")

    def _reconnect(self) -> None:
        """The thread that connects to the next process."""
        log.warning("%s: the batch manager's process has ended; waiting for the next one", self._model)
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                channel, welcome = self._connect(until_s - time.monotonic())
                log.warning("%s: the next batch manager's process is there", self._model)
                self._on_loop(self._adopt_later, channel, welcome)
                return
            except ChannelClosedError:  # closed meanwhile
                return
            except BeiError as error:
                if time.monotonic() > until_s:
                    message = f"No process has served the model for {_PATIENCE_S:.0f} s ({error}): restart the server."
                    self._on_loop(self._die, message)
                    return
                self._stopped.wait(_PAUSE_S)

    def _adopt_later(self, channel: Channel[Any], welcome: Welcome) -> None:
        self._adopt(channel, welcome)
        self._watch(channel)

    def _die(self, message: str) -> None:
        """Fail what waits and refuse what comes."""
        with self._lock:
            self._death = message
            self._unseen.clear()
            lost = list(self._in_flight.remaining())
        self._fail(lost, EngineDeadError(message))


def _result(result: dict[str, Any] | CarriedError, *, copies: bool) -> Row | BeiError:
    if isinstance(result, CarriedError):
        return arrived(result)
    return {name: values.copy() for name, values in result.items()} if copies else result


def _try_send(channel: Channel[Any], message: object) -> None:
    """Send. That the peer has ended is found by who reads."""
    with suppress(ChannelClosedError):
        channel.send(message)


def without_spans(submission: Submission) -> Submission:
    """As it is sent: the other process does not read spans."""
    if all(item.encoding.spans is None for item in submission.items):
        return submission
    items = [Item(place, encoding._replace(spans=None)) for place, encoding in submission.items]
    return msgspec.structs.replace(submission, items=items)
