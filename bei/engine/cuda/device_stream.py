"""A stream of the engine, with its staging buffers and recorded steps.

A stream runs one batch at a time; with two streams, one batch is prepared and copied while the other is computed.
Staging buffers grow to the largest step, and are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bei.artifact.manifest import OutputInfo
from bei.core import Float32Array, Outputs, PackedBatch
from bei.engine.cuda.device import (
    CudaDevice,
    HostBuffer,
    LoadedPackage,
    RecordedGraph,
    Tensor,
    TensorSlice,
    TransferBuffer,
)
from bei.engine.cuda.step_sizes import eager_sizes, smallest_fitting
from bei.engine.packing import Sizes, filled, graph_inputs, rows_of_tokens
from bei.engine.recorded_steps import NoMemoryError, check_recorded
from bei.errors import EngineDeadError, EngineError

_ALIGNMENT = 256  # of tensors in a buffer, like CUDA's own allocations
_FLOAT_BYTES = np.dtype(np.float32).itemsize

Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class _Recorded:
    """A recorded step of ``sizes``, which reads the upload in ``block``."""

    sizes: Sizes
    block: TransferBuffer
    graph: RecordedGraph


class PackageStream:
    """Runs steps of ``package``, with input tensors ``inputs`` and ``outputs``, one at a time."""

    def __init__(
        self, device: CudaDevice, package: LoadedPackage, inputs: Sequence[str], outputs: Sequence[OutputInfo]
    ) -> None:
        self._device, self._package = device, package
        self._input_names, self._outputs = inputs, outputs
        self._stream = device.stream()
        self._block: TransferBuffer | None = None
        self._results: HostBuffer | None = None
        self._recorded: list[_Recorded] = []

    def run(self, batch: PackedBatch, wanted: Sequence[OutputInfo]) -> Outputs:
        """Copies of the ``wanted`` outputs for ``batch``. Raises NoMemoryError, EngineError; EngineDeadError if the
        device is unusable."""
        try:
            steps = ((step.sizes, step) for step in self._recorded)
            recorded = smallest_fitting(steps, batch, self._input_names)
            if recorded is None:
                return self._computed(batch, eager_sizes(batch), wanted)
            return self._replayed(recorded, batch, wanted)
        except BaseException as error:
            self._settle(error, batch)
            raise

    def drop(self) -> None:
        """Free graphs, memory and package; the stream cannot be used afterwards."""
        self._recorded.clear()
        self._block = self._results = self._package = self._stream = None

    def _computed(self, batch: PackedBatch, sizes: Sizes, wanted: Sequence[OutputInfo]) -> Outputs:
        arrays = graph_inputs(batch, self._input_names, sizes)
        places = _places(arrays)
        if self._block is None or self._block.size < places[-1].end:
            self._block = None  # free the old one first
            self._block = self._device.block(_rounded_up(places[-1].end))
        inputs = self._uploaded(self._block, arrays, places)
        return self._downloaded(self._device.compute(self._package, inputs, self._stream), batch, wanted)

    def _replayed(self, recorded: _Recorded, batch: PackedBatch, wanted: Sequence[OutputInfo]) -> Outputs:
        arrays = graph_inputs(batch, self._input_names, recorded.sizes)
        self._upload(recorded.block, arrays, _places(arrays))
        self._device.replay(recorded.graph, self._stream)
        return self._downloaded(recorded.graph.outputs, batch, wanted)

    def _uploaded(self, block: TransferBuffer, arrays: Arrays, places: Sequence[TensorSlice]) -> list[Tensor]:
        self._upload(block, arrays, places)
        return self._device.views(block, places)

    def _upload(self, block: TransferBuffer, arrays: Arrays, places: Sequence[TensorSlice]) -> None:
        """Copy ``arrays`` into the block and upload them together. The host memory is free: the previous step was
        awaited."""
        for array, place in zip(arrays.values(), places, strict=True):
            block.host[place.start : place.end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._device.upload(block, places[-1].end, self._stream)

    def _downloaded(self, tensors: Sequence[Tensor], batch: PackedBatch, wanted: Sequence[OutputInfo]) -> Outputs:
        """Download the rows without filler, wait, and copy them again, since the next step reuses the buffer."""
        shapes = {
            output.name: (batch.num_computed if output.per_token else batch.batch_size, output.dimension)
            for output in wanted
        }
        starts, end = {}, 0
        for name, (rows, width) in shapes.items():
            starts[name] = end
            end += _aligned(rows * width * _FLOAT_BYTES)
        if self._results is None or self._results.size < end:
            self._results = None
            self._results = self._device.results(_rounded_up(end))
        for output, tensor in zip(self._outputs, tensors, strict=True):
            if output.name in shapes:
                count = shapes[output.name][0]
                self._device.download(tensor, count, self._results, starts[output.name], self._stream)
        self._device.wait(self._stream)
        found = {name: _rows(self._results, starts[name], shape) for name, shape in shapes.items()}
        for output in wanted:
            if output.per_token:
                found[output.name] = rows_of_tokens(found[output.name], batch)
        return found

    def _settle(self, error: BaseException, batch: PackedBatch) -> None:
        """Wait for the remaining work of a failed step, which still uses the buffers; return the error to raise."""
        is_out_of_memory = isinstance(error, RuntimeError) and self._device.is_out_of_memory(error)
        lost = self._device.settle(self._stream)
        if lost is not None:
            raise EngineDeadError(
                f"The GPU does not answer this process any more ({lost}): restart the server. It began with: "
                f"{first_line(error)}"
            ) from error
        if is_out_of_memory:
            raise NoMemoryError(first_line(error)) from error
        if isinstance(error, RuntimeError):
            raise EngineError(
                f"PyTorch failed on a batch of {batch.batch_size} sequences and {batch.num_tokens} tokens: "
                f"{first_line(error)}"
            ) from error

    @property
    def graph_bytes(self) -> int:
        """Memory of the recorded steps."""
        return self._device.graph_bytes(self._stream)

    def record(self, sizes: Sizes, max_seq_len: int) -> None:
        """Record the step of ``sizes``, and compare its outputs with those of the unrecorded step. ``max_seq_len``: the
        model's.

        Raises EngineError if recording fails or outputs differ, NoMemoryError, EngineDeadError.
        """
        first, second = (filled(sizes, token_id, max_seq_len) for token_id in (0, 1))
        try:
            expected = self._computed(second, sizes, self._outputs)  # also loads the kernels before recording
            recorded = self._newly_recorded(sizes, first)
            self._replayed(recorded, first, self._outputs)  # overwrite the output buffers
            answers = self._replayed(recorded, second, self._outputs)
        except BaseException as error:
            self._settle(error, second)
            raise
        check_recorded(sizes, answers, expected)
        self._recorded.append(recorded)

    def _newly_recorded(self, sizes: Sizes, batch: PackedBatch) -> _Recorded:
        arrays = graph_inputs(batch, self._input_names, sizes)
        places = _places(arrays)
        block = self._device.block(places[-1].end)
        inputs = self._uploaded(block, arrays, places)
        self._device.wait(self._stream)
        return _Recorded(sizes, block, self._device.record(self._package, inputs, self._stream))


def _places(arrays: Arrays) -> list[TensorSlice]:
    """Consecutive, aligned slices."""
    places: list[TensorSlice] = []
    end = 0
    for array in arrays.values():
        places.append(TensorSlice(end, array.shape, array.dtype))
        end = _aligned(places[-1].end)
    return places


def _rows(results: HostBuffer, start: int, shape: tuple[int, int]) -> Float32Array:
    num_bytes = shape[0] * shape[1] * _FLOAT_BYTES
    return results.host[start : start + num_bytes].view(np.float32).reshape(shape).copy()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _rounded_up(size: int) -> int:
    """``size`` rounded up to a power of two, so that memory is rarely reallocated."""
    return max(_ALIGNMENT, 1 << (size - 1).bit_length())


def first_line(error: BaseException) -> str:
    """PyTorch's message without the stack of C++ frames."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
