"""Targets ``cuda`` and ``cuda-twin``: an AOTInductor package on an NVIDIA GPU or, slowly, on a CPU.

Not yet run on a GPU: it runs end to end on the CPU with packages of ``cuda-twin``, and its logic on a simulated device
(tests/bei/engine/cuda). Open measurements: docs/decisions.md, "A target for GPUs without TensorRT".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from bei.artifact.held_files import Folder, shown_path
from bei.artifact.manifest import CUDA_WEIGHTS, Manifest, OutputInfo, cuda_package
from bei.core import EngineInfo, Outputs, PackedBatch
from bei.engine.cuda.batch_split import halves
from bei.engine.cuda.device import CudaDevice, LoadedPackage, TorchDevice, TwinDevice
from bei.engine.cuda.device_stream import PackageStream, first_line
from bei.engine.cuda.requirements import check
from bei.engine.cuda.step_sizes import recorded_sizes
from bei.engine.packing import Sizes, graph_inputs, why_unshared
from bei.engine.pytorch import load_torch
from bei.engine.recorded_steps import (
    MEGABYTE,
    WARMUP_LENGTH,
    GpuOptions,
    NoMemoryError,
    equal_texts,
    extreme_batches,
    record_steps,
)
from bei.engine.tensorrt.stream_pool import StreamPool
from bei.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

_CLOSE_PATIENCE_S = 30.0  # for running steps when the engine is closed


@dataclass(frozen=True)
class CudaOptions(GpuOptions):
    """GpuOptions, and ``memory``: GPU memory for all engines of the process together, in MB; 0: no limit."""

    memory: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < 0:
            raise ConfigError(f"A GPU's memory for engines cannot be {self.memory} MB; 0 means all that there is.")


class CudaEngine:
    """A loaded package and its streams.

    ``device``: for tests; None: the target's device, after checks. Raises MissingDependencyError, LibraryVersionError,
    DeviceNotFoundError, ArtifactWrongDeviceError, ArtifactWrongVersionError, ArtifactManifestError, EngineError.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, options: CudaOptions, *, device: CudaDevice | None = None
    ) -> None:
        about = manifest.engine.package
        if device is None:
            purpose = f"Serving {manifest.name} (target {manifest.target})"
            torch = load_torch(purpose)
            about = check(manifest, torch, purpose)
            device = TwinDevice(torch) if manifest.target == "cuda-twin" else TorchDevice(torch, purpose)
        assert about is not None, "whoever brings a device brings a manifest that describes the package"
        if manifest.target == "cuda-twin":
            log.warning("%s: cuda-twin is the slow form of target cuda, for tests: do not serve with it", manifest.name)
        if options.memory and not device.is_gpu:
            raise ConfigError(
                f"gpu_megabytes limits a GPU's memory, and the artifact of {manifest.name} is for a CPU: leave it out."
            )
        _check_inputs(about.inputs)
        self._device = device
        self._is_bounded = options.memory > 0
        self._outputs: Sequence[OutputInfo] = manifest.outputs
        self._graph_bytes = options.cuda_graphs * MEGABYTE
        records = device.is_gpu and options.cuda_graphs > 0
        self._planned = recorded_sizes(manifest.limits, about.inputs) if records else []
        most = options.memory * MEGABYTE if options.memory else None
        package = _loaded(device, folder, about.weight_bytes, most)
        streams = [PackageStream(device, package, about.inputs, self._outputs) for _ in range(options.num_streams)]
        self._all_streams = streams
        self._streams = StreamPool(streams)
        self._has_split = False
        self._info = EngineInfo(
            target=manifest.target,
            precision=manifest.precision,
            device=device.name,
            limits=manifest.limits,
            outputs={output.name: output.dimension for output in self._outputs},
            per_token=frozenset(output.name for output in self._outputs if output.per_token),
            num_streams=options.num_streams,
            # The sizes that are recorded as far as the graphs' memory allows; other steps are padded less.
            token_buckets=tuple(sorted({sizes.tokens for sizes in self._planned})),
            memory_bytes=about.weight_bytes if device.is_gpu else None,
            is_replaceable=not device.is_gpu,  # a new one would share the CUDA context
            unshared=why_unshared(about.inputs, is_causal=manifest.spec.attention == "causal"),
        )

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine. Its device memory is that of the weights; memory of steps varies."""
        return self._info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Compute ``outputs`` (None: all), float32, one row for each sequence or token. Raises EngineError,
        EngineDeadError.

        A call waits while all streams are busy. A batch that exceeds the device's memory is computed in parts.
        """
        wanted = [output for output in self._outputs if outputs is None or output.name in outputs]
        with self._streams.taken() as (stream,):
            return self._answered(stream, batch, wanted)

    def _answered(self, stream: PackageStream, batch: PackedBatch, wanted: Sequence[OutputInfo]) -> Outputs:
        try:
            return stream.run(batch, wanted)
        except NoMemoryError as error:
            reason = str(error)
        # Outside the handler: its error keeps the frames of the failed step alive, and the tensors in them.
        if batch.batch_size == 1:
            raise EngineError(
                f"The GPU has no memory for a sequence of {batch.num_tokens} tokens ({reason}). {self._way_to_more}, "
                "or build the artifact again with a smaller --max-seq-len."
            )
        if not self._has_split:
            self._has_split = True
            log.warning(
                "the GPU has no memory for a step of %d tokens: it is computed in parts, as later ones will be. %s, or "
                "build the artifact again with a smaller --max-num-tokens (%s)",
                *(batch.num_tokens, self._way_to_more, reason),
            )
        parts = [self._answered(stream, half, wanted) for half in halves(batch)]
        return {output.name: np.concatenate([part[output.name] for part in parts]) for output in wanted}

    @property
    def _way_to_more(self) -> str:
        return "Raise gpu_megabytes" if self._is_bounded else "Stop what else uses it"

    def warmup(self) -> None:
        """Run the largest and the smallest batches on every stream, then record steps."""
        limits = self._info.limits
        batches = [equal_texts(1, 1), equal_texts(1, min(limits.max_seq_len, WARMUP_LENGTH))]
        if self._device.is_gpu:
            batches = extreme_batches(limits)
        with self._streams.taken(all_of_them=True) as streams:
            for stream in streams:
                for batch in batches:
                    self._answered(stream, batch, self._outputs)
            if not self._planned:
                return

            def record(sizes: Sizes) -> None:
                for stream in streams:
                    stream.record(sizes, limits.max_seq_len)

            self._device.free_cache()
            record_steps(
                self._planned, record, lambda: sum(stream.graph_bytes for stream in streams), self._graph_bytes
            )

    def close(self) -> None:
        """Refuse waiting calls, wait for running steps, then free graphs, memory and weights, once.

        Memory that a stuck step may still use is not freed: the log reports it, and a later call tries again.
        """
        if not self._streams.close(_CLOSE_PATIENCE_S):
            log.error("a step has not ended in %.0f s: the memory of %s is kept", _CLOSE_PATIENCE_S, self._info.device)
            return
        for stream in self._all_streams:
            stream.drop()
        self._all_streams = []
        self._device.release()


