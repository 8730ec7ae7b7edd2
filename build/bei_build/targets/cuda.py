"""Targets ``cuda`` and ``cuda-twin``: the packed PyTorch module to packages of AOTInductor, and their weights.

``cuda`` is compiled on the GPU that it is for, or, for the compute capabilities that are asked for, on a machine
without them; a package runs on GPUs of its compute capability. ``cuda-twin`` takes the same path from checkpoint to
answer with the slow form of every kernel, compiled for this machine's CPU: for tests.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from bei.artifact.certificate.thresholds import PRECISIONS_OF_TARGETS
from bei.artifact.manifest import CUDA_WEIGHTS, EngineRequirements, Package, cuda_package
from bei.core import Limits
from bei.engine.pytorch import EXTRA, TorchGpu, check_built_with_cuda, cpu_name, found_gpu, load_torch
from bei.errors import CompileError, ConfigError, DeviceNotFoundError, LibraryVersionError
from bei.utils import libraries
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.precision import PRECISIONS, check_precision
from bei_build.targets.base import Numerics, Say
from bei_build.targets.cuda_choices import Choices, choices_of
from bei_build.targets.cuda_elsewhere import MOST_OF_REASON, Compiled, Wanted, compile_apart
from bei_build.targets.cuda_toolkit import check_cuda_toolkit, cpp_compiler, driver_stub
from bei_build.weights.model_weights import ModelWeights

_LEAST_CAPABILITY = 80  # 8.0, Ampere: for FlashAttention and BF16
_FP8_FROM = 89  # 8.9, Ada
_TYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}
_NOT_TIMED = "compiled without a GPU: of kernels that PyTorch would time there, each is the first that it would try"


class CudaCompiler:
    """Compiles for this machine's NVIDIA GPU, or for GPUs of ``compute_capability``; as ``cuda-twin`` for its CPU."""

    precisions: tuple[str, ...] = PRECISIONS_OF_TARGETS["cuda"]
    calibrated: tuple[str, ...] = ("fp8",)
    shows_layers = False  # the packed module outputs its heads only
    matrix_bits = 8
    longest_by_default = 8192  # rotations and biases have a row per position

    def __init__(self, target: str, precision: str, compute_capability: Sequence[str] = ()) -> None:
        self._target = target
        self._precision = precision
        self._asked = tuple(dict.fromkeys(compute_capability))
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
        """Require PyTorch, a C++ compiler and, except for the twin, PyTorch's CUDA, Triton, a CUDA toolkit and the GPU;
        without it a known version of PyTorch.

        Raises MissingDependencyError, BrokenDependencyError, LibraryVersionError, DeviceNotFoundError, ConfigError,
        CompileError.
        """
        torch = self._torch
        if not self._is_twin:
            if self._asked:
                self._check_asked()
            else:
                self._check_gpu()
            libraries.load("triton", "triton", EXTRA, self._purpose)
            with driver_stub(torch, self._purpose) if self._is_elsewhere else nullcontext():
                check_cuda_toolkit(torch, self._purpose)
        cpp_compiler(torch, self._purpose)

    def _check_gpu(self) -> None:
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

    def _check_asked(self) -> None:
        version = str(self._torch.__version__)
        check_built_with_cuda(self._torch, self._purpose)
        from bei_build.torch_graph.pretended_gpu import CAPABILITIES, KNOWN_VERSIONS

        for word in self._asked:
            if word not in map(str, CAPABILITIES):
                have = ", ".join(map(str, CAPABILITIES))
                raise ConfigError(f"compute_capability {word!r}: packages of target cuda are compiled for {have}.")
        old = [word for word in self._asked if self._precision == "fp8" and int(word) < _FP8_FROM]
        if old:
            raise ConfigError(
                f"GPUs of compute capability {int(old[0]) / 10} do not compute in fp8: leave {old[0]} out."
            )
        if self._is_elsewhere and ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
            raise LibraryVersionError(
                f"Compiling for GPUs that are elsewhere replaces functions of PyTorch {' and '.join(KNOWN_VERSIONS)}, "
                f"and {version} is installed: install one of those, here and where the artifact is served, or build on "
                "the GPU."
            )

    def cannot_run(self) -> str | None:
        """The reason why this machine cannot run what it builds: no GPU, or another one."""
        if not self._is_elsewhere:
            return None
        gpu = self._gpu_here
        if gpu is None:
            return "this machine has no NVIDIA GPU that PyTorch can use"
        if str(gpu.capability) in self._asked:
            return None
        return (
            f"this machine's {gpu.name} is {gpu.architecture}, and the packages are for {', '.join(self._capabilities)}"
        )

    def machine(self) -> list[str]:
        """PyTorch's version, and the device that it compiles for."""
        return [str(self._torch.__version__), self._device, *self._capabilities]

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, numerics: Numerics, limits: Limits, folder: Path, say: Say
    ) -> EngineRequirements:
        """Write the packages and their weights into ``folder``. Raises CompileError."""
        if numerics.observed:
            raise CompileError(f"Target {self._target} shows no inputs of linear layers. This is a bug.")
        torch = self._torch
        from bei_build.torch_graph.model import packed_model
        from bei_build.torch_graph.parameters import join_linear_layers

        dtype = _TYPES[PRECISIONS[numerics.precision].storage]
        say("reading weights")
        device = "cpu" if self._is_twin or self._is_elsewhere else "cuda"
        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
        model = packed_model(spec, weights.read, limits.max_seq_len, quantization=numerics.quantization, **options)
        join_linear_layers(model)
        say("compiling")
        if self._is_elsewhere:
            wanted = self._wanted(model, dtype, numerics, folder)
            with driver_stub(torch, self._purpose):
                package = _compiled_apart(model, wanted, folder, say)
        else:
            package = self._compiled(model, folder)
        needs = EngineRequirements(
            compiler="aotinductor",
            compiler_version=str(torch.__version__),  # a class of its own
            device=self._device,
            capabilities=self._capabilities,
            package=package,
        )
        del model
        if device == "cuda":  # the engine is loaded next, and its weights need the memory
            gc.collect()
            torch.cuda.empty_cache()
        return needs

    def _compiled(self, model: Any, folder: Path) -> Package:
        """Compile into ``folder``. The compiler's cache is removed afterwards."""
        from torch._inductor.utils import fresh_cache

        from bei_build.torch_graph.package import export_model, names_read, weights_of, write_package, write_weights

        failure: Exception | None = None
        with tempfile.TemporaryDirectory(dir=folder) as scratch, warnings.catch_warnings(), fresh_cache(dir=scratch):
            warnings.simplefilter("ignore")  # PyTorch's compiler uses deprecated parts of PyTorch
            try:
                program = export_model(model)
                (capability,) = self._capabilities
                path = folder / cuda_package(capability)
                write_package(program, path)
                names, tensors = names_read(path, -1 if self._is_twin else 0), weights_of(program)
                weight_bytes = write_weights({name: tensors[name] for name in names}, folder / CUDA_WEIGHTS)
            except Exception as error:  # the compiler's parts raise classes of their own; fresh_cache would log them
                failure = error
        if isinstance(failure, CompileError):
            raise failure
        if failure is not None:
            reason = " ".join(str(failure).split()) or type(failure).__name__
            raise CompileError(
                f"PyTorch {self._torch.__version__} could not compile the model: {reason[:MOST_OF_REASON]}"
            ) from failure
        choices = choices_of(model)
        cuda = None if self._is_twin else self._torch.version.cuda
        return _described(choices, choices.reasons, cuda, weight_bytes)

    def _wanted(self, model: Any, dtype: str, numerics: Numerics, folder: Path) -> list[Wanted]:
        from bei_build.torch_graph.fp8 import FP8Linear

        one_scale = {
            path: module.has_one_scale for path, module in model.named_modules() if isinstance(module, FP8Linear)
        }
        shared = model.spec, model.max_seq_len, dtype, numerics.quantization, one_scale
        return [Wanted(*shared, int(word), folder / cuda_package(f"SM{word}")) for word in self._asked]

    @property
    def _device(self) -> str:
        if self._asked:
            return f"any GPU of compute capability {' or '.join(str(int(word) / 10) for word in self._asked)}"
        return cpu_name() if self._is_twin else self._gpu.name

    @property
    def _capabilities(self) -> list[str]:
        """The GPUs, or the one CPU, for which there are packages."""
        if self._asked:
            return [f"SM{word}" for word in self._asked]
        return [self._torch.backends.cpu.get_cpu_capability() if self._is_twin else self._gpu.architecture]

    @cached_property
    def _is_elsewhere(self) -> bool:
        """True if a package is for another GPU than this machine's."""
        gpu = self._gpu_here if self._asked else None
        return bool(self._asked) and (gpu is None or self._asked != (str(gpu.capability),))

    @cached_property
    def _torch(self) -> Any:
        return load_torch(self._purpose)

    @cached_property
    def _gpu_here(self) -> TorchGpu | None:
        try:
            return found_gpu(self._torch, self._purpose)
        except (DeviceNotFoundError, LibraryVersionError):
            return None

    @cached_property
    def _gpu(self) -> TorchGpu:
        try:
            return found_gpu(self._torch, self._purpose)
        except DeviceNotFoundError as error:
            raise DeviceNotFoundError(
                f"{error} Say which GPUs the packages are for, and none is needed: --compute-capability 90; --target "
                "cpu needs none either."
            ) from error


