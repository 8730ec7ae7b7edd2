"""The supervisor's side of one child: its process, its control socket, its open calls; when it is taken to hang, and
when another process takes its place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from bei.errors import ProcessDiedError
from bei.multiprocess.control.ignored_signals import IGNORED
from bei.multiprocess.control.messages import (
    Call,
    Command,
    CommandDone,
    FromChild,
    FromSupervisor,
    Offer,
    Question,
    QuestionReply,
    Served,
    Stop,
)
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.server.status.peers import PATIENCE_S
from bei.utils.threads import started

log = logging.getLogger(__name__)

Role: TypeAlias = Literal["engine", "manager", "front"]

# The socket of a process that has ended is at its end at once, unless a process of its own has inherited it.
_LAST_WORDS_S = 0.5

# How often a process is asked whether it does its work, and the least silence for which it is taken to hang, whatever
# ``hang_timeout`` says of steps: it may read a tokenizer, say, or share its core with many others.
EVERY_S = 1.0
LEAST_S = 5.0
# A round of asking takes no longer than that while the supervisor is awake.
_MOST_OF_A_ROUND_S = EVERY_S + 2 * PATIENCE_S

# So many ends within so many seconds are replaced at once: an input that crashes an engine ends two processes.
_FREE = 10
_WITHIN_S = 60.0
_FIRST_S = 0.25
_MOST_S = 5.0


@dataclass(frozen=True)
class Place:
    """What one process after the other is for: the second engine, say. ``variables``: of its environment."""

    role: Role
    index: int
    variables: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def name(self) -> str:
        """As logs, metrics and the other processes have it."""
        return self.role if self.role == "manager" else f"{self.role}-{self.index}"


class Child:
    """A process of the server. Made on the event loop. Raises OSError where the system has no room for it.

    ``on_message`` gets what is no answer, ``on_end`` is called in the moment in which it is not alive any more.
    ``answers``: the last to each kind of questions. ``is_given_up``: it hangs, and is being ended.
    """

    def __init__(
        self,
        place: Place,
        command: Seq[str],
        on_message: Callable[[Child, FromChild], None],
        on_end: Callable[[Child], None],
    ) -> None:
        self.place = place
        self.name = place.name
        self.offers: set[str] = set()
        self.answers: dict[str, bytes] = {}
        self.is_given_up = False
        self._on_message = on_message
        self._on_end = on_end
        self._ids = itertools.count()
        self._num_calls = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs, _held_back_signals():
            # A session of its own: Ctrl-C in a terminal is for the supervisor, which knows what to do in which order.
            self._process = subprocess.Popen(
                [*command, self.name], stdin=theirs.fileno(), env=_environment(place), start_new_session=True
            )
        self.pid = self._process.pid
        self._channel: Channel[FromChild] = Channel(ours, FromChild)
        self._reader = started(self._read, f"bei-{self.name}")
        started(self._wait, f"bei-{self.name}-end")

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    @property
    def is_asked(self) -> bool:
        return self._num_calls > 0

    async def call(self, command: Command, descriptors: Seq[int] = ()) -> Served | None:
        """Ask the child to do ``command``, and wait until it has. Raises the child's error, ProcessDiedError."""
        self._num_calls += 1
        try:
            served: Served | None = await self._answer(Call(next(self._ids), command), descriptors)
            return served
        finally:
            self._num_calls -= 1

    async def ask(self, kind: str) -> bytes | None:
        """The child's answer; None if it does not answer in time, or does not offer it yet."""
        if kind not in self.offers:
            return None
        try:
            data: bytes | None = await asyncio.wait_for(self._answer(Question(next(self._ids), kind)), PATIENCE_S)
            return data
        except (asyncio.TimeoutError, ProcessDiedError):
            return None

    async def _answer(self, message: Call | Question, descriptors: Seq[int] = ()) -> Any:
        if not self.is_alive:
            raise self._death()
        answer = self._waiting[message.id] = self._loop.create_future()
        try:
            self.tell(message, descriptors)
            return await answer
        finally:
            del self._waiting[message.id]

    def tell(self, message: FromSupervisor, descriptors: Seq[int] = ()) -> None:
        """Send ``message``, unless the process has ended: then its calls are settled by that."""
        with suppress(ChannelClosedError):
            self._channel.send(message, descriptors)

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it, as soon as it has ended."""
        return await asyncio.shield(self._ended)

    async def stop(self, patience_s: float) -> None:
        """Ask it to end, and end it if it has not in time."""
        self.tell(Call(next(self._ids), Stop()))
        try:
            await asyncio.wait_for(self.wait(), patience_s)
        except asyncio.TimeoutError:
            log.warning("%s has not ended in %.0f s, and is ended now", self.name, patience_s)
            self.kill()
            await self.wait()

    # Its threads.

    def _read(self) -> None:
        try:
            while (frame := self._channel.receive()) is not None:
                self._post(self._got, frame.message)
        except Exception:  # a border: another process takes the place of one that does not speak the protocol
            log.exception("%s sent an invalid message, and is ended", self.name)
            self.kill()
        finally:
            self._channel.end()

    def _wait(self) -> None:
        """What the process has said before it ended is read first: why, perhaps."""
        code = self._process.wait()
        self._reader.join(_LAST_WORDS_S)
        self._channel.close()
        self._post(self._settle_all, code)

    def _post(self, work: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work, *args)

    # On the loop.

    def _got(self, message: FromChild) -> None:
        if isinstance(message, CommandDone | QuestionReply):
            answer = self._waiting.get(message.id)
            if isinstance(message, QuestionReply):
                if message.data is not None:
                    self.answers[message.kind] = message.data
                _settle(answer, message.data)
            else:
                _settle(answer, message.served, None if message.failure is None else message.failure.error())
            return
        if isinstance(message, Offer):
            self.offers.add(message.kind)
        self._on_message(self, message)

    def _settle_all(self, code: int) -> None:
        self._ended.set_result(code)
        self._on_end(self)
        for answer in self._waiting.values():
            _settle(answer, error=self._death())

    def _death(self) -> ProcessDiedError:
        return ProcessDiedError(f"The process {self.name} {how_ended(self._ended.result())}.")


def _settle(future: asyncio.Future[Any] | None, result: object = None, error: BaseException | None = None) -> None:
    """Unless nothing waits for it any more."""
    if future is None or future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


@contextmanager
def _held_back_signals() -> Iterator[None]:
    """A process that is started in this context gets the signals that it ignores when it does so, not before: a service
    manager may send them to all processes of a server at once."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(place: Place) -> dict[str, str]:
    """Of the process. Python looks for modules in the working directory only if this one does."""
    safe = {} if {"", os.getcwd()} & {*sys.path} else {"PYTHONSAFEPATH": "1"}
    return {**os.environ, **safe, **place.variables}


