"""Targets ``cuda`` and ``cuda-twin``: the packed PyTorch module to a package of AOTInductor.

``cuda`` is compiled on the GPU that it is for, and runs on GPUs of the same compute capability. ``cuda-twin`` takes the
same path from checkpoint to answer with the slow form of every kernel, compiled for this machine's CPU: for tests.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

from bei.artifact.certificate.thresholds import PRECISIONS_OF_TARGETS
from bei.artifact.manifest import CUDA_WEIGHTS, EngineRequirements, Package, cuda_package
from bei.core import Limits
from bei.engine.pytorch import EXTRA, TorchGpu, cpu_name, found_gpu, load_torch
from bei.errors import CompileError, DeviceNotFoundError
from bei.utils import libraries
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.precision import PRECISIONS, check_precision
from bei_build.targets.base import Numerics, Say
from bei_build.targets.cuda_toolkit import check_cuda_toolkit, cpp_compiler
from bei_build.weights.model_weights import ModelWeights

_LEAST_CAPABILITY = 80  # 8.0, Ampere: for FlashAttention and BF16
_FP8_FROM = 89  # 8.9, Ada
_MOST_OF_REASON = 600  # characters of messages from PyTorch's compilers
_TYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}


class CudaCompiler:
    """Compiles for this machine's NVIDIA GPU; as ``cuda-twin`` for its CPU."""

    precisions: tuple[str, ...] = PRECISIONS_OF_TARGETS["cuda"]
    calibrated: tuple[str, ...] = ("fp8",)
    shows_layers = False  # the packed module outputs its heads only
    matrix_bits = 8
    longest_by_default = 8192  # rotations and biases have a row per position

    def __init__(self, target: str, precision: str) -> None:
        self._target = target
        self._precision = precision
        self._is_twin = target == "cuda-twin"
        self._purpose = f"Building for the target {target}"

    def resolve_precision(self, precision: str) -> str:
        """``auto`` is bf16, which cannot overflow as fp16 can. For the twin it is fp32: its speed does not matter."""
        check_precision(self._target, precision, self.precisions)
        if precision == "auto":
            return "fp32" if self._is_twin else "bf16"
        return precision

    def default_limits(self, max_seq_len: int) -> Limits:
        """Large batches, which a GPU needs to be busy: nothing is padded. Not measured yet. Small ones for the twin."""
        max_num_tokens, max_batch_size = (1024, 32) if self._is_twin else (16384, 512)
        return Limits(max(max_num_tokens, max_seq_len), max_batch_size, max_seq_len)

    def check_able(self) -> None:
        """Require PyTorch, a C++ compiler and, except for the twin, PyTorch's CUDA, Triton, the GPU and a CUDA toolkit.

        Raises MissingDependencyError, BrokenDependencyError, LibraryVersionError, DeviceNotFoundError, CompileError.
        """
        torch = self._torch
        if not self._is_twin:
            if self._gpu.capability < _LEAST_CAPABILITY:
                raise CompileError(
                    f"{self._gpu.name} has compute capability {self._gpu.capability / 10}, and PyTorch's kernels of "
                    f"attention need {_LEAST_CAPABILITY / 10}: build with --target tensorrt."
                )
            if self._precision == "fp8" and self._gpu.capability < _FP8_FROM:
                raise CompileError(
                    f"{self._gpu.name} has compute capability {self._gpu.capability / 10}, which does not compute in "
                    "fp8: build with --precision bf16."
                )
            libraries.load("triton", "triton", EXTRA, self._purpose)
            check_cuda_toolkit(torch, self._purpose)
        cpp_compiler(torch, self._purpose)

    def cannot_run(self) -> str | None:
        """None: this machine runs what it builds."""
        return None

    def machine(self) -> list[str]:
        """PyTorch's version, and the device that it compiles for."""
        return [str(self._torch.__version__), self._device, *self._capabilities]

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, numerics: Numerics, limits: Limits, folder: Path, say: Say
    ) -> EngineRequirements:
        """Write the package and its weights into ``folder``. Raises CompileError."""
        if numerics.observed:
            raise CompileError(f"Target {self._target} shows no inputs of linear layers. This is a bug.")
        torch = self._torch
        from bei_build.torch_graph.model import packed_model
        from bei_build.torch_graph.parameters import join_linear_layers

        dtype = getattr(torch, _TYPES[PRECISIONS[numerics.precision].storage])
        say("reading weights")
        device = "cpu" if self._is_twin else "cuda"
        model = packed_model(
            spec, weights.read, limits.max_seq_len, dtype=dtype, device=device, quantization=numerics.quantization
        )
        join_linear_layers(model)
        say("compiling")
        weight_bytes = self._write(model, folder)
        needs = EngineRequirements(
            compiler="aotinductor",
            compiler_version=str(torch.__version__),  # a class of its own
            device=self._device,
            capabilities=self._capabilities,
            package=self._described(model, weight_bytes),
        )
        del model
        if not self._is_twin:  # the engine is loaded next, and its weights need the memory
            gc.collect()
            torch.cuda.empty_cache()
        return needs

    def _write(self, model: Any, folder: Path) -> int:
        """Compile into ``folder``; returns the bytes of the weights. The compiler's cache is removed afterwards."""
        from torch._inductor.utils import fresh_cache

        from bei_build.torch_graph.package import export_model, weights_of, write_package, write_weights

        failure: Exception | None = None
        with tempfile.TemporaryDirectory(dir=folder) as scratch, warnings.catch_warnings(), fresh_cache(dir=scratch):
            warnings.simplefilter("ignore")  # PyTorch's compiler uses deprecated parts of PyTorch
            try:
                program = export_model(model)
                (capability,) = self._capabilities
                write_package(program, folder / cuda_package(capability))
                weight_bytes = write_weights(weights_of(program), folder / CUDA_WEIGHTS)
            except Exception as error:  # the compiler's parts raise classes of their own; fresh_cache would log them
                failure = error
        if isinstance(failure, CompileError):
            raise failure
        if failure is not None:
            reason = " ".join(str(failure).split()) or type(failure).__name__
            raise CompileError(
                f"PyTorch {self._torch.__version__} could not compile the model: {reason[:_MOST_OF_REASON]}"
            ) from failure
        return weight_bytes

    def _described(self, model: Any, weight_bytes: int) -> Package:
        layers = model.spec.layers + (model.spec.decoder.layers if model.spec.decoder else ())
        parts = [part for layer in layers for part in (layer.attention, layer.cross_attention) if part is not None]
        choices = [model.choices[part] for part in parts]
        reasons = [
            *(f"attention of kind {it.kernel}: {', '.join(it.reasons)}" for it in choices if it.reasons),
            *(
                f"FP8 products of kind {it.product}: {', '.join(it.reasons)}"
                for it in model.products.values()
                if it.reasons
            ),
        ]
        return Package(
            cuda=None if self._is_twin else self._torch.version.cuda,
            inputs=list(model.input_names),
            kernels=[choice.kernel for choice in choices],
            fallbacks=list(dict.fromkeys(reasons)),
            weight_bytes=weight_bytes,
            weights="beside",
        )

    @property
    def _device(self) -> str:
        return cpu_name() if self._is_twin else self._gpu.name

    @property
    def _capabilities(self) -> list[str]:
        """The one GPU, or CPU, for which the package holds code."""
        return [self._torch.backends.cpu.get_cpu_capability() if self._is_twin else self._gpu.architecture]

    @cached_property
    def _torch(self) -> Any:
        return load_torch(self._purpose)

    @cached_property
    def _gpu(self) -> TorchGpu:
        try:
            return found_gpu(self._torch, self._purpose)
        except DeviceNotFoundError as error:
            raise DeviceNotFoundError(
                f"{error} A package is compiled on the GPU that it is for; --target tensorrt-rtx builds for some GPUs "
                "without having one, and --target cpu needs none."
            ) from error
