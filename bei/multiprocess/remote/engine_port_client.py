"""The engine port of a front end, whose batch manager is in another process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bei.core import Row
from bei.errors import BeiError, EngineDeadError, EngineError, ShuttingDownError
from bei.metrics.registry import ModelMetrics
from bei.multiprocess.remote.in_flight import Given, Unanswered
from bei.multiprocess.transport.channel import Channel, ChannelClosedError, Frame
from bei.multiprocess.transport.connect import Connector, started
from bei.multiprocess.transport.errors import arrived
from bei.multiprocess.transport.lease import Borrower
from bei.multiprocess.transport.loop_reader import LoopReader
from bei.multiprocess.transport.messages import Answers, Bye, Cancel, ErrorAt, RowAt, Stats, ToRemotePort, Welcome
from bei.multiprocess.transport.model_info import Hello
from bei.multiprocess.transport.sequences import submitted
from bei.port import LANES, Answer, EnginePort, LaneStats, OnAnswers, PortStats, Submission
from bei.scheduler.cost_model import CostModel
from bei.service.service import OpenPort

log = logging.getLogger(__name__)

# An item is given to so many processes, one after the other: what ends them may be the item, unless the next one knows
# better.
_MOST_TRIES = 3
# The other process says something every 100 ms. Silent for so long, it is taken to hang.
_SILENT_S = 3.0
# What waits is given up when no process has been there for so long.
_PATIENCE_S = 600.0
_PAUSE_S = 0.2

_NOTHING = LaneStats(0, 0, 0.0)

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRemotePort)


def ask_hello(address: Path, model: str, timeout_s: float | None = None) -> Hello:
    """What the process at ``address`` says of ``model``. Blocks until it is there (None: however long that takes).

    Raises ModelNotFoundError where it does not serve it, EngineDiedError after ``timeout_s``.
    """
    channel, welcome = Connector(address, model, _decoder).connect(timeout_s)
    channel.end()
    return welcome.hello


def remote_port(address: Path, model: str, costs: CostModel | None = None) -> OpenPort:
    """Opens ``RemotePort`` for a service, on its event loop. ``costs``: the service's, which is corrected as the other
    side corrects its own."""

    def open_port(on_answers: OnAnswers, metrics: ModelMetrics) -> EnginePort:
        return RemotePort(address, model, on_answers, metrics, costs, asyncio.get_running_loop())

    return open_port


class _Session(NamedTuple):
    """One connection. ``reader`` None: the port's thread reads everything."""

    channel: Channel[Any]
    borrower: Borrower
    reader: LoopReader | None

    def end(self) -> None:
        """Free it, when nobody reads any more."""
        if self.reader is not None:
            self.reader.end()
        self.borrower.end()
        self.channel.end()


@dataclass(slots=True)
class _Unseen:
    """A submission that the other side's state does not have yet. ``number``: of the connection; 0: not sent.
    ``stats``: of its items, once somebody has asked."""

    number: int
    submission: Submission
    stats: LaneStats | None = None


