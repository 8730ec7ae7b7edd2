"""All calls of PyTorch, and through it of CUDA, that the engine makes; the module ``torch`` is passed as an argument.

``TorchDevice`` is an NVIDIA GPU, ``TwinDevice`` implements the same calls on the CPU, and tests add a simulated device;
the rest of the engine does not distinguish them. Work on a stream is asynchronous; only ``wait`` waits.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.engine.cuda.memory_budget import PROCESS
from bei.engine.cuda.weights import read_weights
from bei.engine.pytorch import cpu_name, found_gpu
from bei.utils.free_memory import available_bytes

# A torch.Tensor on the device; a stream, or its substitute.
Tensor: TypeAlias = Any
Stream: TypeAlias = Any

# A loaded package: takes a list of tensors, which it empties, and returns another list.
LoadedPackage: TypeAlias = Any


class TensorSlice(NamedTuple):
    """A tensor with 4-byte elements in a buffer, from the byte ``start`` on."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.start + int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class TransferBuffer:
    """``size`` bytes of host memory, ``host`` uint8 [size], and as many on the device."""

    host: npt.NDArray[np.uint8]
    size: int
    pinned: Tensor  # the same memory as ``host``
    memory: Tensor


@dataclass(frozen=True)
class HostBuffer:
    """``size`` bytes of host memory for results, ``host`` uint8 [size]."""

    host: npt.NDArray[np.uint8]
    size: int
    pinned: Tensor