def _check_inputs(names: Sequence[str]) -> None:
    """Raise EngineError for an input that ``bei.engine.packing`` does not provide."""
    try:
        graph_inputs(equal_texts(1, 1), names)
    except KeyError as error:
        raise EngineError(f"The package has an input {error} that this bei does not know: upgrade bei.") from error


def _loaded(device: CudaDevice, folder: Folder, weight_bytes: int, most: int | None) -> LoadedPackage:
    """Load the device's package in ``folder``; ``most``: the process's limit in bytes on the device.

    Raises EngineError if the weights do not fit, or a file is unreadable.
    """
    path, weights = folder / cuda_package(device.architecture), folder / CUDA_WEIGHTS
    free = device.free_bytes()
    if free is not None and free < weight_bytes:
        raise EngineError(
            f"The weights need {weight_bytes:,} bytes, and {free:,} are free on {device.name}: stop what else uses its "
            "memory, or build for a smaller precision."
        )
    device.hold(weight_bytes, most)
    try:
        return device.load(path, weights)
    except Exception as error:
        device.release()
        if not isinstance(error, RuntimeError):
            raise
        raise EngineError(
            f"PyTorch could not load {shown_path(path)}: {first_line(error)}. Copy the artifact anew from its source, "
            "or build it again."
        ) from error
