"""An NVIDIA GPU that is not there, for AOTInductor: packages for target ``cuda`` are compiled on a machine without it.

Tensors on ``cuda`` are PyTorch's fake tensors, which have no values, and the properties of the device are those of a
usual GPU of the compute capability. Triton compiles every kernel to a cubin, where PyTorch would launch and time it.
Private functions of Inductor are replaced, which belong to versions of PyTorch: ``KNOWN_VERSIONS``.

Use it in a process of its own for each compute capability: Inductor keeps what it has seen of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bei_build.torch_graph import fp8, package
from bei_build.torch_graph.model import PackedModel

# The versions whose private functions these are.
KNOWN_VERSIONS = ("2.11", "2.13")


class Gpu(NamedTuple):
    """What Inductor and Triton ask of a GPU. ``shared_memory`` of a block, in bytes (CUDA's programming guide)."""

    shared_memory: int
    multiprocessors: int
    l2_bytes: int


# A usual one of each compute capability: A100, A10, L40S, H100, B200, RTX 5090.
GPUS = {
    80: Gpu(166_912, 108, 40 << 20),
    86: Gpu(101_376, 72, 6 << 20),
    89: Gpu(101_376, 142, 96 << 20),
    90: Gpu(232_448, 132, 50 << 20),
    100: Gpu(232_448, 148, 126 << 20),
    120: Gpu(101_376, 170, 96 << 20),
}
CAPABILITIES = tuple(GPUS)


@dataclass(frozen=True)
class Kernel:
    """A compiled Triton kernel. ``signature``: Triton's type of each argument; ``source``: its function in Python."""

    signature: Mapping[str, str]
    source: str
    ptx: str
    cubin: bytes


def model_without_values(make: Callable[[], PackedModel], one_scale: Mapping[str, bool] | None = None) -> PackedModel:
    """The model of ``make``, which reads no weights, within ``pretended``.

    ``one_scale``: by the paths of layers in FP8, whether their matrices have one scale; None: none has.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make()
    for path, module in model.named_modules():
        if isinstance(module, fp8.FP8Linear):
            module.choose(has_one_scale=False if one_scale is None else one_scale[path])
    return model


@contextmanager
def pretended(capability: int, kernels: dict[str, Kernel], folder: Path) -> Iterator[None]:
    """A GPU of ``capability`` (90 for compute capability 9.0). ``kernels`` gets the compiled ones by name; the
    compiler's cache is in ``folder``."""
    from torch._inductor.utils import fresh_cache

    with ExitStack() as stack:
        stack.enter_context(fresh_cache(dir=str(folder)))
        _pretend_a_device(stack, capability)
        _pretend_values(stack)
        _pretend_launches(stack, capability, kernels)
        yield


def _replace(stack: ExitStack, replaced: Mapping[Any, Mapping[str, Any]]) -> None:
    """Replace attributes until ``stack`` ends. PyTorch without CUDA lacks some of its C functions."""
    for owner, values in replaced.items():
        for name, value in values.items():
            stack.enter_context(mock.patch.object(owner, name, value, create=owner is torch._C))


def _pretend_a_device(stack: ExitStack, capability: int) -> None:
    """What PyTorch says of its GPU."""
    from torch._dynamo.device_interface import CudaInterface

    gpu = GPUS[capability]
    properties = SimpleNamespace(
        name=f"a GPU that is not there (SM{capability})",
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=gpu.multiprocessors,
        total_memory=80 << 30,
        warp_size=32,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=gpu.shared_memory,
        L2_cache_size=gpu.l2_bytes,
        gcnArchName="",
    )
    replaced: dict[Any, dict[str, Any]] = {
        torch.version: {"cuda": torch.version.cuda or "13.0"},
        torch.cuda: {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: (properties.major, properties.minor),
            "get_device_name": lambda device=None: properties.name,
            "_exchange_device": lambda device: 0,
            "_maybe_exchange_device": lambda device: 0,
            "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device="cuda": None,
        },
        torch._C: {
            "_cuda_getCurrentRawStream": lambda index: 0,
            "_cuda_getDevice": lambda: 0,
            "_cuda_setDevice": lambda index: None,
            "_cuda_exchangeDevice": lambda index: 0,
            "_cuda_maybeExchangeDevice": lambda index: 0,
            "_cuda_getDeviceCount": lambda: 1,
        },
        CudaInterface.Worker: {"get_device_properties": staticmethod(lambda device=None: properties)},
        # It holds PyTorch's functions as they were at import.
        CudaInterface: {
            "is_available": staticmethod(lambda: True),
            "device_count": staticmethod(lambda: 1),
            "current_device": staticmethod(lambda: 0),
            "set_device": staticmethod(lambda device: None),
            "synchronize": staticmethod(lambda device=None: None),
            "exchange_device": staticmethod(lambda device: 0),
            "maybe_exchange_device": staticmethod(lambda device: 0),
            "get_raw_stream": staticmethod(lambda index: 0),
            "get_device_properties": staticmethod(lambda device=None: properties),
            "get_compute_capability": staticmethod(lambda device=None: capability),
        },
    }
    _replace(stack, replaced)


def export_without_values(model: PackedModel) -> torch.export.ExportedProgram:
    """``package.export_model`` of a model of ``model_without_values``: its weights are fake tensors of the graph."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        program = package.export_model(model)
    placeholders = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    made: dict[object, torch.Tensor] = {}  # by the tensor's place: layers share tables, which are one constant
    with next(value.fake_mode for value in placeholders if isinstance(value, FakeTensor)):
        for tensors in (program._state_dict, program._constants):
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor):
                    place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.dtype
                    if place not in made:
                        made[place] = _without_values(tensor)
                    tensors[name] = made[place]
    return program


def _pretend_values(stack: ExitStack) -> None:
    """Weights without values. Nothing reads their values, or PyTorch raises: packages have no numbers of weights
    (``package.SETTINGS``)."""
    from torch._inductor import graph

    replaced: dict[Any, dict[str, Any]] = {
        fp8: {"has_one_scale": lambda scales: False},  # ``model_without_values`` says it
        graph: {"is_same_tensor": lambda one, other: one is other},
        # No small tensor is really made on the device, or moved to it.
        fake_tensor: {"init_gpu_context": lambda device: None},
        FakeTensorMode: {"avoid_device_init": True},
    }
    _replace(stack, replaced)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made


def _pretend_launches(stack: ExitStack, capability: int, kernels: dict[str, Kernel]) -> None:
    """Kernels are compiled and kept where they would be tuned, and nothing is compiled behind them."""
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime import driver

    pretended = _Driver(capability)
    driver.set_active(pretended)  # for good: kernels that are freed at the end unload their modules

    def run(tuner: Any, *_: Any, stream: Any = None, **__: Any) -> None:
        if not tuner.launchers:
            tuner.precompile()
        launcher = tuner.launchers[0]
        assembly = launcher.bin.asm
        name = tuner.inductor_meta["kernel_name"]
        signature = dict(tuner.triton_meta["signature"])
        kernels[name] = Kernel(signature, tuner.fn.src, assembly["ptx"], assembly["cubin"])
        tuner.save_gpu_kernel(stream, launcher)

    tune = PythonWrapperCodegen.generate_and_run_autotune_block

    def tuned(writer: Any) -> Any:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return tune(writer)  # type: ignore[no-untyped-call]

    replaced: dict[Any, dict[str, Any]] = {
        CachingAutotuner: {"run": run},
        PythonWrapperCodegen: {"generate_and_run_autotune_block": tuned},
        triton_helpers: {"set_driver_to_gpu": lambda: driver.set_active(pretended)},
        # These trace patterns with tensors on the GPU where there is one.
        fuse_attention: {"_sfdp_init": _without_a_gpu(fuse_attention._sfdp_init)},
        pad_mm: {"_pad_mm_init": _without_a_gpu(pad_mm._pad_mm_init)},
        misc_patterns: {"_misc_patterns_init": _without_a_gpu(misc_patterns._misc_patterns_init)},
    }
    _replace(stack, replaced)
    settings = {
        "compile_threads": 1,
        "triton.autotune_at_compile_time": True,
        "use_static_triton_launcher": False,
        "shape_padding": False,  # it times products with and without
    }
    stack.enter_context(config.patch(settings))


def _without_a_gpu(initialize: Callable[..., Any]) -> Callable[..., Any]:
    def initialized(*_: Any, **__: Any) -> Any:
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            return initialize()

    return initialized


class _Driver:
    """Triton's driver of the GPU."""

    class _Utils:
        def __init__(self, gpu: Gpu) -> None:
            self._gpu = gpu

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {
                "max_shared_mem": self._gpu.shared_memory,
                "multiprocessor_count": self._gpu.multiprocessors,
                "warpSize": 32,
            }

        @staticmethod
        def load_binary(*_: Any) -> tuple[int, int, int, int, int]:
            """Module, function, registers, spilled registers, most threads."""
            return 1, 2, 32, 0, 1024

        @staticmethod
        def unload_module(*_: Any) -> None:
            pass

    class launcher_cls:  # Triton's name
        def __init__(self, *_: Any) -> None:
            pass

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)
        self.utils = self._Utils(GPUS[capability])

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        found: str = ty_to_cpp(kind)
        return found
