"""Progress of a TensorRT build for people, and its cancellation by Ctrl-C."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from bei_build.targets.base import Say

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule

_INTERVAL_S = 0.2  # between two lines: TensorRT completes a thousand steps per second

ResultT = TypeVar("ResultT")


def monitor_of(trt: TensorRTModule, say: Say, cancelled: threading.Event) -> Any:
    """TensorRT's progress monitor: passes the phase and its steps to ``say``, and ends the build once ``cancelled`` is
    set.

    TensorRT calls it from its own threads. An exception must not reach TensorRT: it is stored as ``error``, and the
    build ends.
    """

    base: Any = trt.IProgressMonitor

    class Monitor(base):  # type: ignore[misc]  # a class of the library, known when it runs
        def __init__(self) -> None:
            base.__init__(self)
            self.error: BaseException | None = None
            self._steps: dict[str, list[int]] = {}  # done and total, by phase, outer ones first
            self._said = 0.0
            self._lock = threading.Lock()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                self._steps[phase_name] = [0, num_steps]
                self._tell()

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._steps.pop(phase_name, None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                if phase_name in self._steps:
                    self._steps[phase_name][0] = step + 1
                    self._tell()
                return self.error is None and not cancelled.is_set()

        def _tell(self) -> None:
            now = time.monotonic()
            if now - self._said < _INTERVAL_S:
                return
            self._said = now
            try:
                say(", ".join(f"{phase} {done} of {count}" for phase, (done, count) in self._steps.items()))
            except BaseException as error:  # passing through C++ it would end the process
                self.error = error

    return Monitor()


def cancellable(work: Callable[[], ResultT], cancelled: threading.Event) -> ResultT:
    """Run ``work()`` in a thread, so that a signal's exception reaches the caller, who then sets ``cancelled`` and
    waits.

    TensorRT runs for minutes inside one call, during which Python handles no signal, and an exception from a handler in
    one of its callbacks would have to pass through C++.
    """
    with ThreadPoolExecutor(1, "tensorrt-builder") as pool:
        try:
            return pool.submit(work).result()
        except BaseException:
            cancelled.set()  # no effect if the exception is the work's own
            raise
