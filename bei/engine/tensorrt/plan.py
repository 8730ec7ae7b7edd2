"""A TensorRT plan loaded from its file: tensors, profiles, execution contexts.

The module (``tensorrt`` or ``tensorrt_rtx``) is an argument. Features of only one of them are looked up by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from bei.artifact.held_files import Folder, shown_path
from bei.artifact.manifest import TENSORRT_GRAPH, TENSORRT_PLAN, OutputInfo, Plan, PlanProfile
from bei.core import PackedBatch
from bei.engine.packing import graph_inputs
from bei.engine.tensorrt.cuda import Cuda, Stream
from bei.engine.tensorrt_logger import process_logger
from bei.errors import EngineError

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule, TensorRTRTXModule

log = logging.getLogger(__name__)

# Bytes of a plan read at a time: a single piece of host memory, whatever the plan's size.
_CHUNK = 64 << 20

Shape = tuple[int, ...]

# Remedies for TensorRT-RTX's EngineInvalidityDiagnostics.
_REMEDIES = {
    "VERSION_MISMATCH": "build it again with the TensorRT-RTX that is installed here",
    "UNSUPPORTED_CC": "build it again with --compute-capability of this machine's GPU",
    "OLD_CUDA_DRIVER": "install a newer driver of NVIDIA",
    "OLD_CUDA_RUNTIME": "install a newer CUDA runtime, with pip install --upgrade 'bei[tensorrt-rtx]'",
    "INSUFFICIENT_GPU_MEMORY": "stop what else uses the GPU's memory, or build with a smaller --max-num-tokens",
    "MALFORMED_ENGINE": "copy the artifact anew from its source",
    "CUDA_ERROR": "install the driver of NVIDIA again, until nvidia-smi answers",
}

# The size of a profile that an input's dimensions determine; nearly every graph has the first two.
_DIMENSIONS: dict[str, tuple[str, ...]] = {
    "input_ids": ("tokens",),
    "pad_index": ("sequences", "longest"),
    "first_index": ("sequences",),
    "slot_ids": ("longest",),
}


@dataclass(frozen=True)
class Profile:
    """An optimization profile. ``least`` and ``most``: input name -> shape. ``about``: its entry in the manifest."""

    index: int
    about: PlanProfile
    least: Mapping[str, Shape]
    most: Mapping[str, Shape]

    def holds(self, inputs: Mapping[str, npt.NDArray[Any]]) -> bool:
        """True if the shapes of all ``inputs`` are within the profile."""
        return all(
            len(array.shape) == len(self.most[name])
            and all(
                least <= size <= most
                for least, size, most in zip(self.least[name], array.shape, self.most[name], strict=True)
            )
            for name, array in inputs.items()
        )


class LoadedPlan:
    """TensorRT's engine from the file in ``folder``, with weights, checked against ``about`` and ``outputs``.

    Raises EngineError if the file is truncated or no plan, the weights do not fit, or the manifest describes another
    plan.
    """

    def __init__(self, trt: TensorRTModule, folder: Folder, about: Plan, outputs: Seq[OutputInfo]) -> None:
        self.trt = trt
        self.logger = process_logger(trt.ILogger)
        runtime = trt.Runtime(self.logger)
        _check_validity(trt, runtime, self.logger, folder / TENSORRT_PLAN)
        self.engine = _deserialized(trt, runtime, self.logger, folder / TENSORRT_PLAN)
        self.runtime: TensorRTModule.Runtime | None = runtime
        if about.refit:
            _put_weights(trt, self.engine, self.logger, folder / TENSORRT_GRAPH)
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        is_input = {name: self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.input_names = [name for name in names if is_input[name]]
        self.outputs = [self._output(info, names) for info in outputs]
        spare = {name for name in names if not is_input[name]} - {output.name for output in outputs}
        if spare:
            raise EngineError(f"The plan has outputs that the manifest does not name: {', '.join(sorted(spare))}.")
        self._check_inputs()
        self.profiles = self._profiles(about)

    def close(self) -> None:
        """Free the engine, then the runtime. Contexts must be freed before."""
        del self.engine
        self.runtime = None

    @property
    def activation_bytes(self) -> int:
        """Memory that a context needs to compute, for any profile."""
        return int(self.engine.device_memory_size_v2)

    @property
    def weight_bytes(self) -> int:
        """Device memory of the weights."""
        return int(self.engine.get_engine_stat(self.trt.EngineStat.TOTAL_WEIGHTS_SIZE))

    def _check_inputs(self) -> None:
        """Raise EngineError unless ``bei.engine.packing`` provides every input with the right type."""
        types = {np.dtype(np.int32): self.trt.DataType.INT32, np.dtype(np.float32): self.trt.DataType.FLOAT}
        try:
            arrays = graph_inputs(PackedBatch(np.zeros(1, np.int32), np.array([0, 1], np.int32)), self.input_names)
        except KeyError as error:
            raise EngineError(f"The plan has an input {error} that this bei does not know: upgrade bei.") from error
        for name, array in arrays.items():
            dtype = self.engine.get_tensor_dtype(name)
            if dtype != types[array.dtype]:
                raise EngineError(f"The plan's input {name} is {dtype.name}, not {array.dtype}. Build it again.")

    def _output(self, info: OutputInfo, names: Seq[str]) -> OutputInfo:
        """``info``, if the plan has this output: float32, with rows of its width."""
        if info.name not in names:
            raise EngineError(f"The plan has no output {info.name!r}, which the manifest names. Build it again.")
        dtype, shape = self.engine.get_tensor_dtype(info.name), tuple(self.engine.get_tensor_shape(info.name))
        if dtype != self.trt.DataType.FLOAT or len(shape) != 2 or shape[1] != info.dimension:
            raise EngineError(
                f"The plan's output {info.name!r} is {dtype.name} {list(shape)}, the manifest says rows of "
                f"{info.dimension} float32. Build it again."
            )
        return info

    def _profiles(self, about: Plan) -> list[Profile]:
        if len(about.profiles) != self.engine.num_optimization_profiles:
            raise EngineError(
                f"The plan has {self.engine.num_optimization_profiles} profiles, the manifest names "
                f"{len(about.profiles)}. Build it again."
            )
        profiles = []
        for index, said in enumerate(about.profiles):
            ranges = {name: self.engine.get_tensor_profile_shape(name, index) for name in self.input_names}
            least = {name: tuple(shapes[0]) for name, shapes in ranges.items()}
            most = {name: tuple(shapes[2]) for name, shapes in ranges.items()}
            for name, dimensions in _DIMENSIONS.items():
                for axis, dimension in enumerate(dimensions if name in ranges else ()):
                    lowest, _, highest = getattr(said, dimension)
                    if (least[name][axis], most[name][axis]) != (lowest, highest):
                        raise EngineError(
                            f"The plan's profile {said.name} takes {dimension} from {least[name][axis]} to "
                            f"{most[name][axis]}, the manifest says {lowest} to {highest}. Build it again."
                        )
            profiles.append(Profile(index, said, least, most))
        return profiles

    def profile_for(self, inputs: Mapping[str, npt.NDArray[Any]], first: int = 0) -> Profile:
        """The first profile from ``first`` on that holds ``inputs``; narrower profiles come first. Raises
        EngineError."""
        for profile in self.profiles[first:]:
            if profile.holds(inputs):
                return profile
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        raise EngineError(f"No profile of the plan holds this batch ({shapes}): build it again with larger limits.")

    def context(
        self, profile: Profile, cuda: Cuda, stream: Stream, activations: int, *, captures_itself: bool = False
    ) -> TensorRTModule.IExecutionContext:
        """An execution context for ``profile``, which computes in the ``activation_bytes`` at ``activations``.

        Contexts that share this memory must not run at the same time. ``captures_itself``: for few shapes, for each of
        which TensorRT-RTX compiles kernels and captures and launches a CUDA graph.
        """
        with raised_by_bindings("made no execution context", self.logger):
            context = self._new_context(captures_itself=captures_itself)
            try:
                if not context.set_optimization_profile_async(profile.index, int(stream)):
                    raise EngineError(f"TensorRT refused its profile {profile.about.name}: {self.logger.said()}")
                cuda.synchronize(stream)
                context.set_device_memory(activations, self.activation_bytes)
            except BaseException:
                del context  # the error's frames would keep it alive
                raise
            return context

    def _new_context(self, *, captures_itself: bool) -> TensorRTModule.IExecutionContext:
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if hasattr(self.trt, "DynamicShapesKernelSpecializationStrategy"):
            rtx = cast("TensorRTRTXModule", self.trt)
            config = self.engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            of_rtx = cast("TensorRTRTXModule.IRuntimeConfig", config)
            if captures_itself:
                of_rtx.cuda_graph_strategy = rtx.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            else:  # nearly every batch has another shape, and kernels for it would be compiled while serving
                kinds = rtx.DynamicShapesKernelSpecializationStrategy
                of_rtx.dynamic_shapes_kernel_specialization_strategy = kinds.NONE
            context = self.engine.create_execution_context(config)
        else:
            context = self.engine.create_execution_context(strategy)
        if context is None:
            raise EngineError(f"TensorRT made no execution context: {self.logger.said()}")
        return context


@contextmanager
def raised_by_bindings(what: str, logger: Any) -> Iterator[None]:
    """A context that turns errors of TensorRT's bindings into EngineError: TensorRT ``what``, and the reason.

    The bindings raise RuntimeError if a call fails, and TypeError for arguments or results that they cannot convert.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        raised = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"TensorRT {what}: {'; '.join([raised, *logger.taken()])}") from error


