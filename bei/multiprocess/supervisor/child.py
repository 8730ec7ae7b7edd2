"""The supervisor's side of one child: its process, its control socket, the calls that it has not answered yet."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from bei.errors import BeiError, ProcessDiedError
from bei.multiprocess.control.channel import error_of
from bei.multiprocess.control.messages import (
    HEADER,
    Call,
    Done,
    FromChild,
    FromSupervisor,
    Gathered,
    Offer,
    Question,
    Reply,
    Served,
    Step,
    frame,
    from_child,
)

log = logging.getLogger(__name__)

Role: TypeAlias = Literal["engine", "manager", "front"]


# The socket of a process that has ended is at its end at once, unless a process of its own has inherited it.
_LAST_WORDS_S = 0.5


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
        self.offers: set[str] = set()
        self.answers: dict[str, bytes] = {}
        self.is_given_up = False
        self._on_message = on_message
        self._on_ended = on_end
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Served | None]] = {}
        self._questions: dict[int, tuple[str, asyncio.Future[bytes | None]]] = {}
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C in a terminal is for the supervisor, which knows what to do in which order.
            self._process = subprocess.Popen(
                [*command, place.name], stdin=theirs.fileno(), env=_environment(place), start_new_session=True
            )
        ours.setblocking(False)
        self._sock = ours
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._on_end)
        self._reading = asyncio.ensure_future(self._read())

    @property
    def name(self) -> str:
        """Of its place."""
        return self.place.name

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return not self._ended.done()

    @property
    def is_asked(self) -> bool:
        """Whether there is a call that it has not answered."""
        return bool(self._calls)

    async def call(self, step: Step, descriptors: Seq[int] = ()) -> Served | None:
        """Ask the child to do ``step``, and wait until it has. Raises the child's error, ProcessDiedError."""
        number = next(self._ids)
        answer: asyncio.Future[Served | None] = self._loop.create_future()
        if not self.is_alive:
            raise self._death()
        self._calls[number] = answer
        await self._send(Call(number, step), descriptors)
        return await answer

    async def ask(self, kind: str, patience_s: float) -> bytes | None:
        """What the child offers under this name; None where it does not say in time, or does not offer it yet."""
        if not self.is_alive or kind not in self.offers:
            return None
        number = next(self._ids)
        answer: asyncio.Future[bytes | None] = self._loop.create_future()
        self._questions[number] = kind, answer
        try:
            await asyncio.wait_for(self._asked(number, kind, answer), patience_s)
        except asyncio.TimeoutError:
            return None
        finally:
            self._questions.pop(number, None)
        return answer.result()

    async def _asked(self, number: int, kind: str, answer: asyncio.Future[bytes | None]) -> None:
        await self._send(Question(number, kind), ())
        await answer

    async def tell(self, message: Gathered) -> None:
        """Send an answer to a question of the child's."""
        await self._send(message, ())

    def kill(self) -> None:
        """End it at once."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it, as soon as it has ended."""
        return await asyncio.shield(self._ended)

    async def stop(self, step: Step, patience_s: float) -> None:
        """Ask it to end, by ``step``, and end it if it has not in time."""
        asking = asyncio.ensure_future(self._quietly(step))
        try:
            await asyncio.wait_for(self.wait(), patience_s)
        except asyncio.TimeoutError:
            log.warning("%s has not ended in %.0f s, and is ended now", self.name, patience_s)
            self.kill()
            await self.wait()
        await asking

    async def _quietly(self, step: Step) -> None:
        with suppress(BeiError):  # it has ended, which is what was asked for
            await self.call(step)

    # The control socket.

    async def _send(self, message: FromSupervisor, descriptors: Seq[int]) -> None:
        """A frame that has been begun is sent to its end, though nobody may wait for that any more."""
        await asyncio.shield(self._send_whole(frame(message, len(descriptors)), descriptors))

    async def _send_whole(self, data: bytes, descriptors: Seq[int]) -> None:
        async with self._sending:
            try:
                if descriptors:
                    await self._send_descriptors(data[: HEADER.size], descriptors)
                    data = data[HEADER.size :]
                await self._loop.sock_sendall(self._sock, data)
            except OSError:
                pass  # it has ended, or is about to: that settles its calls

    async def _send_descriptors(self, head: bytes, descriptors: Seq[int]) -> None:
        """``head`` and what goes with it: a few bytes, which a socket takes whole or not at all."""
        while True:
            try:
                socket.send_fds(self._sock, [head], [*descriptors])
                return
            except BlockingIOError:  # seldom: it has much to read. asyncio sends no descriptors, nor waits for that
                await asyncio.sleep(0.01)

    async def _read(self) -> None:
        try:
            while True:
                length, _ = HEADER.unpack(await self._exactly(HEADER.size))
                self._got(from_child(await self._exactly(length)))
        except (OSError, EOFError):
            return  # it has ended, or is about to
        except Exception:  # a border: another process takes the place of one that does not speak the protocol
            log.exception("%s sent an invalid message, and is ended", self.name)
            self.kill()

    async def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = await self._loop.sock_recv(self._sock, length - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _got(self, message: FromChild) -> None:
        if isinstance(message, Done):
            answer = self._calls.pop(message.id)
            if not answer.done() and message.failure is not None:
                answer.set_exception(error_of(message.failure))
            elif not answer.done():
                answer.set_result(message.served)
        elif isinstance(message, Reply):
            kind, asked = self._questions.get(message.id, ("", None))
            if asked is not None and not asked.done():
                asked.set_result(message.data)
                if message.data is not None:
                    self.answers[kind] = message.data
        else:
            if isinstance(message, Offer):
                self.offers.add(message.kind)
            self._on_message(self, message)

    # Its end.

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._settling = asyncio.ensure_future(self._settle())

    async def _settle(self) -> None:
        """What it has said before it ended is heard first: why, perhaps."""
        await asyncio.wait([self._reading], timeout=_LAST_WORDS_S)
        self._reading.cancel()
        code = self._process.wait()
        os.close(self._pidfd)
        self._ended.set_result(code)
        self._on_ended(self)
        self._sock.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._death())
        for _, asked in self._questions.values():
            if not asked.done():
                asked.set_result(None)

    def _death(self) -> ProcessDiedError:
        return ProcessDiedError(f"The process {self.name} {how_ended(self._ended.result())}.")


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
