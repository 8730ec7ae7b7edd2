"""An InferenceService on an event loop and a thread of its own, for callers in any thread.

Threads are daemons: a process that ends without ``close`` ends all the same, when the step that runs is over.
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

# A process that exits waits at most so long for steps that run: libraries of engines may not like to lose them.
_EXIT_S = 5.0

_CLOSED = "This Model is closed: make another one."
_FORKED = (
    "A fork lacks the threads of the process that has made a Model: start processes with "
    "multiprocessing.get_context('spawn'), and make a Model in each."
)

# Of all Models of this process: their engines take turns, as those of a server do.
_device = DeviceGate()
_threads: weakref.WeakSet[ServiceThread] = weakref.WeakSet()
_process: int | None = None  # the one that made the first


class ServiceThread:
    """Runs coroutines of a service. Raises ForkedProcessError wherever it is asked in a fork of its process."""

    def __init__(self, source: Path | Artifact, config: ServeConfig, held: ExitStack) -> None:
        """Load the artifact ``source`` and wait until it answers as it did at build time.

        ``held``, which keeps it where it is, is closed when the engine has been.

        Raises what ``load_service`` raises.
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
        except BaseException:  # raised again: whoever waits may also be interrupted
            self.stop()
            raise

    @property
    def service(self) -> InferenceService:
        """To be asked for facts; its coroutines are to be submitted."""
        _check_process()
        return self._service.result()

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run ``work`` on the service's event loop. To cancel the future cancels it. Raises ShuttingDownError."""
        _check_process()
        with self._lock:
            if self._is_closing:
                raise ShuttingDownError(_CLOSED)
            return asyncio.run_coroutine_threadsafe(self._answered(work), self._loop)

    def stop(self) -> None:
        """Let everything under way end with ShuttingDownError, then the threads and the engine. Returns at once."""
        if _process != os.getpid():
            return  # they are another process's
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: the service could not be made
                    self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self, timeout_s: float | None = None) -> None:
        """``stop``, and wait until all has ended, or until ``timeout_s`` have passed."""
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
        except BaseException as error:  # a border: it is raised in the thread that waits
            self._service.set_exception(error)
        else:
            self._service.set_result(service)
            await self._stopped.wait()
            service.begin_drain()
            service.abandon()
            # Whatever was submitted has its task: it came before the event, and nothing comes after it.
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        finally:
            if service is not None:
                service.close()  # blocks, and nobody is left whom it could keep waiting


def _check_process() -> None:
    """Raise ForkedProcessError unless this process made the first Model, or nobody did."""
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise ForkedProcessError(_FORKED)


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes, and threads in the middle of a step with it."""
    give_up_s = time.monotonic() + _EXIT_S
    threads = list(_threads)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.close(max(0.0, give_up_s - time.monotonic()))