def _check_validity(trt: TensorRTModule, runtime: TensorRTModule.Runtime, logger: Any, path: Path) -> None:
    """TensorRT-RTX can tell before loading whether a plan is valid."""
    if not hasattr(runtime, "get_engine_validity"):
        return
    rtx, rtx_runtime = cast("TensorRTRTXModule", trt), cast("TensorRTRTXModule.Runtime", runtime)
    with path.open("rb") as file:
        header = file.read(rtx_runtime.engine_header_size)
    if len(header) < rtx_runtime.engine_header_size:
        raise _truncated(path)
    validity, diagnostics = rtx_runtime.get_engine_validity(header)
    kinds = sorted(rtx.EngineInvalidityDiagnostics.__members__.items(), key=lambda kind: int(kind[1]))
    reasons = [name.lower().replace("_", " ") for name, kind in kinds if int(diagnostics) & int(kind)]
    words = "; ".join([*reasons, *logger.taken()]) or "it gives no reason"
    if validity == rtx.EngineValidity.INVALID:
        remedies = [_REMEDIES[name] for name, kind in kinds if int(diagnostics) & int(kind) and name in _REMEDIES]
        remedy = "; ".join(remedies) or "build it again for this machine's GPU"
        raise EngineError(f"TensorRT-RTX says that {shown_path(path)} cannot run here: {words}. To do: {remedy}.")
    if validity == rtx.EngineValidity.SUBOPTIMAL:
        log.warning("TensorRT-RTX says that %s will not run as fast as it could here: %s", shown_path(path), words)


