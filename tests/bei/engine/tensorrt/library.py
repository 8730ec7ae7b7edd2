"""The stand-in of TensorRT: ONNX Runtime computes a plan's ONNX graph in the simulated device's memory.

The rules are those of TensorRT's documentation: shapes within a chosen profile, every address set, activation memory
that is large enough, aligned and used by one step at a time, no change of what a recorded step was made from.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from tests.bei.engine.tensorrt.device import Device, Operation, Range
from tests.bei.engine.tensorrt.memory import ALIGNMENT
from tests.bei.engine.tensorrt.plans import HEADER_BYTES, SimulatedPlan, body_size, plan_of, zeroed
from tests.support.standin import Behaviour, call

_DTYPES: dict[str, tuple[str, npt.DTypeLike]] = {
    "tensor(int32)": ("INT32", np.int32),
    "tensor(float)": ("FLOAT", np.float32),
    "tensor(float16)": ("HALF", np.float16),
}
Shape = tuple[int, ...]


class Library:
    """A library of ``version`` on ``device``. Tests set its behaviour: ``refusals``: errors of the next steps;
    ``validity``: TensorRT-RTX's verdict on plans; ``steps``: numbers of computed steps by profile."""

    def __init__(self, device: Device, version: str) -> None:
        self.device = device
        self.version = version
        self.refusals: list[str] = []
        self.contexts_left: int | None = None  # remaining contexts; None: unlimited
        self.exceptions: dict[str, list[type[Exception]]] = {}  # the bindings' next errors, by method
        self.validity = ("VALID", 0)
        self.spoils_recorded = False  # recorded steps give wrong outputs
        self.steps: list[int] = []
        self.shapes: dict[int, set[tuple[Shape, ...]]] = {}  # shapes of the inputs of steps, by profile
        self.classes: dict[str, type] = {}
        self.contexts: list[_Context] = []  # live contexts

    def asked(self, method: str) -> None:
        """Raise the next error of ``method``, if one is set."""
        if self.exceptions.get(method):
            raise self.exceptions[method].pop(0)("shapes\nare not known")

    def behaviours(self, *, is_rtx: bool) -> dict[str, type]:
        """The classes of the library that an engine uses; their objects know the library."""
        runtime, config = (_RTXRuntime, _RTXRuntimeConfig) if is_rtx else (_Runtime, _RuntimeConfig)
        classes = {
            "Runtime": runtime,
            "ICudaEngine": _Engine,
            "IExecutionContext": _Context,
            "IRuntimeConfig": config,
            "Refitter": _Refitter,
            "OnnxParserRefitter": _ParserRefitter,
            "ParserError": _ParserError,
        }
        # Separate classes for each library, which the behaviours find through their class.
        self.classes = {name: type(cls.__name__, (cls,), {"_library": self}) for name, cls in classes.items()}
        return self.classes


class _OfLibrary(Behaviour):
    _library: Library
    _logger: Any

    @property
    def _device(self) -> Device:
        return self._library.device

    def _error(self, text: str) -> None:
        call(self._logger, "log", "ERROR", text)

    def _made(self, name: str, *arguments: Any) -> Any:
        """An object of the behaviour of ``name``, of the same library."""
        return self._library.classes[name](*arguments)


class _Runtime(_OfLibrary):
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, reader: Any) -> Any:
        if threading.get_ident() not in self._device.used_by:
            raise self._device.violated("a plan is loaded while no CUDA context is current")
        try:
            size = body_size(_read_all(reader, HEADER_BYTES))
        except ValueError as error:
            return self._error(f"Deserialization failed: {error}")
        body = _read_all(reader, size)
        if len(body) < size:
            return self._error("Deserialization failed: not enough data")
        plan = plan_of(body)
        if plan.version != self._library.version:
            return self._error(f"Serialization assertion failed: version {plan.version}")
        memory = self._device.memory
        if memory.used + plan.weight_bytes > memory.limit:
            return self._error("Requested amount of GPU memory could not be allocated")
        return self._made("ICudaEngine", plan, self._logger)


class _RTXRuntime(_Runtime):
    engine_header_size = HEADER_BYTES

    def get_engine_validity(self, buffer: Any) -> tuple[Any, int]:
        if len(buffer) < HEADER_BYTES:
            raise self._device.violated("less than a plan's header is asked about")
        kind, diagnostics = self._library.validity
        return self._module.EngineValidity[kind], diagnostics


def _read_all(reader: Any, size: int) -> bytes:
    """Read like the bindings: until there is enough, or no bytes come."""
    pieces = b""
    while len(pieces) < size:
        piece = bytes(call(reader, "read", size - len(pieces), 0))
        if not piece:
            break
        pieces += piece
    return pieces


