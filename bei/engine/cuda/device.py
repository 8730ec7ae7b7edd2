"""All that the engine asks of PyTorch, and through it of CUDA; the module ``torch`` comes as an argument.

``TorchDevice`` is an NVIDIA GPU, ``TwinDevice`` the same calls on the CPU. Nothing else of the engine knows which it
has, and tests give it a third, simulated one. Work is given to a stream and not waited for, except by ``wait``.
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
from bei.engine.pytorch import cpu_name, found_gpu
from bei.utils.free_memory import available_bytes

# A torch.Tensor on the device; a stream, or what stands for one.
Tensor: TypeAlias = Any
Stream: TypeAlias = Any

# How a package is run: it takes a list of tensors, which it empties, and gives another one.
LoadedPackage: TypeAlias = Any


class TensorSlice(NamedTuple):
    """Where a tensor of 4 bytes an element lies in a block: from the byte ``start`` on."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.start + int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class TransferBuffer:
    """``size`` bytes of the host's memory, ``host`` uint8 [size], and as many on the device."""

    host: npt.NDArray[np.uint8]
    size: int
    pinned: Tensor  # the same as ``host``
    memory: Tensor


@dataclass(frozen=True)
class HostBuffer:
    """``size`` bytes of the host's memory for what comes from the device, ``host`` uint8 [size]."""

    host: npt.NDArray[np.uint8]
    size: int
    pinned: Tensor


