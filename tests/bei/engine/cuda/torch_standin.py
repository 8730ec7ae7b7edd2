"""PyTorch with a simulated GPU, for ``bei.engine.cuda.device.TorchDevice``: tensors are real, CUDA is not.

Calls of ``torch.cuda`` are checked against the signatures of the installed PyTorch, which has them without CUDA too.
Kernels run when they are launched; recorded ones run when the graph is replayed. ``log`` holds the calls with their
streams. Without another one the package is that of ``tests.bei.engine.cuda.simulated``.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bei.engine.cuda.simulated import INPUTS, rows_of_the_package

TOTAL_BYTES = 10**9
BYTES_OF_A_TOKEN = 100_000


class Program(Protocol):
    """A package's code and weights: it reads ``inputs``, and its weights by ``names``."""

    inputs: Sequence[str]
    names: Sequence[str]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs."""


class _Simulated:
    inputs: Sequence[str] = INPUTS
    names: Sequence[str] = ("matrix",)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        pass

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        arrays = dict(zip(INPUTS, (tensor.numpy() for tensor in inputs), strict=True))
        return [torch.from_numpy(rows) for rows in rows_of_the_package(arrays)]


def checked(real: Callable[..., Any], behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """``behaviour`` with the signature of ``real``."""
    signature = inspect.signature(real)

    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return behaviour(*args, **kwargs)

    return call


def _bound(real: Callable[..., Any], behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """``behaviour`` with the signature of the method ``real``, whose object is left out."""
    method = checked(real, lambda _, *args: behaviour(*args))
    return lambda *args: method(None, *args)


class StandIn:
    """``torch``: the module for the engine. ``most_tokens``: the largest step that fits into memory; beyond it,
    ``error_of`` gives the error, and ``num_ooms`` counts like PyTorch's allocator. That keeps the memory of the largest
    step until its cache is emptied, and ``graph_bytes`` in its stream's pool for each recorded step.

    ``opened`` gives the program of the package in a path."""

    def __init__(self, opened: Callable[[str], Program] = lambda path: _Simulated(), version: str = "2.13.0") -> None:
        self._opened = opened
        self.log: list[tuple[Any, ...]] = []
        self.most_tokens = 1 << 30
        self.error_of: Callable[[], RuntimeError] = lambda: torch.OutOfMemoryError("CUDA out of memory.")
        self.counts_ooms = False
        self.lost: RuntimeError | None = None
        self.fraction: float | None = None
        self.graph_bytes = 0
        self.fails_while_recording = False
        self._cached_bytes = 0
        self._pools: Counter[object] = Counter()
        self._num_ooms = 0
        self._current: Stream | None = None
        self._recording: Graph | None = None
        self._pinned: set[int] = set()
        self._on_the_device: set[int] = set()
        self._tensors: list[Tensor] = []  # kept, so that no memory is reused
        self.weights: dict[str, Tensor] = {}  # as PyTorch does, it never drops them
        real = torch.cuda
        cuda = SimpleNamespace(
            init=checked(real.init, lambda: None),
            get_device_name=checked(real.get_device_name, lambda index: "NVIDIA H200"),
            get_device_capability=checked(real.get_device_capability, lambda index: (9, 0)),
            Stream=lambda: Stream(self),
            Event=checked(real.Event, lambda *, blocking: Event(self, blocking=blocking)),
            CUDAGraph=lambda: Graph(self),
            graph_pool_handle=checked(real.graph_pool_handle, object),
            stream=checked(real.stream, self._on),
            mem_get_info=checked(real.mem_get_info, self._free_and_total),
            memory_snapshot=checked(real.memory_snapshot, self._segments),
            memory_stats=checked(real.memory_stats, lambda: {"num_ooms": self._num_ooms}),
            set_per_process_memory_fraction=checked(real.set_per_process_memory_fraction, self._set_fraction),
            empty_cache=checked(real.empty_cache, self._empty_cache),
        )
        self.torch: Any = SimpleNamespace(
            __version__=version,
            version=SimpleNamespace(cuda="13.0"),
            **{name: getattr(torch, name) for name in ("int32", "float32", "uint8", "OutOfMemoryError")},
            empty=self._empty,
            empty_like=self._empty_like,
            cuda=cuda,
            _C=SimpleNamespace(_aoti=SimpleNamespace(AOTIModelPackageLoader=self._loader)),
        )

    def copies(self) -> TorchDispatchMode:
        """A context in which copies of tensors are logged: stream, from, to, whether they wait."""
        return _Copies(self)

    def place(self, tensor: Tensor) -> str:
        """The place of ``tensor``."""
        address = tensor.untyped_storage().data_ptr()
        return "pinned" if address in self._pinned else "device" if address in self._on_the_device else "host"

    def launch(self, program: Program, inputs: list[Tensor]) -> list[Tensor]:
        """Run the package's ``program``, now or at replay."""
        assert self._current is not None, "work without a stream waits for all others"
        assert all(self.place(tensor) == "device" for tensor in inputs)
        kept = list(inputs)
        inputs.clear()
        num_tokens = kept[program.inputs.index("input_ids")].shape[0]
        if self._recording is not None and self.fails_while_recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        if num_tokens > self.most_tokens:
            self._num_ooms += self.counts_ooms
            raise self.error_of()
        outputs = program(kept)
        self._tensors += outputs
        self._on_the_device.update(rows.untyped_storage().data_ptr() for rows in outputs)
        if self._recording is None:
            self._cached_bytes = max(self._cached_bytes, num_tokens * BYTES_OF_A_TOKEN)
        else:
            self._recording.program, self._recording.inputs, self._recording.outputs = program, kept, outputs
            for rows in outputs:
                rows.fill_(float("nan"))
        self.log.append(("launch", self._current, self._recording is not None))
        return outputs

    def _loader(self, path: str, name: str, single_threaded: bool, num_runners: int, device_index: int) -> Any:
        self.log.append(("load", name, single_threaded, num_runners, device_index))
        program = self._opened(path)

        def load_constants(
            constants: dict[str, Tensor], use_inactive: bool, check_full_update: bool, user_managed: bool
        ) -> None:
            assert all(self.place(tensor) == "device" for tensor in constants.values())
            self.log.append(("weights", use_inactive, check_full_update, user_managed))
            self.weights = constants
            program.load(constants)

        return SimpleNamespace(
            boxed_run=partial(self.launch, program),
            get_constant_fqns=lambda: [*program.names],
            load_constants=load_constants,
        )

    def _empty_like(self, tensor: Tensor, *, device: str) -> Tensor:
        made = torch.empty_like(tensor)
        self._on_the_device.add(made.untyped_storage().data_ptr())
        return made

    def _empty(self, size: int, *, dtype: torch.dtype, device: str = "cpu", pin_memory: bool = False) -> Tensor:
        tensor = torch.full((size,), 0xAB, dtype=dtype)
        self._tensors.append(tensor)
        if pin_memory or device == "cuda":
            (self._pinned if pin_memory else self._on_the_device).add(tensor.untyped_storage().data_ptr())
        return tensor

    def _free_and_total(self) -> tuple[int, int]:
        return TOTAL_BYTES // 2 - self._cached_bytes - self._pools.total(), TOTAL_BYTES

    def _segments(self, pool: object) -> list[dict[str, Any]]:
        return [{"total_size": self._pools[pool]}]

    def _set_fraction(self, fraction: float) -> None:
        self.fraction = fraction

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _empty_cache(self) -> None:
        self.log.append(("empty cache",))
        self._cached_bytes = 0

    def begin(self, graph: Graph, pool: object, capture_error_mode: str) -> None:
        """Record what is launched on the current stream as ``graph``."""
        assert self._recording is None
        self.log.append(("record", self._current, pool, capture_error_mode))
        self._pools[pool] += self.graph_bytes
        self._recording = graph

    def end(self, graph: Graph) -> None:
        """End the recording of ``graph``."""
        assert self._recording is graph
        self._recording = None


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, gpu: StandIn) -> None:
        self._gpu = gpu

    def synchronize(self) -> None:
        if self._gpu.lost is not None:
            raise self._gpu.lost


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, gpu: StandIn, *, blocking: bool) -> None:
        self._gpu, self._blocking = gpu, blocking
        self._of: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._of = stream

    def synchronize(self) -> None:
        self._gpu.log.append(("wait", self._of, "asleep" if self._blocking else "spinning"))


class Graph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self, gpu: StandIn) -> None:
        self._gpu = gpu
        self.program: Program = _Simulated()
        self.inputs: Sequence[Tensor] = ()
        self.outputs: Sequence[Tensor] = ()
        real = torch.cuda.CUDAGraph
        self.capture_begin = _bound(real.capture_begin, lambda pool, mode: gpu.begin(self, pool, mode))
        self.capture_end = _bound(real.capture_end, lambda: gpu.end(self))

    def replay(self) -> None:
        assert self._gpu._current is not None
        self._gpu.log.append(("replay", self._gpu._current))
        for rows, found in zip(self.outputs, self.program(self.inputs), strict=True):
            rows.copy_(found)


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, gpu: StandIn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            to, source, *waits = args
            places = self._gpu.place(source), self._gpu.place(to)
            if places != ("host", "device"):  # a replayed graph's own
                self._gpu.log.append(("copy", self._gpu._current, *places, "waits" if waits != [True] else "goes on"))
        return func(*args, **(kwargs or {}))
