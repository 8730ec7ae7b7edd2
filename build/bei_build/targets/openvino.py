"""Target ``cpu``: packed ONNX graph to OpenVINO IR.

The IR is portable between CPUs; the device compiles it when the engine is loaded (0.1 to 0.3 s for small models).
Precisions: ``fp32``; ``bf16``: weights stored and computed in bfloat16; ``int8``: linear layers, inputs and matrices,
in int8 with calibrated scales, the rest as in bf16 where the CPU supports it. CPUs that do not add up products of int8
exactly (no ``EXACT_INT8``) get matrices of 7 bits, whose sums of two products fit in 16.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bei.artifact.certificate.thresholds import PRECISIONS_OF_TARGETS
from bei.artifact.manifest import OPENVINO_ATTENTION, OPENVINO_MODEL, OPENVINO_ROUNDINGS, EngineRequirements
from bei.core import Limits
from bei.engine.cpu_features import EXACT_INT8, sums_int8_exactly
from bei.errors import CompileError, ConfigError
from bei.utils.full_disk import full_disk
from bei.utils.libraries import importing
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.precision import PRECISIONS, check_precision
from bei_build.spec.quantization import Quantization
from bei_build.targets.base import Numerics, Say
from bei_build.weights.model_weights import ModelWeights


class OpenVINOCompiler:
    """Compiles for CPUs with OpenVINO."""

    precisions: tuple[str, ...] = PRECISIONS_OF_TARGETS["cpu"]
    calibrated: tuple[str, ...] = ("int8",)
    shows_layers = True
    longest_by_default = 8192  # masks of causal and windowed attention are [S, S]: 256 MiB here, 4 GiB at 32,768

    @property
    def matrix_bits(self) -> int:
        """8, or 7 where two products of 8 bits would be clipped: 2 * 255 * 63 is less than 32,768."""
        return 8 if EXACT_INT8 in cpu_capabilities() else 7

    def resolve_precision(self, precision: str) -> str:
        """``auto`` is bf16 where the CPU computes in it, else fp32."""
        if precision == "auto":
            return "bf16" if "BF16" in cpu_capabilities() else "fp32"
        check_precision("cpu", precision, self.precisions)
        if precision == "bf16" and "BF16" not in cpu_capabilities():
            raise ConfigError("This CPU does not compute in bf16: build with --precision fp32 or int8.")
        return precision

    def default_limits(self, max_seq_len: int) -> Limits:
        """Small batches: large ones gain nothing on a CPU and delay short requests (docs/decisions.md)."""
        return Limits(max_num_tokens=max(1024, max_seq_len), max_batch_size=128, max_seq_len=max_seq_len)

    def check_able(self) -> None:
        """Require OpenVINO."""
        _openvino()

    def cannot_run(self) -> str | None:
        """None: every machine with OpenVINO runs its engines."""
        return None

    def machine(self) -> list[str]:
        """Number formats of the CPU."""
        return cpu_capabilities()

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, numerics: Numerics, limits: Limits, folder: Path, say: Say
    ) -> EngineRequirements:
        """Write ``model.xml``, ``model.bin`` and the lists of places for kernels into ``folder``. Raises
        CompileError."""
        ov = _openvino()
        storage = PRECISIONS[numerics.precision].storage
        types = GraphTypes(compute=DType.FP32, storage=storage, quantization=numerics.quantization)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            core, place = AttentionCore.MATMUL_SOFTMAX, Path(scratch)
            path = write_graph(spec, weights.read, place, types, core, limits.max_seq_len, numerics.observed)
            try:
                model = ov.Core().read_model(path)
                # OpenVINO numbers nodes it creates by a counter of the process; a build must not depend on it.
                for index, node in enumerate(model.get_ordered_ops()):
                    if node.get_type_name() not in ("Parameter", "Result"):
                        node.set_friendly_name(f"{node.get_type_name()}_{index}")
                ov.save_model(model, folder / OPENVINO_MODEL, compress_to_fp16=False)
                for name in (OPENVINO_ATTENTION, OPENVINO_ROUNDINGS):
                    if (place / name).exists():
                        shutil.copyfile(place / name, folder / name)
            except RuntimeError as error:
                refused = CompileError(f"OpenVINO refused the graph: {error}")
                # The engine is about as large as the graph. OpenVINO removes what it could not complete.
                graph_bytes = sum(file.stat().st_size for file in place.iterdir())
                raise full_disk(error, folder, graph_bytes) or refused from error
            del model  # it maps the scratch files
        return EngineRequirements(
            compiler="openvino",
            compiler_version=ov.__version__.split("-")[0],
            device="cpu",
            capabilities=_needed(storage, numerics.quantization),
        )


def cpu_capabilities() -> list[str]:
    """Number formats of this CPU by OpenVINO: FP32, BF16, INT8, ...; and ``EXACT_INT8``."""
    capabilities: list[str] = _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return [*capabilities, EXACT_INT8] if sums_int8_exactly() else capabilities


def _needed(storage: DType, quantization: Quantization | None) -> list[str]:
    """Number formats that a CPU needs to give this one's answers."""
    found = ["BF16"] if storage is DType.BF16 and "BF16" in cpu_capabilities() else []
    if quantization is None:
        return found
    is_wide = any(layer.matrix_bits == 8 for layer in quantization.layers.values())
    return [*found, "INT8", *([EXACT_INT8] if is_wide else [])]


def _openvino() -> Any:
    # Importing openvino reports the import to a web analytics service unless this package is missing. A server that
    # runs without a network, and with other people's texts, must not report anything.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    with importing("openvino", "cpu", "Building for the target cpu"):
        import openvino
    return openvino