def how_ended(code: int) -> str:
    """``was ended by SIGKILL``, ``ended with exit code 1``."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # of real time
        return f"was ended by signal {-code}"


class Backoff:
    """When the process of one place is started again: at once, and later and later where it ends again and again."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque()

    def delay_s(self, now_s: float) -> float:
        """Seconds to wait before another process is started in place of the one that ended at ``now_s``."""
        self._ends_s.append(now_s)
        while now_s - self._ends_s[0] > _WITHIN_S:
            self._ends_s.popleft()
        beyond = len(self._ends_s) - _FREE
        return 0.0 if beyond <= 0 else min(_MOST_S, _FIRST_S * 2.0 ** (beyond - 1))


class Silence:
    """How long one process has not answered, while the supervisor was awake: after the machine has stood still, no
    process is taken to hang."""

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self._looked_s = now_s

    def note(self, now_s: float, *, has_answered: bool) -> None:
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self.seconds = 0.0 if has_answered else self.seconds + min(passed_s, _MOST_OF_A_ROUND_S)


class Tasks:
    """Background tasks of the supervisor's event loop. Failures are logged."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        task: asyncio.Task[object] = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        for task in self._under_way:
            task.cancel()

    def _on_done(self, task: asyncio.Task[object]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected error", exc_info=error)
