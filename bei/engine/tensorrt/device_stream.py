"""A CUDA stream of a TensorRT engine with its buffers, execution contexts and captured steps.

A stream runs one batch at a time; with two streams, one batch is prepared and copied while the other is computed.
Everything is allocated when the stream is created, for the largest shapes of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bei.artifact.manifest import OutputInfo
from bei.core import Float32Array, Outputs, PackedBatch
from bei.engine.packing import Sizes, filled, graph_inputs, rows_of_tokens
from bei.engine.recorded_steps import check_recorded
from bei.engine.tensorrt.cuda import Cuda, aligned
from bei.engine.tensorrt.cuda_graphs import CapturedStep, cheapest, cheapest_sizes
from bei.engine.tensorrt.plan import LoadedPlan, Profile, Shape, raised_by_bindings
from bei.errors import EngineDeadError, EngineError

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule

_FLOAT_BYTES = np.dtype(np.float32).itemsize


class DroppableContext:
    """An execution context that can be freed although other objects, such as an error's frames, still refer to it."""

    def __init__(self, context: TensorRTModule.IExecutionContext) -> None:
        self._context: TensorRTModule.IExecutionContext | None = context

    @property
    def context(self) -> TensorRTModule.IExecutionContext:
        """The context. Raises EngineError after ``drop``."""
        if self._context is None:
            raise EngineError("The engine is closed.")
        return self._context

    def drop(self) -> None:
        self._context = None