@dataclass(frozen=True)
class RecordedGraph:
    """A recorded step. It reads ``inputs``, where they lie, and writes ``outputs``."""

    executable: Any
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class CudaDevice(Protocol):
    """What the engine's logic is written for. Every call may raise RuntimeError, PyTorch's word for what fails."""

    name: str
    is_gpu: bool  # it has memory of its own, and graphs

    def load(self, path: Path) -> LoadedPackage:
        """The package in the file ``path``, its weights on the device."""

    def hold(self, weight_bytes: int, most: int | None) -> None:
        """Count ``weight_bytes`` among what this process has of the device, until ``release``. ``most``: bytes that it
        may have, beyond which a step is out of memory; None: all. Raises EngineError where weights alone are more."""

    def stream(self) -> Stream:
        """A stream of work."""

    def block(self, size: int) -> TransferBuffer:
        """A block of ``size`` bytes."""

    def results(self, size: int) -> HostBuffer:
        """Room for ``size`` bytes of results."""

    def upload(self, block: TransferBuffer, num_bytes: int, stream: Stream) -> None:
        """Copy the first ``num_bytes`` of the block's host side to its device side."""

    def views(self, block: TransferBuffer, places: Sequence[TensorSlice]) -> list[Tensor]:
        """Tensors in the block's device side."""

    def compute(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> list[Tensor]:
        """What the package makes of ``inputs``."""

    def download(self, rows: Tensor, count: int, results: HostBuffer, start: int, stream: Stream) -> None:
        """Copy the first ``count`` of ``rows``, float32 [n, width], to the byte ``start`` of ``results``."""

    def wait(self, stream: Stream) -> None:
        """Until all that ``stream`` was given is done. Other Python threads run meanwhile."""

    def record(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> RecordedGraph:
        """A graph of ``compute``, which is not done meanwhile."""

    def replay(self, graph: RecordedGraph, stream: Stream) -> None:
        """Do what was recorded."""

    def free_bytes(self) -> int | None:
        """Memory of the device that nobody uses, other processes counted. None: not known."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` came because there was not enough of it."""

    def settle(self, stream: Stream) -> str | None:
        """After a failure: wait for what ``stream`` still does. None if the device works, else PyTorch's word."""

    def release(self) -> None:
        """Give memory back that nothing uses any more."""


# PyTorch records one graph at a time in a process.
_RECORDING = threading.Lock()


class _Calls:
    """What both devices share."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # A package that is loaded for one thread, as graphs need it, is run by one at a time. That is the time in which
        # kernels are launched: they run side by side.
        self._launching = threading.Lock()

    def views(self, block: TransferBuffer, places: Sequence[TensorSlice]) -> list[Tensor]:
        """No copies."""
        types = {np.dtype(np.int32): self._torch.int32, np.dtype(np.float32): self._torch.float32}
        return [block.memory[place.start : place.end].view(types[place.dtype]).view(place.shape) for place in places]

    def _loaded(self, path: Path, device_index: int) -> LoadedPackage:
        """By PyTorch's own loader: ``torch._inductor.aoti_load_package``, a wrapper of it, imports the compiler."""
        single_threaded, num_runners = True, 1
        loader = self._torch._C._aoti.AOTIModelPackageLoader
        return loader(str(path), "model", single_threaded, num_runners, device_index)

    def _computed(self, package: LoadedPackage, inputs: Sequence[Tensor]) -> list[Tensor]:
        with self._launching:
            outputs: list[Tensor] = package.boxed_run([*inputs])
            return outputs

    def _copy_rows(self, rows: Tensor, count: int, results: HostBuffer, start: int) -> None:
        source = rows[:count]
        room = results.pinned[start : start + source.numel() * source.element_size()]
        room.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)


class TorchDevice(_Calls):
    """PyTorch's GPU 0. Raises LibraryVersionError where ``torch`` was built without CUDA, DeviceNotFoundError."""

    is_gpu = True

    def __init__(self, torch: Any, purpose: str) -> None:
        super().__init__(torch)
        gpu = found_gpu(torch, purpose)
        self.name = f"{gpu.name} ({gpu.architecture})"
        self._num_ooms = self._counted_ooms()

    def load(self, path: Path) -> LoadedPackage:
        """Weights are copied to the GPU."""
        return self._loaded(path, 0)

    def hold(self, weight_bytes: int, most: int | None) -> None:
        """For all engines of the process."""
        PROCESS.hold(self._torch, self, weight_bytes, most)

    def stream(self) -> Stream:
        """A CUDA stream, with an event whose waiter sleeps: threads that spin would take the tokenizer's cores."""
        cuda = self._torch.cuda
        return _CudaStream(cuda.Stream(), cuda.Event(blocking=True), cuda.graph_pool_handle())

    def block(self, size: int) -> TransferBuffer:
        """Pinned, so that copies need no thread of the host."""
        pinned = self._pinned(size)
        return TransferBuffer(
            pinned.numpy(), size, pinned, self._torch.empty(size, dtype=self._torch.uint8, device="cuda")
        )

    def results(self, size: int) -> HostBuffer:
        """Pinned."""
        pinned = self._pinned(size)
        return HostBuffer(pinned.numpy(), size, pinned)

    def _pinned(self, size: int) -> Tensor:
        return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)

    def upload(self, block: TransferBuffer, num_bytes: int, stream: Stream) -> None:
        """Asynchronous."""
        with self._torch.cuda.stream(stream.stream):
            block.memory[:num_bytes].copy_(block.pinned[:num_bytes], non_blocking=True)

    def compute(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> list[Tensor]:
        """Kernels are launched on ``stream``, and not waited for."""
        with self._torch.cuda.stream(stream.stream):
            return self._computed(package, inputs)

    def download(self, rows: Tensor, count: int, results: HostBuffer, start: int, stream: Stream) -> None:
        """Asynchronous."""
        with self._torch.cuda.stream(stream.stream):
            self._copy_rows(rows, count, results, start)

    def wait(self, stream: Stream) -> None:
        """Asleep."""
        stream.done.record(stream.stream)
        stream.done.synchronize()

    def record(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> RecordedGraph:
        """A CUDA graph, whose memory is shared with the stream's others: they never run at the same time.

        Other threads may go on as they like ("thread_local").
        """
        cuda = self._torch.cuda
        executable = cuda.CUDAGraph()
        capture = cuda.graph(executable, pool=stream.pool, stream=stream.stream, capture_error_mode="thread_local")
        with _RECORDING, capture:
            outputs = self._computed(package, inputs)
        return RecordedGraph(executable, inputs, outputs)

    def replay(self, graph: RecordedGraph, stream: Stream) -> None:
        """One launch."""
        with self._torch.cuda.stream(stream.stream):
            graph.executable.replay()

    def free_bytes(self) -> int | None:
        """What PyTorch keeps for later counts as used."""
        return int(self._torch.cuda.mem_get_info()[0])

    def is_out_of_memory(self, error: BaseException) -> bool:
        """By its class, its text, or the allocator's own count: a package makes of every error one without its text."""
        with self._launching:
            before, self._num_ooms = self._num_ooms, self._counted_ooms()
            is_counted = self._num_ooms > before
        is_said = "out of memory" in str(error).lower()
        return isinstance(error, self._torch.OutOfMemoryError) or is_said or is_counted

    def _counted_ooms(self) -> int:
        return int(self._torch.cuda.memory_stats().get("num_ooms", 0))

    def settle(self, stream: Stream) -> str | None:
        """Errors of kernels stay for the life of the process; asking twice tells them from those of a single call."""
        lost = None
        for _ in range(2):
            try:
                stream.stream.synchronize()
                lost = None
            except RuntimeError as error:
                lost = next(iter(str(error).splitlines()), type(error).__name__)
        return lost

    def release(self) -> None:
        """Drop what waits for the garbage collector, then what the allocator keeps."""
        PROCESS.drop(self._torch, self)
        gc.collect()
        self._torch.cuda.empty_cache()


@dataclass(frozen=True)
class _CudaStream:
    stream: Any
    done: Any
    pool: Any


class TwinDevice(_Calls):
    """The CPU, for packages of ``cuda-twin``: every call is done when it returns, and nothing is recorded."""

    is_gpu = False

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self.name = f"{cpu_name()}: the slow form of target cuda, for tests"

    def load(self, path: Path) -> LoadedPackage:
        """On the CPU."""
        return self._loaded(path, -1)

    def hold(self, weight_bytes: int, most: int | None) -> None:
        """The process's memory is the system's to bound."""

    def stream(self) -> Stream:
        """There is none."""
        return None

    def block(self, size: int) -> TransferBuffer:
        """Two pieces of the process's memory, so that what is not uploaded is not read."""
        pinned = self._memory(size)
        return TransferBuffer(pinned.numpy(), size, pinned, self._memory(size))

    def results(self, size: int) -> HostBuffer:
        """Memory of the process."""
        pinned = self._memory(size)
        return HostBuffer(pinned.numpy(), size, pinned)

    def _memory(self, size: int) -> Tensor:
        return self._torch.empty(size, dtype=self._torch.uint8)

    def upload(self, block: TransferBuffer, num_bytes: int, stream: Stream) -> None:
        """At once."""
        block.memory[:num_bytes].copy_(block.pinned[:num_bytes])

    def compute(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> list[Tensor]:
        """At once."""
        return self._computed(package, inputs)

    def download(self, rows: Tensor, count: int, results: HostBuffer, start: int, stream: Stream) -> None:
        """At once."""
        self._copy_rows(rows, count, results, start)

    def wait(self, stream: Stream) -> None:
        """Everything is done."""

    def record(self, package: LoadedPackage, inputs: Sequence[Tensor], stream: Stream) -> RecordedGraph:
        """Never asked for."""
        raise RuntimeError("steps are not recorded on a CPU")

    def replay(self, graph: RecordedGraph, stream: Stream) -> None:
        """Never asked for."""
        raise RuntimeError("steps are not recorded on a CPU")

    def free_bytes(self) -> int | None:
        """What this process may still take."""
        return available_bytes()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """By the text of PyTorch's allocator for CPUs."""
        return "not enough memory" in str(error).lower()

    def settle(self, stream: Stream) -> str | None:
        """Nothing is left to do."""
        return None

    def release(self) -> None:
        """Drop what waits for the garbage collector."""
        gc.collect()