def _described(choices: Choices, reasons: Sequence[str], cuda: str | None, weight_bytes: int) -> Package:
    return Package(
        cuda=cuda,
        inputs=list(choices.inputs),
        kernels=list(choices.kernels),
        fallbacks=list(reasons),
        weight_bytes=weight_bytes,
        weights="beside",
    )


def _compiled_apart(model: Any, wanted: Sequence[Wanted], folder: Path, say: Say) -> Package:
    """Compile each of ``wanted``, and write the weights of ``model``, which is on the CPU, for all of them."""
    import torch

    from bei_build.torch_graph.package import write_weights

    compiled = []
    for package in wanted:
        say(f"compiling for {package.capability / 10}")
        compiled.append(compile_apart(package))
    tensors = _tensors_of(model)
    names = dict.fromkeys(name for one in compiled for name in one.weights)
    for one in compiled:
        _check_same(one, tensors)
    first = compiled[0].choices
    if any((one.choices.inputs, one.choices.kernels) != (first.inputs, first.kernels) for one in compiled):
        raise CompileError("Packages for several GPUs have different inputs or kernels. This is a bug.")
    say("writing weights")
    weight_bytes = write_weights({name: tensors[name] for name in names}, folder / CUDA_WEIGHTS)
    reasons = dict.fromkeys(reason for one in compiled for reason in one.choices.reasons)
    return _described(first, [*reasons, _NOT_TIMED], torch.version.cuda, weight_bytes)


def _tensors_of(model: Any) -> Mapping[str, Any]:
    """Each parameter and buffer by every name that it has: modules may share one."""
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {name: tensor for group in named for name, tensor in group}


def _check_same(compiled: Compiled, tensors: Mapping[str, Any]) -> None:
    """Raise CompileError for a weight that the model on the CPU does not have as the package reads it."""
    for name, (shape, dtype) in compiled.weights.items():
        found = tensors.get(name)
        if found is None or (tuple(found.shape), str(found.dtype)) != (shape, dtype):
            raise CompileError(f"The package reads {name} as {dtype} {list(shape)}, which is not so. This is a bug.")
