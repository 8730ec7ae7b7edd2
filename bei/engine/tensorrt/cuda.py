"""CUDA runtime calls with checked statuses: memory, streams, events, graphs. cuda-python's module is an argument.

Not yet run on a GPU; tests use a simulated device.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.errors import EngineError

log = logging.getLogger(__name__)

# Alignment that TensorRT requires; CUDA's own allocations have it.
ALIGNMENT = 256

# cuda-python's handles, which int() turns into addresses.
Stream: TypeAlias = Any
Event: TypeAlias = Any
GraphExec: TypeAlias = Any


def aligned(size: int) -> int:
    """``size`` rounded up to ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PinnedBuffer:
    """``size`` bytes of pinned host memory and as many on the device, copied to each other.

    ``host`` uint8 [size] lies at ``host_address``; ``device``: the address on the device.
    """

    host: npt.NDArray[np.uint8]
    host_address: int
    device: int
    size: int


class Cuda:
    """CUDA runtime calls on the current device. Each raises EngineError with CUDA's status."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def call(self, function: str, *arguments: Any) -> Any:
        """The first value after the status that ``function`` returns; None if there is none."""
        status, *values = getattr(self._runtime, function)(*arguments)
        if status.value != 0:
            raise EngineError(f"CUDA failed in {function}: {self._in_words(status)}.")
        return values[0] if values else None

    def _in_words(self, status: Any) -> str:
        _, words = self._runtime.cudaGetErrorString(status)
        return f"{status.name}, {words.decode()}" if words else str(status.name)

    def use_device(self) -> None:
        """Make device 0's context current in this thread, as TensorRT's calls without a stream require.

        Threads that call CUDA's runtime first, like those that run steps, get the same context implicitly.
        """
        self.call("cudaSetDevice", 0)

    # Resources are released by ``resources`` in reverse order, ignoring CUDA's errors.

    def device_memory(self, size: int, resources: ExitStack) -> int:
        """The address of ``size`` bytes of device memory."""
        address: int = self._allocated("cudaMalloc", size)
        resources.callback(self._release, "cudaFree", address)
        return address

    def block(self, size: int, resources: ExitStack) -> PinnedBuffer:
        """A buffer on host and device."""
        host_address: int = self._allocated("cudaHostAlloc", size, self._runtime.cudaHostAllocDefault)
        resources.callback(self._release, "cudaFreeHost", host_address)
        host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(host_address))
        return PinnedBuffer(host, host_address, self.device_memory(size, resources), size)

    def _allocated(self, function: str, size: int, *flags: Any) -> int:
        try:
            return int(self.call(function, size, *flags))
        except EngineError as error:
            where = "GPU" if function == "cudaMalloc" else "host (pinned)"
            raise EngineError(
                f"{size:,} bytes of {where} memory could not be had: {error} Stop what else uses the device, serve "
                "with fewer --engine-streams, or build the artifact again with a smaller --max-num-tokens."
            ) from error

    def stream(self, resources: ExitStack) -> Stream:
        """A stream that does not synchronize with the default one."""
        stream = self.call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)
        resources.callback(self._release, "cudaStreamDestroy", stream)
        return stream

    def event(self, resources: ExitStack) -> Event:
        """An event on which threads sleep: spinning threads would take the tokenizer's cores."""
        flags = self._runtime.cudaEventBlockingSync | self._runtime.cudaEventDisableTiming
        event = self.call("cudaEventCreateWithFlags", flags)
        resources.callback(self._release, "cudaEventDestroy", event)
        return event

    def _release(self, function: str, handle: Any) -> None:
        status, *_ = getattr(self._runtime, function)(handle)
        if status.value != 0:  # after an unrecoverable error nothing can be freed
            log.debug("%s: %s", function, status.name)

    # The operations of a step, in stream order.

    def upload(self, block: PinnedBuffer, size: int, stream: Stream) -> None:
        """Copy the first ``size`` bytes to the device."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", block.device, block.host_address, size, kind, stream)

    def download(self, block: PinnedBuffer, offset: int, size: int, stream: Stream) -> None:
        """Copy ``size`` bytes at ``offset`` to the host."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", block.host_address + offset, block.device + offset, size, kind, stream)

    def record(self, event: Event, stream: Stream) -> None:
        """Record ``event`` after all current work of ``stream``."""
        self.call("cudaEventRecord", event, stream)

    def wait(self, event: Event) -> None:
        """Sleep until ``event`` has happened. Other Python threads run meanwhile."""
        self.call("cudaEventSynchronize", event)

    def synchronize(self, stream: Stream) -> None:
        self.call("cudaStreamSynchronize", stream)

    def free_bytes(self) -> int:
        """Unused memory of the device, other processes counted."""
        return int(self.call("cudaMemGetInfo"))

    def settle(self, stream: Stream | None = None) -> str | None:
        """After a failure, wait for the remaining work of ``stream`` (None: the whole device), and clear the error.

        None if the device works, else CUDA's message. Errors of kernels last for the life of the process: every later
        call returns them, so a second query tells them from errors of a single call.
        """
        self._awaited(stream)
        self._runtime.cudaGetLastError()
        status = self._awaited(stream)
        return None if status.value == 0 else self._in_words(status)

    def _awaited(self, stream: Stream | None) -> Any:
        if stream is None:
            return self._runtime.cudaDeviceSynchronize()[0]
        return self._runtime.cudaStreamSynchronize(stream)[0]

    # Graphs.

    def begin_capture(self, stream: Stream) -> None:
        """Capture the following work on ``stream`` instead of executing it. Other threads are not affected."""
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: Stream, resources: ExitStack) -> GraphExec:
        """The captured graph, ready to launch."""
        graph = self.call("cudaStreamEndCapture", stream)
        try:
            executable = self.call("cudaGraphInstantiate", graph, 0)
        finally:
            self._release("cudaGraphDestroy", graph)
        resources.callback(self._release, "cudaGraphExecDestroy", executable)
        return executable

    def abandon_capture(self, stream: Stream) -> None:
        """End a failed capture, with or without a graph."""
        status, graph = self._runtime.cudaStreamEndCapture(stream)
        if status.value == 0 and graph is not None and int(graph):
            self._release("cudaGraphDestroy", graph)
        self._runtime.cudaGetLastError()

    def launch(self, executable: GraphExec, stream: Stream) -> None:
        self.call("cudaGraphLaunch", executable, stream)