class _Engine(_OfLibrary):
    def __init__(self, plan: SimulatedPlan, logger: Any) -> None:
        self._plan, self._logger = plan, logger
        self._weight_bytes = plan.weight_bytes
        self._device.memory.reserved += self._weight_bytes
        self._set_graph(plan.graph if plan.has_weights else zeroed(plan.graph))

    def _set_graph(self, graph: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._outputs = {value.name: value for value in self._session.get_outputs()}

    def _released(self) -> None:
        self._device.memory.reserved -= self._weight_bytes

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._plan.profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return self._plan.activation_bytes

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return self._plan.activation_bytes

    def get_engine_stat(self, stat: Any) -> int:
        return self._weight_bytes

    def get_tensor_name(self, index: int) -> str:
        return str([*self._inputs, *self._outputs][index])

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in self._inputs else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> str:
        kind: str = (self._inputs | self._outputs)[name].type
        return _DTYPES[kind][0]

    def get_tensor_shape(self, name: str) -> Shape:
        return tuple(size if isinstance(size, int) else -1 for size in (self._inputs | self._outputs)[name].shape)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Shape]:
        return [tuple(shape) for shape in self._plan.profiles[profile_index][name]]

    def create_runtime_config(self) -> Any:
        return self._made("IRuntimeConfig")

    def create_execution_context(self, how: Any) -> Any:
        self._library.asked("create_execution_context")
        strategy = how._strategy if isinstance(how, _RuntimeConfig) else how
        if strategy.name != "USER_MANAGED":
            raise self._device.violated("a context has activation memory of its own")
        if self._library.contexts_left == 0:
            return self._error("Cannot allocate persistent memory: out of memory")
        if self._library.contexts_left is not None:
            self._library.contexts_left -= 1
        return self._made("IExecutionContext", self, how if isinstance(how, _RuntimeConfig) else None)


class _RuntimeConfig(_OfLibrary):
    def __init__(self) -> None:
        self._strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy


class _RTXRuntimeConfig(_RuntimeConfig):
    def __init__(self) -> None:
        super().__init__()
        self.cuda_graph_strategy = "DISABLED"
        self.dynamic_shapes_kernel_specialization_strategy = "LAZY"