@dataclass(frozen=True)
class RecordedGraph:
    """A recorded step, which reads ``inputs`` in place and writes ``outputs``."""

    executable: Any
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class CudaDevice(Protocol):
    """The device interface of the engine. Every call may raise RuntimeError, as PyTorch does."""

    name: str
    architecture: str  # an artifact has a package for each: ``SM90``
    is_gpu: bool  # it has its own memory, and graphs

    def load(self, package: Path, weights: Path) -> LoadedPackage:
        """Load the ``package`` with its ``weights``, which ``release`` frees. Raises EngineError,
        MissingDependencyError."""

    def hold(self, weight_bytes: int, most: int | None) -> None:
        """Account for ``weight_bytes`` until ``release``. ``most``: the limit for this process in bytes, beyond which a
        step is out of memory; None: no limit. Raises EngineError if the weights alone exceed it."""

    def stream(self) -> Stream:
        """A new stream."""

    def block(self, size: int) -> TransferBuffer:
        """A buffer of ``size`` bytes."""

    def results(self, size: int) -> HostBuffer:
        """A buffer for ``size`` bytes of results."""

    def upload(self, block: TransferBuffer, num_bytes: int, stream: Stream) -> None:
        """Copy the first ``num_bytes`` of the buffer's host memory to the device."""

    def views(self, block: TransferBuffer, places: Sequence[TensorSlice]) -> list[Tensor]:
        """Tensors in the buffer's device memory."""

    def compute(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> list[Tensor]:
        """The package's outputs for ``inputs``."""

    def download(self, rows: Tensor, count: int, results: HostBuffer, start: int, stream: Stream) -> None:
        """Copy the first ``count`` of ``rows``, float32 [n, width], to the byte ``start`` of ``results``."""

    def wait(self, stream: Stream) -> None:
        """Wait until all work on ``stream`` is done. Other Python threads run meanwhile."""

    def free_cache(self) -> None:
        """Release memory that is kept for later steps: recorded ones cannot take it."""

    def record(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> RecordedGraph:
        """Record ``compute`` as a graph, without executing it."""

    def replay(self, graph: RecordedGraph, stream: Stream) -> None:
        """Execute a recorded graph."""

    def graph_bytes(self, stream: Stream) -> int:
        """Memory that the graphs recorded on ``stream`` hold."""

    def free_bytes(self) -> int | None:
        """Unused memory of the device, other processes counted. None: unknown."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True if ``error`` means that the device ran out of memory."""

    def settle(self, stream: Stream) -> str | None:
        """After a failure, wait for the remaining work on ``stream``. None if the device works, else PyTorch's
        message."""

    def release(self) -> None:
        """Release weights and unused memory. Packages cannot be used afterwards."""


# PyTorch records one graph at a time in a process.
_RECORDING = threading.Lock()


class _Calls:
    """Calls that both devices share."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # A package loaded for a single thread, as graphs need it, is run by one thread at a time. The lock is held
        # while kernels are launched; they execute concurrently.
        self._launching = threading.Lock()
        self._weights: list[Tensor] = []

    def views(self, block: TransferBuffer, places: Sequence[TensorSlice]) -> list[Tensor]:
        """Views without copies."""
        types = {np.dtype(np.int32): self._torch.int32, np.dtype(np.float32): self._torch.float32}
        return [block.memory[place.start : place.end].view(types[place.dtype]).view(place.shape) for place in places]

    def _loaded(self, path: Path, weights: Path, device_index: int) -> LoadedPackage:
        """Load a package. PyTorch's wrapper ``torch._inductor.aoti_load_package`` would import the compiler.

        A package whose weights are incomplete crashes the process, or computes with others: ``read_weights`` raises.
        """
        single_threaded, num_runners = True, 1
        loader = self._torch._C._aoti.AOTIModelPackageLoader
        package = loader(str(path), "model", single_threaded, num_runners, device_index)
        tensors = read_weights(weights, package.get_constant_fqns(), self._on_the_device)
        self._weights += tensors.values()
        use_inactive, check_full_update, user_managed = False, True, True  # "user managed": not copied once more
        package.load_constants(tensors, use_inactive, check_full_update, user_managed)
        return package

    def _on_the_device(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def _free_weights(self) -> None:
        """Take the memory from the weights: PyTorch keeps those that a package was given after the package has gone
        (before version 2.14, pytorch#194480)."""
        for weight in self._weights:
            weight.set_()
        self._weights.clear()

    def _computed(self, package: LoadedPackage, inputs: Sequence[Tensor]) -> list[Tensor]:
        with self._launching:
            outputs: list[Tensor] = package.boxed_run([*inputs])
            return outputs

    def _copy_rows(self, rows: Tensor, count: int, results: HostBuffer, start: int) -> None:
        source = rows[:count]
        room = results.pinned[start : start + source.numel() * source.element_size()]
        room.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)


class TorchDevice(_Calls):
    """PyTorch's GPU 0. Raises LibraryVersionError if ``torch`` was built without CUDA, DeviceNotFoundError."""

    is_gpu = True

    def __init__(self, torch: Any, purpose: str) -> None:
        super().__init__(torch)
        gpu = found_gpu(torch, purpose)
        self.name = f"{gpu.name} ({gpu.architecture})"
        self.architecture = gpu.architecture
        self._num_ooms = self._counted_ooms()

    def load(self, package: Path, weights: Path) -> LoadedPackage:
        """Load the package, and copy its weights to the GPU one by one, into the memory of PyTorch's allocator."""
        return self._loaded(package, weights, 0)

    def _on_the_device(self, weight: Tensor) -> Tensor:
        return self._torch.empty_like(weight, device="cuda").copy_(weight)

    def hold(self, weight_bytes: int, most: int | None) -> None:
        """Account for ``weight_bytes``. All engines of the process share the limit ``most``."""
        PROCESS.hold(self._torch, self, weight_bytes, most)

    def stream(self) -> Stream:
        """A CUDA stream with an event on which threads sleep: spinning threads would take the tokenizer's cores."""
        cuda = self._torch.cuda
        return _CudaStream(cuda.Stream(), cuda.Event(blocking=True), cuda.graph_pool_handle())

    def block(self, size: int) -> TransferBuffer:
        """Pinned, so that copies need no host thread."""
        pinned = self._pinned(size)
        return TransferBuffer(
            pinned.numpy(), size, pinned, self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
        )

    def results(self, size: int) -> HostBuffer:
        """Pinned memory."""
        pinned = self._pinned(size)
        return HostBuffer(pinned.numpy(), size, pinned)

    def _pinned(self, size: int) -> Tensor:
        return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)

    def upload(self, block: TransferBuffer, num_bytes: int, stream: Stream) -> None:
        """Asynchronous copy."""
        with self._torch.cuda.stream(stream.stream):
            block.memory[:num_bytes].copy_(block.pinned[:num_bytes], non_blocking=True)

    def compute(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> list[Tensor]:
        """Launch the kernels on ``stream``, without waiting."""
        with self._torch.cuda.stream(stream.stream):
            return self._computed(package, inputs)

    def download(self, rows: Tensor, count: int, results: HostBuffer, start: int, stream: Stream) -> None:
        """Asynchronous copy."""
        with self._torch.cuda.stream(stream.stream):
            self._copy_rows(rows, count, results, start)

    def wait(self, stream: Stream) -> None:
        """Sleep on the stream's event."""
        stream.done.record(stream.stream)
        stream.done.synchronize()

    def record(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> RecordedGraph:
        """A CUDA graph that shares memory with the stream's other graphs, which never run at the same time.

        Capture mode "thread_local": other threads are not affected. ``torch.cuda.graph`` would wait for all streams of
        the process before each graph, and free PyTorch's cache: the engines of other models may be serving.
        """
        cuda = self._torch.cuda
        executable = cuda.CUDAGraph()
        with _RECORDING, cuda.stream(stream.stream):
            executable.capture_begin(stream.pool, "thread_local")
            try:
                outputs = self._computed(package, inputs)
            finally:
                executable.capture_end()
        return RecordedGraph(executable, inputs, outputs)

    def free_cache(self) -> None:
        """Empty the allocator's cache, which waits for all streams."""
        self._torch.cuda.empty_cache()

    def replay(self, graph: RecordedGraph, stream: Stream) -> None:
        with self._torch.cuda.stream(stream.stream):
            graph.executable.replay()

    def graph_bytes(self, stream: Stream) -> int:
        """The memory of the pool that the stream's graphs share. The device's free memory would not show it: PyTorch's
        cache counts as used there, and shrinks meanwhile."""
        return sum(int(segment["total_size"]) for segment in self._torch.cuda.memory_snapshot(stream.pool))

    def free_bytes(self) -> int | None:
        """Free memory; PyTorch's cache counts as used."""
        return int(self._torch.cuda.mem_get_info()[0])

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True if the class or text of ``error`` says so, or the allocator has counted a failure since the last call.

        The count is needed since packages raise errors without the original class and text.
        """
        with self._launching:
            before, self._num_ooms = self._num_ooms, self._counted_ooms()
            is_counted = self._num_ooms > before
        is_said = "out of memory" in str(error).lower()
        return isinstance(error, self._torch.OutOfMemoryError) or is_said or is_counted

    def _counted_ooms(self) -> int:
        return int(self._torch.cuda.memory_stats().get("num_ooms", 0))

    def settle(self, stream: Stream) -> str | None:
        """Synchronize twice, and return the error of the second time.

        A kernel's error stays for the life of the process, and comes again; the error of a single call does not.
        """
        lost = None
        for _ in range(2):
            try:
                stream.stream.synchronize()
                lost = None
            except RuntimeError as error:
                lost = next(iter(str(error).splitlines()), type(error).__name__)
        return lost

    def release(self) -> None:
        """Free the weights, collect garbage, then empty the allocator's cache."""
        self._free_weights()
        PROCESS.drop(self)
        gc.collect()
        self.free_cache()


@dataclass(frozen=True)
class _CudaStream:
    stream: Any
    done: Any
    pool: Any


class TwinDevice(_Calls):
    """The CPU, for packages of ``cuda-twin``: every call is synchronous, and nothing is recorded."""

    is_gpu = False

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self.name = f"{cpu_name()}: the slow form of target cuda, for tests"
        self.architecture = torch.backends.cpu.get_cpu_capability()

    def load(self, package: Path, weights: Path) -> LoadedPackage:
        """Load the package; its weights stay in the mapped file."""
        return self._loaded(package, weights, -1)

    def _on_the_device(self, weight: Tensor) -> Tensor:
        return weight.detach()  # the tensor itself would keep the map after it is freed

    def hold(self, weight_bytes: int, most: int | None) -> None:
        """A no-op: the system limits the process's memory."""

    def stream(self) -> Stream:
        """A no-op: the CPU has no streams."""
        return None

    def block(self, size: int) -> TransferBuffer:
        """Two separate buffers, so that data that was not uploaded is not read."""
        pinned = self._memory(size)
        return TransferBuffer(pinned.numpy(), size, pinned, self._memory(size))

    def results(self, size: int) -> HostBuffer:
        """Host memory."""
        pinned = self._memory(size)
        return HostBuffer(pinned.numpy(), size, pinned)

    def _memory(self, size: int) -> Tensor:
        return self._torch.empty(size, dtype=self._torch.uint8)

    def upload(self, block: TransferBuffer, num_bytes: int, stream: Stream) -> None:
        """Synchronous copy."""
        block.memory[:num_bytes].copy_(block.pinned[:num_bytes])

    def compute(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> list[Tensor]:
        return self._computed(package, inputs)

    def download(self, rows: Tensor, count: int, results: HostBuffer, start: int, stream: Stream) -> None:
        """Synchronous copy."""
        self._copy_rows(rows, count, results, start)

    def wait(self, stream: Stream) -> None:
        """A no-op."""

    def free_cache(self) -> None:
        """A no-op."""

    def record(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> RecordedGraph:
        """Never called: the CPU has no graphs."""
        raise RuntimeError("steps are not recorded on a CPU")

    def replay(self, graph: RecordedGraph, stream: Stream) -> None:
        """Never called: the CPU has no graphs."""
        raise RuntimeError("steps are not recorded on a CPU")

    def graph_bytes(self, stream: Stream) -> int:
        """The CPU has no graphs."""
        return 0

    def free_bytes(self) -> int | None:
        """Memory available to this process."""
        return available_bytes()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Judged by the text of PyTorch's CPU allocator."""
        return "not enough memory" in str(error).lower()

    def settle(self, stream: Stream) -> str | None:
        """Always None: all work is synchronous."""
        return None

    def release(self) -> None:
        """Free the weights, and collect garbage."""
        self._free_weights()
        gc.collect()
