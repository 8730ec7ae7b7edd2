"""A simulated GPU behind the names of ``cuda.bindings.runtime``: work is done only when it is waited for.

Undefined behaviour of a real device is a ``Violation`` here: memory that was freed, is pageable or too small, a source
that changes before it is copied, two streams in the same memory. Statuses, flags and handles are those of the real
module, and functions that it lacks cannot be called.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from cuda.bindings import runtime

from tests.bei.engine.tensorrt.memory import Kind, Memory, Violation
from tests.support.cuda_standin import cuda_stand_in

Status: TypeAlias = Any  # a cudaError_t
SUCCESS = runtime.cudaError_t.cudaSuccess
Range = tuple[int, int]  # first byte, and one past the last


@dataclass(eq=False)
class Operation:
    """Work of a stream: ``act`` does it, touching ``reads`` and ``writes``."""

    name: str
    act: Callable[[], None]
    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)


@dataclass
class StreamState:
    """``queue``: pending work. ``captured``: recorded work; None: no capture is in progress."""

    queue: deque[Operation] = field(default_factory=deque)
    captured: list[Operation] | None = None
    capture_failed: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass
class Fault:
    """``function`` returns ``status`` after ``after`` successful calls; ``is_sticky``: all later calls return it too.

    The function ``kernel`` is the work of a step: its error is returned to the thread that waits for it.
    """

    function: str
    status: Status
    after: int = 0
    is_sticky: bool = False
    times: int = 1


class Device:
    """``cuda.bindings.runtime`` for an engine. ``calls`` counts functions by name."""

    def __init__(
        self, *, name: str = "NVIDIA H200", capability: int = 90, driver: int = 13000, memory_bytes: int = 1 << 30
    ) -> None:
        self.memory = Memory(memory_bytes)
        self.violations: list[str] = []
        self.calls: Counter[str] = Counter()
        self.before_wait: Callable[[], None] = lambda: None  # called before waiting for an event
        self.used_by: set[int] = set()  # threads in which its context is current
        self.held: dict[int, Range] = {}  # memory in use for longer than a step, by its user
        self.copied: list[tuple[str, int]] = []  # upload or download, and bytes, in order
        self.graph_bytes = 1_000_000  # of device memory, for each executable graph
        self._properties = SimpleNamespace(
            name=name.encode() + b"\0" * 3,
            major=capability // 10,
            minor=capability % 10,
            totalGlobalMem=memory_bytes,
        )
        self._driver = driver
        self._faults: list[Fault] = []
        self._lost: Status | None = None
        self._lock = threading.RLock()
        self._next_handle = 1000
        self.streams: dict[int, StreamState] = {}
        self.events: dict[int, tuple[StreamState, Operation] | None] = {}  # their positions in a stream's work
        self.graphs: dict[int, list[Operation]] = {}
        self.executables: dict[int, list[Operation]] = {}

    # Interface for tests.

    def fail(self, function: str, status: Status, *, after: int = 0, is_sticky: bool = False, times: int = 1) -> None:
        """Make ``function`` fail."""
        self._faults.append(Fault(function, status, after, is_sticky, times))

    def violated(self, what: str) -> Violation:
        """Record ``what``, in case the exception is lost."""
        self.violations.append(what)
        return Violation(what)

    def view(self, address: int, size: int, kind: Kind, use: str) -> npt.NDArray[np.uint8]:
        """``Memory.view`` that records violations."""
        try:
            return self.memory.view(address, size, kind, use)
        except Violation as violation:
            self.violations.append(str(violation))
            raise

    def module(self) -> Any:
        """The device behind the checks of ``tests.support.cuda_standin``, as cuda-python's runtime for an engine."""
        names = [name[1:] for name in dir(type(self)) if name.startswith("_cuda")]
        return cuda_stand_in({name: getattr(self, name) for name in names})

    def leaks(self) -> list[str]:
        """Resources that were not released."""
        held = [f"{block.kind} memory of {block.size} bytes" for block in self.memory.live()]
        for title, handles in (("stream", self.streams), ("event", self.events), ("graph", self.graphs)):
            held += [title] * len(handles)
        held += ["executable graph"] * len(self.executables)
        return held + (["memory of plans"] if self.memory.reserved else [])

    # The module.

    def __getattr__(self, name: str) -> Any:
        """Functions (``_cudaMalloc`` here), and the real module's enums and flags."""
        if name.startswith("_"):
            raise AttributeError(name)
        real = getattr(runtime, name)  # AttributeError: CUDA has no such name
        own = getattr(type(self), f"_{name}", None)
        if own is None:
            if callable(real) and not isinstance(real, type):
                raise Violation(f"the simulated device does not know {name}")
            return real
        return lambda *arguments: self._called(name, own, arguments)

    def _called(self, name: str, own: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        with self._lock:
            self.calls[name] += 1
            status = self._fault(name)
        if name == "cudaGetErrorString":
            return (SUCCESS, f"simulated {arguments[0].name}".encode())
        if self._lost is not None and name not in ("cudaGetLastError", "cudaDriverGetVersion"):
            status = self._lost
        if status is not None:
            if name == "cudaStreamEndCapture":  # it ends in any case
                self.stream(arguments[0]).captured = None
            return (status,)
        answer = own(self, *arguments)
        if isinstance(answer, runtime.cudaError_t):
            return (answer,)
        return (SUCCESS,) if answer is None else (SUCCESS, *answer)

    def _fault(self, name: str) -> Status | None:
        for fault in self._faults:
            if fault.function == name and fault.times:
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                if fault.is_sticky:
                    self._lost = fault.status
                return fault.status
        return None

    def _handle(self, kind: type) -> Any:
        with self._lock:
            self._next_handle += 8
            return kind(self._next_handle)

    def _cudaDriverGetVersion(self) -> Any:
        return (self._driver,)

    def _cudaRuntimeGetVersion(self) -> Any:
        return (13050,)

    def _cudaGetDeviceCount(self) -> Any:
        return (1,)

    def _cudaGetDeviceProperties(self, index: int) -> Any:
        return (self._properties,)

    def _cudaSetDevice(self, device: int) -> Any:
        if device != 0:
            return runtime.cudaError_t.cudaErrorInvalidDevice
        self.used_by.add(threading.get_ident())

    def _cudaGetErrorString(self, status: Any) -> Any:
        raise NotImplementedError

    def _cudaGetLastError(self) -> Any:
        return None

    def _cudaMemGetInfo(self) -> Any:
        return (self.memory.limit - self.memory.used, self.memory.limit)

    def _cudaMalloc(self, size: int) -> Any:
        return self._allocated("device", size)

    def _cudaHostAlloc(self, size: int, flags: int) -> Any:
        return self._allocated("pinned", size)

    def _allocated(self, kind: Kind, size: int) -> Any:
        if any(stream.captured is not None for stream in self.streams.values()):
            raise self.violated("memory is allocated while a stream is captured")
        with self._lock:
            block = self.memory.allocate(kind, size)
        return runtime.cudaError_t.cudaErrorMemoryAllocation if block is None else (block.address,)

    def _cudaFree(self, address: int) -> Any:
        self._freed("device", address)

    def _cudaFreeHost(self, address: int) -> Any:
        self._freed("pinned", address)

    def _freed(self, kind: Kind, address: int) -> None:
        block = next((block for block in self.memory.live() if block.address == address), None)
        if block is None or block.kind != kind:
            raise self.violated(f"{kind} memory is freed that is none, or was freed before")
        span = (block.address, block.address + block.size)
        for stream in self.streams.values():
            for operation in stream.queue:
                if _meet(operation.reads + operation.writes, [span]):
                    raise self.violated(f"memory is freed that {operation.name} still uses")
        if any(_meet([held], [span]) for held in self.held.values()):
            raise self.violated("memory is freed that an execution context computes in")
        block.free()

    # Streams and events.

    def _cudaStreamCreateWithFlags(self, flags: int) -> Any:
        stream = self._handle(runtime.cudaStream_t)
        self.streams[int(stream)] = StreamState()
        return (stream,)

    def _cudaStreamDestroy(self, stream: Any) -> Any:
        if self.stream(stream).queue:
            raise self.violated("a stream is destroyed that has work")
        del self.streams[int(stream)]

    def stream(self, stream: Any) -> StreamState:
        """The state of a stream's handle."""
        state = self.streams.get(int(stream))
        if state is None:
            raise self.violated("a stream is used that does not live, or the default stream")
        return state

    def _cudaEventCreateWithFlags(self, flags: int) -> Any:
        event = self._handle(runtime.cudaEvent_t)
        if not flags & runtime.cudaEventBlockingSync:
            raise self.violated("whoever waits for the event spins")
        self.events[int(event)] = None
        return (event,)

    def _cudaEventDestroy(self, event: Any) -> Any:
        del self.events[int(event)]

    def _cudaEventRecord(self, event: Any, stream: Any) -> Any:
        marker = Operation("event", lambda: None)
        self.events[int(event)] = (self.stream(stream), marker)
        self.enqueue(stream, marker)

    def _cudaEventSynchronize(self, event: Any) -> Any:
        recorded = self.events[int(event)]
        if recorded is None:
            raise self.violated("an event is waited for that was never recorded")
        self.before_wait()
        state, marker = recorded
        return self._drain(state, until=marker)

    def _cudaStreamSynchronize(self, stream: Any) -> Any:
        state = self.stream(stream)
        if state.captured is not None:
            state.capture_failed = True
            return runtime.cudaError_t.cudaErrorStreamCaptureUnsupported
        return self._drain(state)

    def _drain(self, state: StreamState, until: Operation | None = None) -> Any:
        """Do pending work in order."""
        with state.lock:
            if until is not None and until not in state.queue:
                return None
            while state.queue:
                operation = state.queue[0]
                status = self._fault("kernel") if operation.name == "step" else None
                if status is not None:
                    state.queue.clear()
                    return status
                try:
                    operation.act()
                finally:
                    state.queue.popleft()
                if operation is until:
                    return None
        return None

    def enqueue(self, stream: Any, operation: Operation) -> None:
        """Queue work on ``stream``; Violation if it shares memory with another stream's work."""
        state = self.stream(stream)
        if state.captured is not None:
            state.captured.append(operation)
            return
        with self._lock:
            for other in self.streams.values():
                if other is state:
                    continue
                for waiting in list(other.queue):
                    if _meet(operation.writes, waiting.reads + waiting.writes) or _meet(
                        waiting.writes, operation.reads
                    ):
                        raise self.violated(f"{operation.name} meets {waiting.name} of another stream in memory")
            state.queue.append(operation)

    def _cudaMemcpyAsync(self, target: int, source: int, size: int, kind: Any, stream: Any) -> Any:
        kinds = runtime.cudaMemcpyKind
        directions: dict[Any, tuple[Kind, Kind]] = {
            kinds.cudaMemcpyHostToDevice: ("device", "pinned"),
            kinds.cudaMemcpyDeviceToHost: ("pinned", "device"),
        }
        to, of = directions[kind]
        if self.stream(stream).captured is not None:
            raise self.violated("a copy is captured: it would be of the same bytes for ever")
        view = self.view(source, size, of, f"copy from {of} memory")
        self.view(target, size, to, f"copy to {to} memory")
        before = view.copy() if of == "pinned" else None

        def copy() -> None:
            now = self.view(source, size, of, f"copy from {of} memory")
            if before is not None and not np.array_equal(now, before):
                raise self.violated("pinned memory was changed before its copy was done")
            self.view(target, size, to, f"copy to {to} memory")[:] = now

        name = "upload" if of == "pinned" else "download"
        self.copied.append((name, size))
        self.enqueue(stream, Operation(name, copy, [(source, source + size)], [(target, target + size)]))

    # Graphs.

    def _cudaStreamBeginCapture(self, stream: Any, mode: Any) -> Any:
        if mode != runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal:
            raise self.violated("a capture forbids other threads their calls")
        state = self.stream(stream)
        if state.captured is not None:
            return runtime.cudaError_t.cudaErrorIllegalState
        state.captured, state.capture_failed = [], False

    def _cudaStreamEndCapture(self, stream: Any) -> Any:
        state = self.stream(stream)
        if state.captured is None:
            return runtime.cudaError_t.cudaErrorIllegalState
        captured, state.captured = state.captured, None
        if state.capture_failed:
            return runtime.cudaError_t.cudaErrorStreamCaptureInvalidated
        graph = self._handle(runtime.cudaGraph_t)
        self.graphs[int(graph)] = captured
        return (graph,)

    def _cudaGraphDestroy(self, graph: Any) -> Any:
        del self.graphs[int(graph)]

    def _cudaGraphInstantiate(self, graph: Any, flags: int) -> Any:
        if self.memory.used + self.graph_bytes > self.memory.limit:
            return runtime.cudaError_t.cudaErrorMemoryAllocation
        executable = self._handle(runtime.cudaGraphExec_t)
        self.executables[int(executable)] = self.graphs[int(graph)]
        self.memory.reserved += self.graph_bytes
        return (executable,)

    def _cudaGraphExecDestroy(self, executable: Any) -> Any:
        del self.executables[int(executable)]
        self.memory.reserved -= self.graph_bytes

    def _cudaGraphLaunch(self, executable: Any, stream: Any) -> Any:
        for operation in self.executables[int(executable)]:
            self.enqueue(stream, operation)


def _meet(first: list[Range], second: list[Range]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)
