"""A child's end of its control socket: commands of the supervisor, and questions of and to the other processes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import socket
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LoopTimeoutError  # TimeoutError itself only from Python 3.11 on
from functools import partial
from typing import TypeAlias

from bei.errors import BeiError
from bei.multiprocess.control.messages import (
    Ailing,
    Ask,
    Call,
    Command,
    CommandDone,
    Configure,
    Failure,
    FromChild,
    FromSupervisor,
    Gathered,
    Hung,
    Offer,
    Question,
    QuestionReply,
    Served,
    Stop,
)
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.server.status.peers import PATIENCE_S, Replies
from bei.utils.log_format import configure
from bei.utils.threads import started

log = logging.getLogger(__name__)

# Gets the id of a call, its command, and the descriptors that came along; in the thread that reads.
OnCall: TypeAlias = Callable[[int, Command, list[int]], object]

# The supervisor answers within the patience that it has with the others.
_MARGIN_S = 0.5
_FLUSH_S = 5.0


class ControlChannel:
    """A child's end; implements ``Peers``. The process ends at once where the supervisor is gone."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._channel: Channel[FromSupervisor] = Channel(sock, FromSupervisor)
        self._name = name
        self._offered: dict[str, Callable[[], bytes | None]] = {}
        self._questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self._asked: dict[int, Future[Replies]] = {}
        self._ids = itertools.count()

    def start(self, on_call: OnCall) -> None:
        """Read from now on, in threads of its own."""
        started(partial(self._read, on_call), "bei-control")
        started(self._answer_questions, "bei-answers")

    # Calls.

    def done(self, call: int, served: Served | None = None) -> None:
        self._send(CommandDone(call, served=served))

    def failed(self, call: int, error: BaseException) -> None:
        self._send(CommandDone(call, failure=failure_of(error)))

    def ailing(self, reason: str) -> None:
        """Ask for another process in the place of this one."""
        self._send(Ailing(reason))

    def hung(self, index: int) -> None:
        """A step of engine process ``index`` does not end."""
        self._send(Hung(index))

    def flush(self) -> None:
        """Before the process ends."""
        self._channel.flush(_FLUSH_S)

    # Peers.

    @property
    def name(self) -> str:
        return self._name

    def offer(self, kind: str, answer: Callable[[], bytes | None]) -> None:
        self._offered[kind] = answer
        self._send(Offer(kind))

    async def ask(self, kind: str) -> Replies:
        number = next(self._ids)
        asked: Future[Replies] = Future()
        self._asked[number] = asked
        self._send(Ask(number, kind))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), PATIENCE_S + _MARGIN_S)
        except asyncio.TimeoutError:
            return Replies({}, ("supervisor",))
        finally:
            del self._asked[number]

    # Threads.

    def _send(self, message: FromChild) -> None:
        try:
            self._channel.send(message)
        except ChannelClosedError:
            self._end()

    def _read(self, on_call: OnCall) -> None:
        try:
            while (frame := self._channel.receive()) is not None:
                message = frame.message
                if isinstance(message, Call):
                    on_call(message.id, message.command, [*frame.descriptors])
                elif isinstance(message, Question):
                    self._questions.put(message)
                else:
                    self._gathered(message)
        except BaseException:  # a bug: a child that cannot be stopped must not stay
            log.exception("the control socket cannot be read")
        self._end()

    def _gathered(self, message: Gathered) -> None:
        asked = self._asked.get(message.id)
        if asked is not None and asked.set_running_or_notify_cancel():
            asked.set_result(Replies(message.answers, message.silent))

    def _answer_questions(self) -> None:
        while True:
            question = self._questions.get()
            data: bytes | None = None
            try:
                data = self._offered[question.kind]()
            except LoopTimeoutError:
                log.warning("the event loop does not answer (%s)", question.kind)
            except Exception:  # a border: a question that fails must not cost the others their answers
                log.exception("%s could not be answered", question.kind)
            self._send(QuestionReply(question.id, question.kind, data))

    def _end(self) -> None:
        """The supervisor is gone. Nothing here is worth saving, and a thread may be inside an engine."""
        logging.shutdown()
        os._exit(1)


def run_commands(channel: ControlChannel, act: Callable[[Command, list[int]], Served | None]) -> None:
    """``act`` on the commands of ``channel``, one after the other, in this thread, until ``Stop``."""
    received: queue.SimpleQueue[tuple[int, Command, list[int]]] = queue.SimpleQueue()
    channel.start(lambda *call: received.put(call))
    while True:
        number, command, descriptors = received.get()
        if isinstance(command, Configure):
            configure(command.config.log_format, channel.name)
        try:
            channel.done(number, act(command, descriptors))
        except Exception as error:  # a border: the supervisor decides what becomes of a process that cannot do this
            channel.failed(number, error)
        if isinstance(command, Stop):
            channel.flush()
            return


def failure_of(error: BaseException) -> Failure:
    """``error`` for the supervisor. An unexpected error is in the log, with its traceback."""
    if isinstance(error, BeiError):
        return Failure(error.code, str(error))
    if isinstance(error, OSError):  # files that cannot be read
        return Failure(BeiError.code, str(error))
    log.error("unexpected error", exc_info=error)
    return Failure(BeiError.code, f"unexpected error ({type(error).__name__}): the log has more")