class _Context(_OfLibrary):
    def __init__(self, engine: _Engine, config: Any) -> None:
        self._engine, self._logger = engine, engine._logger
        self._config = config
        self._profile: int | None = None
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._activations: tuple[int, int] | None = None
        self._is_released = False
        self._flushed: tuple[Any, ...] | None = None  # shapes of its last run
        self._library.contexts.append(self)

    def _strategies(self) -> list[str]:
        """The settings of TensorRT-RTX for CUDA graphs and dynamic shapes."""
        kinds = (self._config.cuda_graph_strategy, self._config.dynamic_shapes_kernel_specialization_strategy)
        return [kind if isinstance(kind, str) else kind.name for kind in kinds]

    def _released(self) -> None:
        self._is_released = True
        self._library.contexts.remove(self)
        self._device.held.pop(id(self), None)

    def set_optimization_profile_async(self, profile_index: int, stream: int) -> bool:
        self._device.stream(stream)
        if not 0 <= profile_index < len(self._engine._plan.profiles):
            self._error(f"Profile index {profile_index} is out of range")
            return False
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._library.asked("set_device_memory")
        if memory % ALIGNMENT:
            raise self._device.violated("activation memory is not aligned")
        if size < self._engine._plan.activation_bytes:
            raise self._device.violated("activation memory is too small")
        self._device.view(memory, size, "device", "activation memory")
        self._activations = self._device.held[id(self)] = (memory, memory + size)

    def set_input_shape(self, name: str, shape: Any) -> bool:
        if self._profile is None:
            raise self._device.violated("shapes are set before a profile is chosen")
        least, _, most = self._engine._plan.profiles[self._profile][name]
        sizes = tuple(int(size) for size in shape)
        if len(sizes) != len(most) or not all(
            low <= size <= high for low, size, high in zip(least, sizes, most, strict=True)
        ):
            self._error(f"Supplied shape {sizes} of {name} is out of the profile {self._profile}: {least} to {most}")
            return False
        self._shapes[name] = sizes
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        self._library.asked("infer_shapes")
        return [name for name in self._engine._inputs if name not in self._shapes]

    def execute_async_v3(self, stream: int) -> bool:
        self._library.asked("execute_async_v3")
        if self._library.refusals:
            self._error(self._library.refusals.pop(0))
            return False
        missing = [name for name in self._engine._inputs if name not in self._shapes]
        tensors = [*self._engine._inputs, *self._engine._outputs]
        missing += [name for name in tensors if name not in self._addresses]
        if missing:
            self._error(f"Neither shape nor address of {', '.join(missing)}")
            return False
        if self._activations is None:
            raise self._device.violated("a step has no activation memory")
        state = self._device.stream(stream)
        is_recorded = state.captured is not None
        if is_recorded and self._flushed != self._state():
            state.capture_failed = True  # deferred work for new shapes cannot be recorded
        self._flushed = self._state()
        self._library.shapes.setdefault(self._profile or 0, set()).add(tuple(self._shapes.values()))
        self._device.enqueue(stream, self._step(is_recorded=is_recorded))
        return True

    def _state(self) -> tuple[Any, ...]:
        return (self._profile, dict(self._shapes), dict(self._addresses), self._activations)

    def _step(self, *, is_recorded: bool) -> Operation:
        """A step with the current addresses and shapes, as GPU kernels get them."""
        state = self._state()
        profile, shapes, addresses, activations = state
        reads: list[Range] = []
        for name, value in self._engine._inputs.items():
            size = _num_bytes(shapes[name], _DTYPES[value.type][1])
            reads.append((addresses[name], addresses[name] + size))
        writes = [activations]
        sizes = self._sizes(shapes)
        for name, value in self._engine._outputs.items():
            shape = tuple(sizes.get(size, size) for size in value.shape)
            writes.append((addresses[name], addresses[name] + _num_bytes(shape, np.float32)))

        def act() -> None:
            if self._is_released:
                raise self._device.violated("a step runs whose context is gone")
            if is_recorded and self._state() != state:
                raise self._device.violated("a recorded step runs after its context was changed")
            self._library.steps.append(profile)
            self._device.view(activations[0], activations[1] - activations[0], "device", "activation memory")
            self._compute(shapes, addresses)
            if is_recorded and self._library.spoils_recorded:
                start, end = writes[1]
                self._device.view(start, end - start, "device", "output").view(np.float32)[:] += 1

        return Operation("step", act, reads, writes)

    def _sizes(self, shapes: dict[str, Shape]) -> dict[Any, int]:
        return {
            dimension: size
            for name, value in self._engine._inputs.items()
            for dimension, size in zip(value.shape, shapes[name], strict=True)
        }

    def _compute(self, shapes: dict[str, Shape], addresses: dict[str, int]) -> None:
        feeds = {}
        for name, value in self._engine._inputs.items():
            dtype = _DTYPES[value.type][1]
            size = _num_bytes(shapes[name], dtype)
            raw = self._device.view(addresses[name], size, "device", f"input {name}")
            feeds[name] = raw.view(dtype).reshape(shapes[name]).copy()
        names = [*self._engine._outputs]
        try:
            answers = self._engine._session.run(names, feeds)
        except Exception as error:  # ONNX Runtime's: indices out of bounds
            raise self._device.violated(f"a step reads nonsense: {error}") from error
        for name, rows in zip(names, answers, strict=True):
            target = self._device.view(addresses[name], rows.nbytes, "device", f"output {name}")
            target[:] = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def _num_bytes(shape: Shape, dtype: npt.DTypeLike) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


class _ParserError(_OfLibrary):
    def __init__(self, text: str) -> None:
        self._text = text

    def desc(self) -> str:
        return self._text


class _Refitter(_OfLibrary):
    def __init__(self, engine: _Engine, logger: Any) -> None:
        self._engine, self._logger = engine, logger
        self._graph: bytes | None = None

    def get_missing_weights(self) -> list[str]:
        needed = {tensor.name for tensor in onnx.load_from_string(self._engine._plan.graph).graph.initializer}
        given = {tensor.name for tensor in onnx.load_from_string(self._graph or b"").graph.initializer}
        return sorted(needed - given)

    def refit_cuda_engine(self) -> bool:
        if self._graph is None or self.get_missing_weights():
            self._error("weights are missing")
            return False
        self._engine._set_graph(self._graph)
        return True


class _ParserRefitter(_OfLibrary):
    def __init__(self, refitter: _Refitter, logger: Any) -> None:
        self._refitter, self._logger = refitter, logger
        self._errors: list[str] = []

    def refit_from_file(self, model: str) -> bool:
        try:
            self._refitter._graph = onnx.load(Path(model)).SerializeToString()
        except Exception as error:  # onnx's errors for an invalid file
            self._errors.append(f"{type(error).__name__} in the model")
            return False
        return True

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._made("ParserError", self._errors[index])
