"""Emulation of a quantized engine: ONNX Runtime in FP32 around the rounded numbers.

It runs the same QuantizeLinear and DequantizeLinear nodes as the target. It leaves out the target's 16-bit arithmetic
between the layers, and its own kernels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bei.core import EngineInfo, Limits, Outputs, PackedBatch
from bei.engine.packing import graph_inputs
from bei.errors import EngineError
from bei.utils.libraries import importing
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import Quantization

# These fusions drop a ReLU or a Clip before a QuantizeLinear unless its zero point forbids it, and do not know FP8's.
_WRONG_FOR_FP8 = ["ReluQuantRewrite", "ClipQuantRewrite"]


class EmulatedEngine:
    """The graph at ``path`` in ONNX Runtime, on the CPU."""

    def __init__(self, path: Path, spec: ModelSpec, limits: Limits) -> None:
        self._session = session_of(path)
        self._input_names = [one.name for one in self._session.get_inputs()]
        outputs = {str(name): width for name, width in spec.dimensions.items()}
        per_token = frozenset(str(head.output) for head in spec.heads if not head.pooling)
        self._info = EngineInfo("emulation", "fp32", "ONNX Runtime", limits, outputs, per_token)

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine."""
        return self._info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Compute ``outputs`` (None: all), float32, a row per sequence or per token. Raises EngineError."""
        names = [name for name in self._info.outputs if outputs is None or name in outputs]
        try:
            values: list[Any] = self._session.run(names, graph_inputs(batch, self._input_names))
        except Exception as error:  # its classes have no common base
            raise EngineError(f"ONNX Runtime failed on a batch: {error}") from error
        rows = {name: batch.num_tokens if name in self._info.per_token else batch.batch_size for name in names}
        return {name: np.asarray(value, np.float32)[: rows[name]] for name, value in zip(names, values, strict=True)}

    def warmup(self) -> None:
        """No-op."""

    def close(self) -> None:
        """Free the session."""
        del self._session


@contextmanager
def emulated_engine(
    spec: ModelSpec, read: Callable[[str], FloatArray], quantization: Quantization, limits: Limits, scratch: Path
) -> Iterator[EmulatedEngine]:
    """An engine for ``spec`` with linear layers rounded by ``quantization``. Raises EngineError,
    MissingDependencyError."""
    types = GraphTypes(DType.FP32, DType.FP32, quantization)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = write_graph(spec, read, Path(folder), types, AttentionCore.TRT_ATTENTION, limits.max_seq_len)
        engine = EmulatedEngine(path, spec, limits)
        try:
            yield engine
        finally:
            engine.close()


def session_of(path: Path) -> Any:
    """An ONNX Runtime session for the graph at ``path``. Raises EngineError, MissingDependencyError."""
    onnxruntime = _onnxruntime()
    options = onnxruntime.SessionOptions()
    # Its fusion of QuantizeLinear and DequantizeLinear with their neighbours is wrong for FP8 in FP32 graphs.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"], disabled_optimizers=_WRONG_FOR_FP8
        )
    except Exception as error:  # its classes have no common base
        raise EngineError(f"ONNX Runtime cannot run the graph: {error}") from error


def _onnxruntime() -> Any:
    with importing("onnxruntime", "fp8", "Emulating a quantized engine"):
        import onnxruntime
    return onnxruntime