class PlanStream:
    """Runs steps of ``plan``, one at a time. Raises EngineError without enough memory.

    ``own_sizes``: sizes that TensorRT-RTX captures itself; the first profile then runs steps of these sizes only.
    """

    def __init__(self, cuda: Cuda, plan: LoadedPlan, resources: ExitStack, *, own_sizes: Seq[Sizes] = ()) -> None:
        self._cuda, self._plan = cuda, plan
        self._stream = cuda.stream(resources)
        self._done = cuda.event(resources)
        self._inputs = cuda.block(max(_num_bytes(profile.most) for profile in plan.profiles), resources)
        self._output_offsets, size = _output_layout(plan)
        self._results = cuda.block(size, resources)
        self._activation_bytes = max(1, plan.activation_bytes)
        self._activations = cuda.device_memory(self._activation_bytes, resources)
        self._captured: list[CapturedStep] = []
        self._own_sizes = own_sizes
        self._contexts = [
            self._context(profile, resources, captures_itself=bool(own_sizes) and profile.index == 0)
            for profile in plan.profiles
        ]

    @property
    def device_bytes(self) -> int:
        """Device memory of its buffers."""
        return self._inputs.size + self._results.size + self._activation_bytes

    def _context(self, profile: Profile, resources: ExitStack, *, captures_itself: bool = False) -> DroppableContext:
        """A context for ``profile``, which ``resources`` drops before the memory it computes in is freed."""
        activations, stream = self._activations, self._stream
        held = DroppableContext(
            self._plan.context(profile, self._cuda, stream, activations, captures_itself=captures_itself)
        )
        resources.callback(held.drop)
        return held

    # A step.

    def run(self, batch: PackedBatch, wanted: Seq[OutputInfo]) -> Outputs:
        """Copies of the ``wanted`` outputs for ``batch``. Raises EngineError; EngineDeadError if the GPU is
        unusable."""
        try:
            captured = cheapest(self._captured, batch, self._plan.input_names)
            if captured is None:
                self._enqueue(batch)
            else:
                self._upload(graph_inputs(batch, self._plan.input_names, captured.sizes))
                self._cuda.launch(captured.executable, self._stream)
            return self._downloaded(batch, wanted)
        except BaseException as error:
            self._settle(error)
            raise

    def _enqueue(self, batch: PackedBatch) -> None:
        sizes = cheapest_sizes(self._own_sizes, batch, self._plan.input_names)
        inputs = graph_inputs(batch, self._plan.input_names, sizes)
        profile = self._plan.profile_for(inputs, first=1 if self._own_sizes and sizes is None else 0)
        self._execute(self._contexts[profile.index], inputs)

    def rehearse(self, max_seq_len: int) -> None:
        """Run a step of each of ``own_sizes``, so that TensorRT-RTX compiles kernels and captures a graph.
        ``max_seq_len``: the model's. Raises like ``run``."""
        for sizes in self._own_sizes:
            try:
                self._answers(self._contexts[0], filled(sizes, 0, max_seq_len), sizes)
            except BaseException as error:
                self._settle(error)
                raise

    def _execute(self, context: DroppableContext, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Upload ``inputs`` and enqueue ``context``, without waiting."""
        offsets = self._upload(inputs)
        with raised_by_bindings("did not take a step", self._plan.logger):
            self._bind(context, inputs, offsets)
        self._compute(context)

    def _upload(self, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
        """Copy ``inputs`` into the buffer and upload them together. Returns their offsets in bytes.

        The host memory is free: the previous step was awaited.
        """
        offsets, size = _layout({name: array.shape for name, array in inputs.items()})
        for name, array in inputs.items():
            start = offsets[name]
            self._inputs.host[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._cuda.upload(self._inputs, size, self._stream)
        return offsets

    def _bind(self, held: DroppableContext, inputs: Mapping[str, npt.NDArray[Any]], offsets: Mapping[str, int]) -> None:
        for name, array in inputs.items():
            if not held.context.set_input_shape(name, array.shape):
                raise self._refusal(f"the shape {list(array.shape)} of {name}")
            if not held.context.set_tensor_address(name, self._inputs.device + offsets[name]):
                raise self._refusal(f"the address of {name}")
        for name, offset in self._output_offsets.items():
            if not held.context.set_tensor_address(name, self._results.device + offset):
                raise self._refusal(f"the address of {name}")
        missing = held.context.infer_shapes()
        if missing:
            raise EngineError(f"TensorRT misses the shapes of {', '.join(missing)}. This is a bug.")

    def _compute(self, held: DroppableContext) -> None:
        with raised_by_bindings("did not run a step", self._plan.logger):
            if not held.context.execute_async_v3(int(self._stream)):
                raise EngineError(f"TensorRT did not run a step: {self._plan.logger.said()}")

    def _downloaded(self, batch: PackedBatch, wanted: Seq[OutputInfo]) -> Outputs:
        """Download the rows without filler, wait, and copy them again, since the next step reuses the buffers."""
        sizes = {}
        for output in wanted:
            num_rows = batch.num_computed if output.per_token else batch.batch_size
            sizes[output.name] = num_rows * output.dimension * _FLOAT_BYTES
            self._cuda.download(self._results, self._output_offsets[output.name], sizes[output.name], self._stream)
        self._cuda.record(self._done, self._stream)
        self._cuda.wait(self._done)
        found = {output.name: self._rows(output, sizes[output.name]) for output in wanted}
        for output in wanted:
            if output.per_token:
                found[output.name] = rows_of_tokens(found[output.name], batch)
        return found

    def _rows(self, output: OutputInfo, num_bytes: int) -> Float32Array:
        start = self._output_offsets[output.name]
        values = self._results.host[start : start + num_bytes].view(np.float32)
        return values.reshape(-1, output.dimension).copy()

    def _refusal(self, what: str) -> EngineError:
        return EngineError(f"TensorRT refused {what}: {self._plan.logger.said()}")

    def _settle(self, error: BaseException) -> None:
        """Wait for the remaining work of a failed step, which still uses the buffers."""
        lost = self._cuda.settle(self._stream)
        if lost is not None:
            raise EngineDeadError(
                f"The GPU does not answer this process any more ({lost}): restart the server. It began with: {error}"
            ) from error

    # Captured steps.

    def capture(self, sizes: Sizes, max_seq_len: int, resources: ExitStack) -> None:
        """Capture the step of ``sizes``, and compare its outputs with those of the uncaptured step.

        It gets a context of its own, since running other shapes in a context may change what a captured step reads.
        ``max_seq_len``: the model's. Raises EngineError if capturing fails, outputs differ, or memory is short;
        EngineDeadError.
        """
        first, second = (filled(sizes, token_id, max_seq_len) for token_id in (0, 1))
        with ExitStack() as undone:
            try:
                step = self._recorded(sizes, first, undone)
                expected = self._answers(step.context, second, sizes)
                self._answers(step.context, first, sizes)  # overwrite the shared output buffers
                self._upload(graph_inputs(second, self._plan.input_names, sizes))
                self._cuda.launch(step.executable, self._stream)
                answers = self._downloaded(second, self._plan.outputs)
            except BaseException as error:
                self._settle(error)
                raise
            check_recorded(sizes, answers, expected)
            resources.push(undone.pop_all())
        self._captured.append(step)

    def _recorded(self, sizes: Sizes, batch: PackedBatch, resources: ExitStack) -> CapturedStep:
        profile = self._plan.profile_for(graph_inputs(batch, self._plan.input_names, sizes))
        context = self._context(profile, resources)
        self._answers(context, batch, sizes)  # first run uncaptured: TensorRT may have deferred work for new shapes
        try:
            self._cuda.begin_capture(self._stream)
            self._compute(context)
            executable = self._cuda.end_capture(self._stream, resources)
        except BaseException:
            self._cuda.abandon_capture(self._stream)
            raise
        return CapturedStep(sizes, executable, context)

    def _answers(self, context: Any, batch: PackedBatch, sizes: Sizes) -> Outputs:
        """All outputs, from a context that is not captured."""
        self._execute(context, graph_inputs(batch, self._plan.input_names, sizes))
        return self._downloaded(batch, self._plan.outputs)


def _layout(shapes: Mapping[str, Shape]) -> tuple[dict[str, int], int]:
    """Offsets of consecutive tensors with 4-byte elements, and the total size."""
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name] = end
        end += aligned(int(np.prod(shape)) * _FLOAT_BYTES)
    return offsets, end


def _num_bytes(shapes: Mapping[str, Shape]) -> int:
    return _layout(shapes)[1]


def _output_layout(plan: LoadedPlan) -> tuple[dict[str, int], int]:
    """Offsets of the outputs, each with the most rows of any profile, and the total size."""
    tokens = max(profile.about.tokens[2] for profile in plan.profiles)
    sequences = max(profile.about.sequences[2] for profile in plan.profiles)
    return _layout(
        {output.name: (tokens if output.per_token else sequences, output.dimension) for output in plan.outputs}
    )
