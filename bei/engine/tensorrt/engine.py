"""Targets ``tensorrt`` and ``tensorrt-rtx``: a plan on an NVIDIA GPU. Both libraries have the same classes.

Not yet run on a GPU: it runs end to end against a stand-in of the library, made from the real bindings' stubs, and a
simulated device (tests/bei/engine/tensorrt). Open measurements: docs/decisions.md, "TensorRT engine".
"""

from __future__ import annotations

import logging
from collections.abc import Set
from contextlib import ExitStack
from typing import Any

from bei.artifact.held_files import Folder
from bei.artifact.manifest import Manifest
from bei.core import EngineInfo, Outputs, PackedBatch
from bei.engine.nvidia import load_cuda, load_library
from bei.engine.packing import Sizes, why_unshared
from bei.engine.recorded_steps import MEGABYTE, GpuOptions, extreme_batches, record_steps
from bei.engine.tensorrt.cuda import Cuda
from bei.engine.tensorrt.cuda_graphs import planned_sizes
from bei.engine.tensorrt.device_stream import PlanStream
from bei.engine.tensorrt.plan import LoadedPlan
from bei.engine.tensorrt.requirements import check_version, found_gpu
from bei.engine.tensorrt.stream_pool import StreamPool
from bei.errors import EngineError

log = logging.getLogger(__name__)

_CLOSE_PATIENCE_S = 30.0  # for running steps when the engine is closed


class TensorRTEngine:
    """A loaded plan and its streams, each with buffers and execution contexts of its own. TensorRT-RTX captures steps
    itself, without a limit on their memory, where ``options.cuda_graphs`` is above 0.

    ``trt`` and ``cuda``: modules, for tests; None: the installed ones. Raises DeviceNotFoundError,
    ArtifactWrongDeviceError, ArtifactWrongVersionError, MissingDependencyError, LibraryVersionError, EngineError.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, options: GpuOptions, *, trt: Any = None, cuda: Any = None
    ) -> None:
        purpose = f"Serving {manifest.name} (target {manifest.target})"
        runtime = cuda or load_cuda(purpose, manifest.target)
        gpu = found_gpu(manifest, runtime)
        self._cuda = Cuda(runtime)
        self._cuda.use_device()
        trt = trt or load_library(manifest.target, purpose)
        check_version(manifest, trt)
        about = manifest.engine.plan
        if about is None:
            raise EngineError(f"The manifest of {manifest.name} does not describe its plan. Build the artifact again.")
        records = options.cuda_graphs > 0
        self._graph_bytes = options.cuda_graphs * MEGABYTE if manifest.target == "tensorrt" else 0
        with ExitStack() as resources:
            self._plan = LoadedPlan(trt, folder, about, manifest.outputs)
            resources.callback(self._plan.close)
            inputs = self._plan.input_names
            planned = planned_sizes(about.profiles[0], manifest.max_seq_len, inputs) if records else []
            self._planned = planned if self._graph_bytes else []
            streams = [
                PlanStream(self._cuda, self._plan, resources, own_sizes=[] if self._graph_bytes else planned)
                for _ in range(options.num_streams)
            ]
            self._streams = StreamPool(streams)
            self._info = EngineInfo(
                target=manifest.target,
                precision=manifest.precision,
                device=f"{gpu.name} ({gpu.architecture})",
                limits=manifest.limits,
                outputs={output.name: output.dimension for output in manifest.outputs},
                per_token=frozenset(output.name for output in manifest.outputs if output.per_token),
                num_streams=options.num_streams,
                # The sizes that are captured as far as the graphs' memory allows; other steps are padded less.
                token_buckets=tuple(sorted({sizes.tokens for sizes in planned})),
                memory_bytes=self._plan.weight_bytes + sum(stream.device_bytes for stream in streams),
                is_replaceable=False,  # a new one would share the CUDA context, where a stuck kernel blocks loading
                unshared=why_unshared(inputs, is_causal=manifest.spec.attention == "causal"),
            )
            self._resources = resources.pop_all()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Compute ``outputs`` (None: all), float32, one row for each sequence or token. Raises EngineError,
        EngineDeadError.

        A call waits while all streams are busy.
        """
        wanted = [output for output in self._plan.outputs if outputs is None or output.name in outputs]
        with self._streams.taken() as (stream,):
            return stream.run(batch, wanted)

    def warmup(self) -> None:
        """Run the largest and the smallest batches on every stream, then capture steps."""
        with self._streams.taken(all_of_them=True) as streams:
            for stream in streams:
                for batch in extreme_batches(self._info.limits):
                    stream.run(batch, self._plan.outputs)
                stream.rehearse(self._info.limits.max_seq_len)
            if not self._planned:
                return

            def record(sizes: Sizes) -> None:
                for stream in streams:
                    stream.capture(sizes, self._info.limits.max_seq_len, self._resources)

            free = self._cuda.free_bytes()
            record_steps(self._planned, record, lambda: free - self._cuda.free_bytes(), self._graph_bytes)

    def close(self) -> None:
        """Refuse waiting calls, wait for running steps, then free contexts, memory and streams, once.

        Memory that a stuck step may still use is not freed: the log reports it, and a later call tries again.
        """
        if self._streams.close(_CLOSE_PATIENCE_S):
            self._resources.pop_all().close()
        else:
            log.error(
                "a step has not ended in %.0f s: the GPU memory of %s is kept", _CLOSE_PATIENCE_S, self._info.device
            )
