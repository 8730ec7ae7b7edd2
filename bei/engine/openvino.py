"""Target ``cpu``: OpenVINO IR on the CPU. The only module of the runtime that imports openvino."""

from __future__ import annotations

import functools
import queue
import sys
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bei.artifact.held_files import Folder, shown_path
from bei.artifact.manifest import (
    OPENVINO_ATTENTION,
    OPENVINO_MODEL,
    OPENVINO_ROUNDINGS,
    OPENVINO_WEIGHTS,
    Manifest,
)
from bei.core import EngineInfo, Float32Array, Outputs, PackedBatch
from bei.engine.cpu_features import EXACT_INT8, sums_int8_exactly
from bei.engine.normalized_sums import use_norm_kernel
from bei.engine.packed_attention import Kernels, installed_kernels, use_kernels
from bei.engine.packing import graph_inputs, rows_of_tokens, why_unshared
from bei.engine.rounded_rows import use_rounding_kernel
from bei.errors import ArtifactFileMissingError, ArtifactWrongDeviceError, EngineError
from bei.utils.cpu_count import usable_cores
from bei.utils.libraries import importing
from bei.utils.mapped_files import release_pages, releasing_pages
from bei.utils.scarce_resources import require_address_space

# OpenVINO caches a compiled kernel for every shape, 5,000 by default, and grows with traffic. Inputs have bucketed
# shapes (bei.engine.packing), and the least recently used kernels are dropped (docs/decisions.md has the figures).
_KERNEL_CACHE_CAPACITY = 1024

_WARMUP_TOKENS = 1024

_PLUGIN_BYTES = 128 << 20  # of the CPU's plugin and the stacks of its first threads, about

# OpenVINO's mark for a Convert that must not be folded into its constant (docs/decisions.md, "Memory of large models").
# Without it a BF16 matrix lies in memory as FP32 beside the BF16 copy that the kernel reads.
_KEEP_NARROW = "decompression_0"
_NARROW_TYPES = ("bf16", "f16")


@dataclass(frozen=True)
class OpenVINOOptions:
    """``num_threads``: over all streams; 0: all cores. ``num_streams``: batches that run concurrently. ``use_kernels``:
    0: attention, norms and rounding are OpenVINO's even where ``bei-kernels-cpu`` is installed."""

    num_threads: int = 0
    num_streams: int = 1
    use_kernels: int = 1


