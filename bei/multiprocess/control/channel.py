"""The child's end of its control socket: calls of the supervisor, and questions of and to the other processes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LoopTimeoutError  # TimeoutError itself only from Python 3.11 on
from typing import TypeAlias

from bei.errors import BeiError
from bei.multiprocess.control.messages import (
    HEADER,
    MOST_DESCRIPTORS,
    Ailing,
    Ask,
    Call,
    Done,
    Failure,
    FromChild,
    Gathered,
    Hung,
    Offer,
    Question,
    Reply,
    Served,
    Step,
    frame,
    from_supervisor,
)
from bei.server.status.peers import PATIENCE_S, Replies

log = logging.getLogger(__name__)

# Gets the id of a call, what is asked, and the descriptors that came along; in the thread that reads.
OnCall: TypeAlias = Callable[[int, Step, list[int]], object]

# The supervisor answers within the patience that it has with the others.
_MARGIN_S = 0.5


class Channel:
    """A child's end; implements ``Peers``. The process ends at once where the supervisor is gone."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._name = name
        self._sending = threading.Lock()
        self._offered: dict[str, Callable[[], bytes]] = {}
        self._questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self._asked: dict[int, Future[Replies]] = {}
        self._ids = itertools.count()

    def start(self, on_call: OnCall) -> None:
        """Read from now on, in threads of its own."""
        threading.Thread(target=self._read, args=(on_call,), name="bei-control", daemon=True).start()
        threading.Thread(target=self._answer_questions, name="bei-answers", daemon=True).start()

    # Calls.

    def done(self, call: int, served: Served | None = None) -> None:
        """What was asked for is done."""
        self._send(Done(call, served=served))

    def failed(self, call: int, error: BaseException) -> None:
        """It could not be done."""
        self._send(Done(call, failure=failure_of(error)))

    def ailing(self, reason: str) -> None:
        """Ask for another process in the place of this one."""
        self._send(Ailing(reason))

    def hung(self, index: int) -> None:
        """A step of engine process ``index`` does not end."""
        self._send(Hung(index))

    # Peers.

    @property
    def name(self) -> str:
        """As ``Peers`` has it."""
        return self._name

    def offer(self, kind: str, answer: Callable[[], bytes]) -> None:
        """As ``Peers`` has it."""
        self._offered[kind] = answer
        self._send(Offer(kind))

    async def ask(self, kind: str) -> Replies:
        """As ``Peers`` has it."""
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
        data = frame(message)
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError:
            self._end()

    def _read(self, on_call: OnCall) -> None:
        try:
            while True:
                message, descriptors = self._received()
                if isinstance(message, Call):
                    on_call(message.id, message.step, descriptors)
                elif isinstance(message, Question):
                    self._questions.put(message)
                else:
                    self._gathered(message)
        except (OSError, EOFError):
            self._end()
        except BaseException:  # a bug of ours: a child that nobody can stop must not stay
            log.exception("the control socket cannot be read")
            self._end()

    def _received(self) -> tuple[Call | Question | Gathered, list[int]]:
        head, descriptors = b"", list[int]()
        while len(head) < HEADER.size:
            part, found, _, _ = socket.recv_fds(
                self._sock, HEADER.size - len(head), MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            if not part:
                raise EOFError
            head += part
            descriptors += found
        length, num_descriptors = HEADER.unpack(head)
        assert len(descriptors) == num_descriptors, "descriptors travel with the header"
        body = bytearray()
        while len(body) < length:
            part = self._sock.recv(length - len(body))
            if not part:
                raise EOFError
            body += part
        return from_supervisor(bytes(body)), descriptors

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
            self._send(Reply(question.id, data))

    def _end(self) -> None:
        """The supervisor is gone. Nothing here is worth saving, and a thread may be inside an engine."""
        logging.shutdown()
        os._exit(1)


def failure_of(error: BaseException) -> Failure:
    """What the supervisor hears of ``error``. What is no error of ours is in the log, with its traceback."""
    if isinstance(error, BeiError):
        return Failure(error.code, str(error))
    if isinstance(error, OSError):  # files that cannot be read
        return Failure(BeiError.code, str(error))
    log.error("unexpected error", exc_info=error)
    return Failure(BeiError.code, f"unexpected error ({type(error).__name__}): the log has more")


def error_of(failure: Failure) -> BeiError:
    """The error that a child has met, here: with its code and its message."""
    error = BeiError(failure.message)
    error.code = failure.code
    return error
