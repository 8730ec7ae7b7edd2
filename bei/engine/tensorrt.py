"""Targets ``tensorrt`` and ``tensorrt-rtx``: a plan on an NVIDIA GPU. Both libraries have the same classes.

Has not met a GPU yet: it runs end to end against a stand-in of the library, made from the real bindings' stubs, and a
simulated device (tests/bei/engine/tensorrt). What of it is unmeasured: docs/decisions.md, "TensorRT engine".
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bei.artifact import Manifest
from bei.core import EngineInfo, Outputs, PackedBatch
from bei.engine.cuda import Cuda
from bei.engine.cuda_graphs import planned_sizes
from bei.engine.device_stream import DeviceStream
from bei.engine.plan import LoadedPlan
from bei.engine.requirements import check_version, found_gpu
from bei.errors import ConfigError, EngineDeadError, EngineError
from bei.nvidia import load_cuda, load_library

log = logging.getLogger(__name__)

_MEGABYTE = 1_000_000
_MOST_STREAMS = 8  # each has buffers for the largest batch
_WARMUP_LENGTH = 128


@dataclass(frozen=True)
class TensorRTOptions:
    """``num_streams``: batches in flight. ``cuda_graphs``: memory for recorded steps, in MB; 0: none are recorded.

    TensorRT-RTX records steps by itself and keeps no count of their memory: for it any number means that it does.
    """

    num_streams: int = 2
    cuda_graphs: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.num_streams <= _MOST_STREAMS:
            raise ConfigError(f"An engine on a GPU has 1 to {_MOST_STREAMS} streams, not {self.num_streams}.")
        if self.cuda_graphs < 0:
            raise ConfigError(f"Memory for CUDA graphs cannot be {self.cuda_graphs} MB; 0 means none.")


class TensorRTEngine:
    """A loaded plan and its streams, each with buffers and execution contexts of its own.

    ``trt`` and ``cuda`` are the modules to use; None: those that are installed. Raises DeviceNotFoundError,
    ArtifactWrongDeviceError, ArtifactWrongVersionError, MissingDependencyError, LibraryVersionError, EngineError.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, options: TensorRTOptions, *, trt: Any = None, cuda: Any = None
    ) -> None:
        purpose = f"Serving {manifest.name} (target {manifest.target})"
        runtime = cuda or load_cuda(purpose, manifest.target)
        gpu = found_gpu(manifest, runtime)
        trt = trt or load_library(manifest.target, purpose)
        check_version(manifest, trt)
        about = manifest.engine.plan
        if about is None:
            raise EngineError(f"The manifest of {manifest.name} does not describe its plan. Build the artifact again.")
        self._cuda = Cuda(runtime)
        self._free: queue.SimpleQueue[DeviceStream] = queue.SimpleQueue()
        self._num_streams = options.num_streams
        self._is_closed = False
        records = options.cuda_graphs > 0
        self._graph_bytes = options.cuda_graphs * _MEGABYTE if manifest.target == "tensorrt" else 0
        self._planned = planned_sizes(about.profiles[0]) if self._graph_bytes else []
        with ExitStack() as resources:
            self._plan = LoadedPlan(trt, folder, about, manifest.outputs)
            resources.callback(self._plan.close)
            streams = [
                DeviceStream(
                    self._cuda, self._plan, resources, captures_itself=records and manifest.target == "tensorrt-rtx"
                )
                for _ in range(options.num_streams)
            ]
            for stream in streams:
                self._free.put(stream)
            self._info = EngineInfo(
                target=manifest.target,
                precision=manifest.precision,
                device=f"{gpu.name} ({gpu.architecture})",
                limits=manifest.limits,
                outputs={output.name: output.dimension for output in manifest.outputs},
                per_token=frozenset(output.name for output in manifest.outputs if output.per_token),
                num_streams=options.num_streams,
                # As far as the memory for graphs goes; a step that got none of them is filled up less.
                token_buckets=tuple(sorted({sizes.tokens for sizes in self._planned})),
                memory_bytes=self._plan.weight_bytes + sum(stream.device_bytes for stream in streams),
            )
            self._resources = resources.pop_all()

    @property
    def info(self) -> EngineInfo:
        """The facts."""
        return self._info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Compute ``outputs`` (None: all), float32, a row a sequence or a token. Raises EngineError, EngineDeadError.

        A call more than there are streams waits for one.
        """
        if self._is_closed:
            raise EngineError("The engine is closed.")
        wanted = [output for output in self._plan.outputs if outputs is None or output.name in outputs]
        stream = self._free.get()
        try:
            return stream.run(batch, wanted)
        finally:
            self._free.put(stream)

    def warmup(self) -> None:
        """Run the largest batches and the smallest on every stream, then record the steps that are worth it."""
        streams = [self._free.get() for _ in range(self._num_streams)]
        try:
            for stream in streams:
                for batch in self._extreme_batches():
                    stream.run(batch, self._plan.outputs)
            self._capture(streams)
        finally:
            for stream in streams:
                self._free.put(stream)

    def _extreme_batches(self) -> list[PackedBatch]:
        """One token; as many tokens as may be, in texts of usual length; the longest text."""
        limits = self._info.limits
        usual = min(limits.max_seq_len, _WARMUP_LENGTH)
        count = max(1, min(limits.max_batch_size, limits.max_num_tokens // usual))
        return [_equal(1, 1), _equal(count, usual), _equal(1, limits.max_seq_len)]

    def _capture(self, streams: list[DeviceStream]) -> None:
        """Record steps on all streams until the memory for them is used up, small ones first: they gain most.

        The first that cannot be recorded is the last that is tried; steps that are not recorded run as they are.
        """
        num_captured = 0
        try:
            free = self._cuda.free_bytes()
            for sizes in self._planned:
                if free - self._cuda.free_bytes() >= self._graph_bytes:
                    log.info("memory for CUDA graphs is used up: %d of %d recorded", num_captured, len(self._planned))
                    return
                for stream in streams:
                    stream.capture(sizes, self._resources)
                num_captured += 1
        except EngineDeadError:
            raise
        except EngineError as error:
            log.warning("after %d CUDA graphs no more are recorded: %s", num_captured, str(error))

    def close(self) -> None:
        """Wait for the steps that run, then free contexts, memory and streams. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for _ in range(self._num_streams):
            self._free.get()
        self._resources.close()


def _equal(count: int, length: int) -> PackedBatch:
    return PackedBatch(np.zeros(count * length, np.int32), np.arange(count + 1, dtype=np.int32) * np.int32(length))