class OpenVINOEngine:
    """A compiled model with one infer request for each stream; the requests share the weights."""

    def __init__(self, folder: Folder, manifest: Manifest, options: OpenVINOOptions) -> None:
        openvino = _openvino(f"Serving {manifest.name} (target cpu)")
        core, self._tensor = _core_of(openvino), openvino.Tensor
        _check_able(manifest)
        num_threads, num_streams = options.num_threads or usable_cores(), options.num_streams
        # An FP32 engine may have the manifest of a BF16 one: in a build it is the reference.
        computes_bf16 = manifest.precision != "fp32" and "BF16" in manifest.engine.capabilities
        properties = {
            # Set explicitly, since OpenVINO would choose by itself: the certificate holds for this precision.
            "INFERENCE_PRECISION_HINT": "bf16" if computes_bf16 else "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",  # quantization is in the graph, with scales of its own
            "NUM_STREAMS": str(num_streams),
            "INFERENCE_NUM_THREADS": str(num_threads),
            "CPU_RUNTIME_CACHE_CAPACITY": str(_KERNEL_CACHE_CAPACITY),
            "ENABLE_CPU_PINNING": "NO",  # pinned threads wait for the tokenizer's threads on shared cores
        }
        graph, weights = folder / OPENVINO_MODEL, folder / OPENVINO_WEIGHTS
        self._weights = weights.resolve()  # as Linux lists what is mapped
        try:
            model = core.read_model(graph, weights)
            kernels = installed_kernels(openvino, computes_bf16=computes_bf16) if options.use_kernels else None
            longest = manifest.limits.max_seq_len
            if kernels and not _replaced(openvino, model, folder, kernels, longest, computes_bf16=computes_bf16):
                kernels = None
            _keep_matrices_narrow(model)
            self._model = core.compile_model(model, "CPU", properties)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO could not compile {shown_path(graph)}: {error}") from error
        self._input_names = [port.get_any_name() for port in self._model.inputs]
        # The ports' own names are ambiguous: an output may also have the name of the node before it, in any order.
        self._output_names = [output.name for output in manifest.outputs]
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(num_streams):
            self._requests.put(self._model.create_infer_request())
        self._info = EngineInfo(
            target="cpu",
            precision=manifest.precision,
            device=core.get_property("CPU", "FULL_DEVICE_NAME") + (f" with {kernels.name}" if kernels else ""),
            limits=manifest.limits,
            outputs={output.name: output.dimension for output in manifest.outputs},
            per_token=frozenset(output.name for output in manifest.outputs if output.per_token),
            num_streams=num_streams,
            unshared=why_unshared(self._input_names, is_causal=manifest.spec.attention == "causal"),
        )
        self._pack()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Compute ``outputs`` (None: all), float32, one row for each sequence or token. Raises EngineError."""
        inputs = graph_inputs(batch, self._input_names)
        request = self._requests.get()
        try:
            # Without dictionaries, for which OpenVINO looks up each input's type and copies all outputs.
            for name, values in inputs.items():
                request.set_tensor(name, self._tensor(values, shared_memory=True))
            request.infer(share_outputs=True)
            # A copy: the next batch reuses the request's buffers.
            return {
                name: self._rows(name, request.get_tensor(name).data, batch)
                for name in self._output_names
                if outputs is None or name in outputs
            }
        except RuntimeError as error:
            raise EngineError(f"OpenVINO failed on a batch of {batch.batch_size} sequences: {error}") from error
        finally:
            self._requests.put(request)

    def _rows(self, output: str, computed: Any, batch: PackedBatch) -> Float32Array:
        if output in self._info.per_token:
            return rows_of_tokens(np.array(computed[: batch.num_computed], np.float32), batch)
        return np.array(computed[: batch.batch_size], np.float32)

    def _pack(self) -> None:
        """Run a first inference, which packs the matrices for the kernels, and release the file's pages."""
        with releasing_pages(self._weights):
            for _ in range(self._info.num_streams):
                self.run(PackedBatch(np.zeros(1, np.int32), np.array([0, 1], np.int32)))

    def warmup(self) -> None:
        """Run one batch on every stream, full if its texts have usual lengths: a text of 8,192 tokens may take
        seconds."""
        limits = self._info.limits
        length = min(limits.max_seq_len, _WARMUP_TOKENS)
        count = max(1, min(limits.max_batch_size, min(limits.max_num_tokens, _WARMUP_TOKENS) // length))
        cu_seqlens = np.arange(count + 1, dtype=np.int32) * np.int32(length)
        for _ in range(self._info.num_streams):
            self.run(PackedBatch(np.zeros(count * length, np.int32), cu_seqlens))
        release_pages(self._weights)  # kernels for other shapes may have packed the matrices again

    def close(self) -> None:
        """Free the requests and the compiled model."""
        while not self._requests.empty():
            self._requests.get()
        del self._model


def cpu_capabilities() -> list[str]:
    """The precisions that OpenVINO reports for this CPU (FP32, BF16, INT8, ...) and ``EXACT_INT8``. Raises
    MissingDependencyError."""
    core = _core_of(_openvino("Serving for the target cpu"))
    capabilities: list[str] = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return [*capabilities, EXACT_INT8] if sums_int8_exactly() else capabilities


def _check_able(manifest: Manifest) -> None:
    """Raise ArtifactWrongDeviceError if this CPU lacks a capability that the artifact needs."""
    needed, offered = set(manifest.engine.capabilities), cpu_capabilities()
    if manifest.precision == "int8" and "INT8" not in needed:  # artifacts of earlier versions do not list it
        needed.add(EXACT_INT8)
    missing = needed.difference(offered)
    if not missing:
        return
    why = " (it has no VNNI, so sums of INT8 products would be clipped)" if EXACT_INT8 in missing else ""
    raise ArtifactWrongDeviceError(
        f"The artifact of {manifest.name} needs a CPU that computes in {', '.join(sorted(missing))}; this one offers "
        f"{', '.join(offered)}{why}. Build it again on this machine, or with --precision fp32."
    )


@functools.cache
def _core_of(openvino: Any) -> Any:
    """The process's only Core, never freed.

    The CPU plugin gives the thread that loads it a stack for signal handlers, and unmaps it when the Core is freed, in
    whichever thread: the next signal to the first thread would then end the process (SIGSEGV). It is not made where
    less address space is left than the plugin takes: it may then wait for ever for threads that have no stacks.
    """
    require_address_space(_PLUGIN_BYTES)
    return openvino.Core()


def _openvino(purpose: str) -> Any:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # see bei_build.targets.openvino
    with importing("openvino", "cpu", purpose):
        import openvino
    return openvino


def _replaced(
    openvino: Any, model: Any, folder: Folder, kernels: Kernels, longest: int, *, computes_bf16: bool
) -> bool:
    """Put ``kernels`` where the artifact lists places for them; False if there are none. Raises EngineError."""
    attentions = _listed(folder, OPENVINO_ATTENTION) if kernels.attends else None
    roundings = _listed(folder, OPENVINO_ROUNDINGS)
    if attentions:
        use_kernels(openvino, model, attentions, kernels, longest, computes_bf16=computes_bf16)
    if roundings:  # of contexts too, which may be the kernel's by now
        use_rounding_kernel(openvino, model, roundings, kernels, computes_bf16=computes_bf16)
    num_norms = 0
    if kernels.normalizes_sums and (computes_bf16 or roundings):  # in FP32 it is no faster; of the kernels above too
        num_norms = use_norm_kernel(openvino, model, kernels.library, computes_bf16=computes_bf16)
    return bool(attentions or roundings or num_norms)


def _listed(folder: Folder, name: str) -> Path | None:
    """The file that lists places for a kernel; None in artifacts of earlier versions, or without such places."""
    try:
        listed = folder / name
    except ArtifactFileMissingError:
        return None
    return listed if listed.exists() else None


def _keep_matrices_narrow(model: Any) -> None:
    """Mark the casts of 16-bit constants, so that compilation does not widen the constants to FP32."""
    for node in model.get_ops():
        if node.get_type_name() != "Convert":
            continue
        source = node.input_value(0).get_node()
        if source.get_type_name() == "Constant" and source.get_element_type().get_type_name() in _NARROW_TYPES:
            node.get_rt_info()[_KEEP_NARROW] = ""