def _deserialized(
    trt: TensorRTModule, runtime: TensorRTModule.Runtime, logger: Any, path: Path
) -> TensorRTModule.ICudaEngine:
    with path.open("rb", buffering=0) as file:
        try:
            reader = _reader(trt.IStreamReaderV2)(file)
            engine = runtime.deserialize_cuda_engine(reader)
        except RuntimeError as error:  # raised by the bindings without a driver
            raise EngineError(f"TensorRT could not read {shown_path(path)}: {' '.join(str(error).split())}") from error
    if engine is None:
        if reader.is_past_end:
            raise _truncated(path)
        raise EngineError(f"TensorRT could not load {shown_path(path)}: {logger.said()}")
    return engine


def _truncated(path: Path) -> EngineError:
    size = path.stat().st_size
    return EngineError(
        f"{shown_path(path)} ends too early, after {size:,} bytes: copy the artifact anew from its source."
    )


@cache
def _reader(base: Any) -> Any:
    """A reader of plans, derived from TensorRT's class ``base``."""

    class PlanReader(base):  # type: ignore[misc]
        """Reads the requested bytes in pieces; at the file's end it returns none, which the bindings take for a stop.

        The file goes to the device piece by piece, and is never in host memory as a whole.
        """

        def __init__(self, file: BinaryIO) -> None:
            base.__init__(self)
            self.is_past_end = False
            self._file = file

        def read(self, num_bytes: int, stream: int) -> bytes:
            piece = self._file.read(min(num_bytes, _CHUNK))
            self.is_past_end = self.is_past_end or (num_bytes > 0 and not piece)
            return piece

        def seek(self, offset: int, where: Any) -> bool:
            self._file.seek(offset, {"SET": 0, "CUR": 1, "END": 2}[where.name])
            return True

    return PlanReader


def _put_weights(trt: TensorRTModule, engine: TensorRTModule.ICudaEngine, logger: Any, graph: Path) -> None:
    """Load the weights of the ONNX file ``graph`` into a plan compiled without weights. Raises EngineError."""
    if not graph.is_file():
        raise EngineError(
            f"The plan holds no weights, and {shown_path(graph)} is missing: copy the artifact anew from its source."
        )
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(graph)):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise EngineError(
            f"TensorRT could not take weights from {shown_path(graph)}: {'; '.join(errors) or logger.said()}"
        )
    missing = refitter.get_missing_weights()
    if missing:
        raise EngineError(
            f"{shown_path(graph)} lacks {len(missing)} weights of the plan, {missing[0]} among them. Build the "
            "artifact again."
        )
    if not refitter.refit_cuda_engine():
        raise EngineError(f"TensorRT could not put weights into the plan: {logger.said()}")