class RemotePort:
    """Implements ``EnginePort`` over a socket to a ``PortServer``. Reconnects by itself and submits again what is
    unanswered; an item that three processes have been given without an answer gets an EngineError.

    Made in any thread; returns when the other side has said hello (so ask for it before, where that may take long).
    ``stats().is_stalled`` while the batch manager's process, or every engine process, is away. Rows cannot be written
    to: they lie in memory of the process that has computed them, until the last view is gone.

    With ``loop``, ``on_answers`` is called on that event loop for small answers, and for others in a thread of the
    port's: one call at a time. Without, and once ``close`` has been called, always in the thread. So ``close`` may be
    called in any thread, whether the loop runs, has stopped, or waits for it.
    """

    def __init__(
        self,
        address: Path,
        model: str,
        on_answers: OnAnswers,
        metrics: ModelMetrics,
        costs: CostModel | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._model = model
        self._on_answers = on_answers
        self._metrics = metrics
        self._loop = loop
        self._connector = Connector(address, model, _decoder)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._unanswered = Unanswered()
        self._unseen: deque[_Unseen] = deque()
        self._number = 0
        self._session: _Session | None = None
        self._is_delivering = False
        self._is_closing = False
        self._death: str | None = None
        channel, welcome = self._connector.connect()
        self._costs = costs or welcome.hello.cost_model()
        session = self._adopt(channel, welcome)
        started(partial(self._serve, session), "bei-port")
        metrics.watch(self.stats, welcome.hello.engine.limits)

    @property
    def hello(self) -> Hello:
        """The latest."""
        return self._hello

    # The port.

    def submit(self, submission: Submission) -> None:
        """As the port says. Never blocks, whatever the other process does."""
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)
            if self._is_closing:
                raise ShuttingDownError("The server is shutting down: send the request to another replica.")
            given = self._unanswered.add(submission)
            if self._session is None:
                self._unseen.append(_Unseen(0, submission))
            else:
                self._give(self._session.channel, given)

    def cancel(self, request_id: int) -> None:
        """As the port says."""
        with self._lock:
            if self._unanswered.forget(request_id) and self._session is not None:
                _try_send(self._session.channel, Cancel(request_id))
            self._changed.notify_all()

    def stats(self) -> PortStats:
        """What the other side said last, and what has been submitted since."""
        now_s = time.monotonic()
        with self._lock:
            stats, silent_s = self._stats, now_s - self._heard_s
            lanes = dict(stats.lanes)
            for unseen in self._unseen:
                unseen.stats = unseen.stats or self._stats_of(unseen.submission)
                lane = unseen.submission.lane
                lanes[lane] = _added(lanes[lane], unseen.stats)
            return stats._replace(
                lanes=lanes,
                running_s=max(0.0, stats.running_s - silent_s),
                is_alive=stats.is_alive and self._death is None and not self._is_closing,
                is_stalled=stats.is_stalled or self._session is None or self._is_silent(self._session, silent_s),
                is_busy=stats.is_busy or bool(self._unseen),
            )

    def close(self) -> None:
        """Wait until all is answered, then leave. Rows that are in use stay as they are."""
        with self._lock:
            self._is_closing = True
            if self._session is not None and self._session.reader is not None:
                self._session.reader.stop()  # the loop may wait for this, or run no more
            self._changed.wait_for(lambda: not self._unanswered and not self._is_delivering)
            session = self._session
        self._connector.stop()
        self._metrics.forget(self.stats)
        if session is not None:
            _leave(session)

    # Under the lock.

    def _give(self, channel: Channel[Any], given: Given) -> None:
        """Submit to the process at the other end."""
        given.num_tries += 1
        self._number += 1
        self._unseen.append(_Unseen(self._number, given.submission))
        _try_send(channel, *submitted(given.submission, self._number))

    def _stats_of(self, submission: Submission) -> LaneStats:
        lengths = [encoding.num_tokens for _, encoding in submission.items]
        cost_s = sum([self._costs.sequence_seconds(length) for length in lengths])
        return LaneStats(len(lengths), sum(lengths), cost_s)

    def _is_silent(self, session: _Session, silent_s: float) -> bool:
        """Whether the other side has said nothing for too long. Where something waits to be read it has spoken, and
        this process has not listened: its event loop was busy."""
        return silent_s > _SILENT_S and not session.channel.has_arrived()

    def _note(self, message: Stats) -> None:
        self._stats = message.stats
        self._heard_s = time.monotonic()
        if message.speed:
            self._costs.follow(message.speed)
        self._note_seen(message.num_seen)

    def _note_seen(self, num_seen: int) -> None:
        while self._unseen and self._unseen[0].number <= num_seen:
            self._unseen.popleft()

    # The port's thread.

    def _serve(self, session: _Session) -> None:
        try:
            while True:
                self._read(session)
                self._lose()
                session.end()
                if (found := self._reconnected()) is None:
                    return
                session = self._adopt(*found)
        except BaseException as error:  # a bug: whoever waits must hear of it
            log.exception("the thread of a port has died")
            self._die(f"The port's thread has died ({type(error).__name__}): restart the server.")
            session.borrower.close_when_unused()  # what was lent may be in use
            session.borrower.wait_closed()
            session.end()

    def _adopt(self, channel: Channel[Any], welcome: Welcome) -> _Session:
        """Submit all that is unanswered to the process at the other end."""
        borrower = Borrower(channel)
        reader = None if self._loop is None else LoopReader(self._loop, channel, partial(self._handle, borrower))
        session = _Session(channel, borrower, reader)
        assert welcome.stats is not None, "ports say it"
        with self._lock:
            self._unseen.clear()
            self._number = 0
            self._hello = welcome.hello
            self._note(welcome.stats)
            self._session = session
            if reader is not None and self._is_closing:
                reader.stop()
            is_over = self._is_closing and not self._unanswered
            lost = []
            for given in list(self._unanswered.remaining()):
                if welcome.has_culprits:  # and this is none, or is known to be one
                    given.num_tries = max(0, given.num_tries - 1)
                if given.num_tries < _MOST_TRIES:
                    self._give(channel, given)
                else:
                    lost.append(given)
        message = (
            f"{_MOST_TRIES} processes ended, one after the other, while they had this input: do not send it again."
        )
        self._fail(lost, EngineError(message))
        if is_over:
            _leave(session)
        return session

    def _read(self, session: _Session) -> None:
        """Until the channel ends. The event loop reads what is small, and this thread everything else."""
        channel, _, reader = session
        while True:
            while reader is not None and not reader.is_stopped and not channel.wait_readable(0.0):
                reader.run()
            if (frame := channel.receive()) is None:
                return
            self._handle(session.borrower, frame)
            del frame  # it may hold the bytes of answers

    # The port's thread, or the event loop in its place.

    def _handle(self, borrower: Borrower, frame: Frame[Any]) -> None:
        message = frame.message
        if isinstance(message, Answers):
            self._deliver(self._settled(message, frame.payload, borrower))
        elif isinstance(message, Stats):
            with self._lock:
                self._note(message)
        elif not borrower.hears(frame):
            raise AssertionError(f"unexpected message from an engine port: {type(message).__name__}")

    def _settled(self, message: Answers, payload: npt.NDArray[np.uint8], borrower: Borrower) -> list[Answer]:
        """The answers that somebody waits for."""
        answers = []
        found: list[tuple[RowAt | ErrorAt, Row | BeiError]] = []
        found += [(at, borrower.row(at.row, payload)) for at in message.rows]
        if message.errors:
            found += [(error_at, arrived(error_at.error)) for error_at in message.errors]
        with self._lock:
            self._note_seen(message.num_seen)
            for at, result in found:
                if self._unanswered.settle(at.request_id, at.place):
                    times = message.steps[at.step] if at.step >= 0 else None
                    answers.append(Answer(at.request_id, at.place, result, times))
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
                    if self._unanswered.settle(given.submission.request_id, item.place):
                        answers.append(Answer(given.submission.request_id, item.place, error))
            self._is_delivering = True
        self._deliver(answers)

    def _lose(self) -> None:
        """The connection has ended."""
        with self._lock:
            self._session = None
            self._stats = self._stats._replace(lanes=dict.fromkeys(LANES, _NOTHING), running_s=0.0, is_busy=False)
            self._unseen.clear()
            self._unseen.extend(_Unseen(0, given.submission) for given in self._unanswered.remaining())

    def _reconnected(self) -> tuple[Channel[Any], Welcome] | None:
        """The next process; None when there is none any more."""
        with self._lock:
            if self._is_closing and not self._unanswered:
                return None
        log.warning("%s: the batch manager's process has ended; waiting for the next one", self._model)
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                found = self._connector.connect(until_s - time.monotonic())
                log.warning("%s: the next batch manager's process is there", self._model)
                return found
            except ChannelClosedError:  # closed meanwhile
                return None
            except BeiError as error:
                if time.monotonic() > until_s:
                    self._die(f"No process has served the model for {_PATIENCE_S:.0f} s ({error}): restart the server.")
                    return None
                self._connector.pause(_PAUSE_S)

    def _die(self, message: str) -> None:
        """Fail what waits and refuse what comes."""
        with self._lock:
            self._death = message
            self._session = None
            self._unseen.clear()
            lost = list(self._unanswered.remaining())
        self._fail(lost, EngineDeadError(message))


def _added(one: LaneStats, other: LaneStats) -> LaneStats:
    return LaneStats(
        one.num_sequences + other.num_sequences, one.num_tokens + other.num_tokens, one.cost_s + other.cost_s
    )


def _leave(session: _Session) -> None:
    """Stay only until nothing is used that the other process has lent."""
    _try_send(session.channel, Bye())
    session.borrower.close_when_unused()


def _try_send(channel: Channel[Any], message: Any, payload: Seq[npt.NDArray[Any]] = ()) -> None:
    """Send; to nobody where the other process has ended, as the thread that reads finds out."""
    try:
        channel.send(message, payload)
    except ChannelClosedError:
        return
