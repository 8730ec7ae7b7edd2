"""An InferenceService with its own event loop and thread, for callers in any thread.

The threads are daemons: a process may exit without ``close``; it waits for the running step.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.errors import ForkedProcessError, ShuttingDownError
from bei.metrics.registry import Metrics
from bei.scheduler.device_gate import DeviceGate
from bei.service.loader import load_service
from bei.service.service import InferenceService

T = TypeVar("T")

# An exiting process waits at most this long for running steps, which engines' libraries may not survive losing.
_EXIT_S = 5.0

_CLOSED = "This Model is closed: make another one."
_FORKED = (
    "A fork lacks the threads of the process that has made a Model: start processes with "
    "multiprocessing.get_context('spawn'), and make a Model in each."
)

# Shared by all Models of this process: their engines take turns, as in a server.
_device = DeviceGate()
_threads: weakref.WeakSet[ServiceThread] = weakref.WeakSet()
_process: int | None = None  # the id of the process that made the first Model


class ServiceThread:
    """Runs coroutines of a service. Raises ForkedProcessError in a fork of its process."""

    def __init__(self, source: Path | Artifact, config: ServeConfig, held: ExitStack) -> None:
        """Load the artifact ``source`` and wait until it answers as it did at build time.

        ``held`` keeps the artifact in place, and is closed after the engine. Raises what ``load_service`` raises.
        """
        _check_process()
        self._lock = threading.RLock()  # a finalizer may come while it is held
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._service: Future[InferenceService] = Future()
        self._thread = threading.Thread(target=self._run, args=(source, config, held), name="bei-model", daemon=True)
        self._thread.start()
        _threads.add(self)
        try:
            self._service.result()
        except BaseException:  # also KeyboardInterrupt while waiting
            self.stop()
            raise

    @property
    def service(self) -> InferenceService:
        """To read facts from; run its coroutines by ``submit``."""
        _check_process()
        return self._service.result()

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run ``work`` on the service's event loop. Cancelling the future cancels it. Raises ShuttingDownError."""
        _check_process()
        with self._lock:
            if self._is_closing:
                raise ShuttingDownError(_CLOSED)
            return asyncio.run_coroutine_threadsafe(self._answered(work), self._loop)

    def stop(self) -> None:
        """End calls in flight with ShuttingDownError, then the threads and the engine. Does not wait."""
        if _process != os.getpid():
            return  # the threads are another process's
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: the service failed to load
                    self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self, timeout_s: float | None = None) -> None:
        """``stop``, and wait for the thread to end, for at most ``timeout_s``."""
        if _process == os.getpid():
            self.stop()
            self._thread.join(timeout_s)

    async def _answered(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await work()
        except ShuttingDownError:
            raise ShuttingDownError(_CLOSED) from None

    def _run(self, source: Path | Artifact, config: ServeConfig, held: ExitStack) -> None:
        try:
            with held:
                self._loop.run_until_complete(self._serve(source, config))
        finally:
            self._loop.close()

    async def _serve(self, source: Path | Artifact, config: ServeConfig) -> None:
        service = None
        try:
            service = load_service(source, config, Metrics(), _device)
            await service.check_ready()
        except BaseException as error:  # raised again in the waiting thread
            self._service.set_exception(error)
        else:
            self._service.set_result(service)
            await self._stopped.wait()
            service.begin_drain()
            service.abandon()
            # All submitted work has its task by now: ``submit`` refuses work once the event is set.
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        finally:
            if service is not None:
                service.close()  # blocks, but the loop has no other work left


def _check_process() -> None:
    """Raise ForkedProcessError if another process made the first Model."""
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise ForkedProcessError(_FORKED)


@atexit.register
def _close_all() -> None:
    """Close all before the interpreter exits, which would kill threads in the middle of a step."""
    give_up_s = time.monotonic() + _EXIT_S
    threads = list(_threads)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.close(max(0.0, give_up_s - time.monotonic()))
