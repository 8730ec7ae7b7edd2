"""The connection of a batch manager to one engine process, made again when that has ended."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bei.core import Outputs, PackedBatch
from bei.errors import BeiError, EngineDiedError
from bei.multiprocess.transport.channel import Channel, ChannelClosedError
from bei.multiprocess.transport.connect import Connector, started
from bei.multiprocess.transport.errors import arrived
from bei.multiprocess.transport.lease import Borrower
from bei.multiprocess.transport.messages import Failed, Ran, ToRemoteEngine, Welcome
from bei.multiprocess.transport.model_info import Hello
from bei.multiprocess.transport.sequences import run_of

log = logging.getLogger(__name__)

# Between attempts, where the process refuses: it may be about to load the engine.
_PAUSE_S = 0.2

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRemoteEngine)


class RunningStep:
    """A step in the other process. ``watched_s``: how long it has been seen to run; ``limit_s``: when it hangs."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.watched_s = 0.0
        self.is_given_up = False
        # Of one result, for one who waits; an Event costs 20 us more.
        self._results: queue.SimpleQueue[Outputs | BeiError] = queue.SimpleQueue()

    def end(self, result: Outputs | BeiError) -> None:
        """The first result is the one that counts."""
        self._results.put(result)

    def wait(self) -> Outputs:
        """The result, when there is one; raises it, where it is an error."""
        result = self._results.get()
        if isinstance(result, BeiError):
            raise result
        return result


class EngineLink:
    """One engine process. ``on_change`` is called when it has come or gone. Safe in threads.

    ``hello``: what it said last; None before the first time. ``refusal``: what it refused with, if it did.
    """

    def __init__(self, address: Path, model: str, on_change: Callable[[], None]) -> None:
        self.address = address
        self.hello: Hello | None = None
        self.refusal: BeiError | None = None
        self.num_running = 0  # counted by whoever hands out the streams
        self._model = model
        self._on_change = on_change
        self._connector = Connector(address, model, _decoder)
        self._lock = threading.Lock()
        self._channel: Channel[Any] | None = None
        self._steps: dict[int, RunningStep] = {}
        self._number = 0
        self._is_closed = False
        self._thread = started(self._serve, "bei-link")

    @property
    def is_up(self) -> bool:
        """Whether steps can be run there."""
        return self._channel is not None

    @property
    def num_streams(self) -> int:
        """Those that the process has, also while it is away; 0 before it was ever there."""
        return 0 if self.hello is None else self.hello.engine.num_streams

    @property
    def steps(self) -> list[RunningStep]:
        """Those that run there now."""
        with self._lock:
            return list(self._steps.values())

    def run(self, batch: PackedBatch, outputs: frozenset[str] | None, limit_s: float) -> Outputs:
        """Run a step there. Raises EngineDiedError where the process ends before the step, what the engine raises, and
        ChannelClosedError where the process has ended before it got the step."""
        with self._lock:
            self._number += 1
            number, step = self._number, RunningStep(limit_s)
            message, arrays = run_of(batch, outputs, number)
            if self._channel is None:
                raise ChannelClosedError
            try:
                self._channel.send(message, arrays)
            except ChannelClosedError:
                self._channel = None  # the thread that reads is about to find out, too
                raise
            self._steps[number] = step
        return step.wait()

    def disconnect(self) -> None:
        """End the connection, and with it all steps; another one is made."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def close(self) -> None:
        """Leave the process for good."""
        with self._lock:
            self._is_closed = True
        self._connector.stop()
        self.disconnect()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while (found := self._connected()) is not None:
                channel, welcome = found
                borrower = Borrower(channel)
                with self._lock:
                    self.hello, self.refusal, self._channel = welcome.hello, None, channel
                    if self._is_closed:  # meanwhile, before there was a channel to close
                        channel.close()
                self._on_change()
                try:
                    self._read(channel, borrower)
                except Exception:  # a border: the other process's memory is not written again once this has ended
                    log.exception("the connection to an engine process has failed")
                finally:
                    self._lost(channel, borrower)
        except BaseException:  # a bug of ours, which a thread would end with unheard
            log.exception("the thread of an engine process has died")
            raise

    def _connected(self) -> tuple[Channel[Any], Welcome] | None:
        while not self._is_closed:
            try:
                return self._connector.connect()
            except ChannelClosedError:
                return None
            except BeiError as error:
                self.refusal = error
                self._on_change()
                self._connector.pause(_PAUSE_S)
        return None

    def _read(self, channel: Channel[Any], borrower: Borrower) -> None:
        """Until the channel ends."""
        while (frame := channel.receive()) is not None:
            message = frame.message
            if isinstance(message, Ran):
                self._end(message.number, borrower.row(message.outputs, frame.payload))
            elif isinstance(message, Failed):
                self._end(message.number, arrived(message.error))
            elif not borrower.hears(frame):
                raise AssertionError(f"unexpected message from an engine process: {type(message).__name__}")
            del frame, message  # they may hold the bytes of outputs

    def _end(self, number: int, result: Outputs | BeiError) -> None:
        with self._lock:
            step = self._steps.pop(number)
        step.end(result)

    def _lost(self, channel: Channel[Any], borrower: Borrower) -> None:
        """The process has ended: so have its steps."""
        with self._lock:
            self._channel = None
            steps, self._steps = self._steps, {}
        if not self._is_closed:
            log.error(
                "%s: the engine process at %s has ended, with %d steps in it", self._model, self.address, len(steps)
            )
        for step in steps.values():
            step.end(EngineDiedError("The engine's process ended while it ran this input."))
        borrower.end()
        channel.end()
        self._on_change()
