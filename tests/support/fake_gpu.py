"""An NVIDIA GPU that is not there, for AOTInductor: code generation for target ``cuda`` on a machine without one.

Tensors on ``cuda`` are PyTorch's fake tensors, the device's properties are made up, and Triton compiles every kernel to
a cubin for the wanted compute capability. ``generate`` ends where the C++ compiler would begin; ``link`` goes on, with
PyTorch's build for CUDA. Private functions of Inductor are replaced, which belong to one version of PyTorch: with
others, ``reason_to_skip`` says so.

Use it in a process of its own for each compute capability (``tests.bei_build.torch_graph.generated``): Inductor keeps
what it has seen of a device.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bei_build.torch_graph import fp8, package
from bei_build.torch_graph.model import PackedModel

WRITTEN_FOR = "2.13."
# The most shared memory of a block, in bytes, by compute capability (CUDA's programming guide).
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
CAPABILITIES = tuple(SHARED_MEMORY)
# A value for every element that Inductor reads of a tensor: 1 would be left out of products, 0 of sums.
_ANY_VALUE = 0.375

_GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new impl::NoOpDeviceGuardImpl<DeviceType::CUDA>());
"""
_GUARDS: list[ctypes.CDLL] = []

# Calls of the generated C++ code that start work on the GPU: Triton's kernels, and PyTorch's operators.
_LAUNCH = re.compile(r"^\s*(?:call_(\w+)\(|AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cuda_(\w+?)\()", re.MULTILINE)
_PROXY = "aoti_torch_proxy_executor_call_function"


@dataclass(frozen=True)
class Kernel:
    """A compiled Triton kernel. ``signature``: Triton's type of each argument."""

    signature: Mapping[str, str]
    ptx: str
    cubin: bytes


@dataclass(frozen=True)
class Generated:
    """What AOTInductor writes for a model: the C++ ``wrapper``, and Triton's ``kernels`` by name."""

    wrapper: str
    kernels: Mapping[str, Kernel]

    @property
    def launches(self) -> Counter[str]:
        """How often a step launches each kernel of Triton, and calls each operator of PyTorch."""
        body = self.wrapper.split("::run_impl(", 1)[1]
        found = Counter(kernel or operator for kernel, operator in _LAUNCH.findall(body))
        assert _PROXY not in body, "an operator has no C function: PyTorch's slow proxy calls it"
        return found


def reason_to_skip() -> str | None:
    """The reason why this machine cannot pretend; None if it can."""
    if not torch.__version__.startswith(WRITTEN_FOR):
        return f"the fake GPU replaces private functions of PyTorch {WRITTEN_FOR}x, and this is {torch.__version__}"
    if torch.version.cuda is not None:
        return f"the fake GPU is for PyTorch without CUDA, and this is {torch.__version__}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install --no-deps triton"
    if shutil.which("g++") is None:
        return "the fake GPU needs g++, for a guard of devices that does nothing"
    return None


def generate(make: Callable[[], PackedModel], capability: int) -> Generated:
    """The code for the model of ``make`` on a GPU of ``capability``, 90 for compute capability 9.0.

    ``make`` gets no values: weights that it would load do not exist.
    """
    from torch._inductor import codecache

    kernels: dict[str, Kernel] = {}
    with tempfile.TemporaryDirectory() as folder, _pretended(capability, kernels, Path(folder)):
        _register_guard(Path(folder))
        try:
            with mock.patch.object(codecache.AotCodeCompiler, "compile", _stop):
                package.write_package(package.export_model(_made(make)), Path(folder) / "model.pt2")
        except _BeforeTheLinkError as stopped:
            return Generated(stopped.wrapper, kernels)
    raise AssertionError("AOTInductor has not come to the C++ compiler")


def link(make: Callable[[], PackedModel], capability: int, path: Path) -> Mapping[str, Kernel]:
    """Write the package of the model of ``make`` to ``path``, linked and without weights; its kernels by name.

    Needs PyTorch with CUDA, and what AOTInductor compiles C++ with.
    """
    kernels: dict[str, Kernel] = {}
    with tempfile.TemporaryDirectory() as folder, _pretended(capability, kernels, Path(folder)):
        package.write_package(package.export_model(_made(make)), path)
    return kernels


def _made(make: Callable[[], PackedModel]) -> PackedModel:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make()
        for module in model.modules():
            if isinstance(module, fp8.FP8Linear):
                module._product = module.choice.product
    return model


def _stop(graph: Any, wrapper_code: str, *_: Any, **__: Any) -> Any:
    raise _BeforeTheLinkError(wrapper_code)


class _BeforeTheLinkError(BaseException):
    """Not an Exception, which Inductor would wrap."""

    def __init__(self, wrapper: str) -> None:
        super().__init__()
        self.wrapper = wrapper


@contextmanager
def _pretended(capability: int, kernels: dict[str, Kernel], folder: Path) -> Iterator[None]:
    from torch._inductor.utils import fresh_cache

    with ExitStack() as stack:
        stack.enter_context(fresh_cache(dir=str(folder)))
        _pretend_a_device(stack, capability)
        _pretend_values(stack)
        _pretend_launches(stack, capability, kernels)
        yield


def _register_guard(folder: Path) -> None:
    """PyTorch without CUDA has nothing that makes a GPU the current one, which some operators do before they are
    traced: here that does nothing."""
    if _GUARDS:
        return
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD)
    torch_folder = Path(torch.__file__).parent
    paths = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, *paths, "-lc10", "-o", library], check=True)
    _GUARDS.append(ctypes.CDLL(str(library)))


def _replace(stack: ExitStack, replaced: Mapping[Any, Mapping[str, Any]]) -> None:
    """Replace attributes until ``stack`` ends. PyTorch without CUDA lacks some of its C functions."""
    for owner, values in replaced.items():
        for name, value in values.items():
            stack.enter_context(mock.patch.object(owner, name, value, create=owner is torch._C))


def _pretend_a_device(stack: ExitStack, capability: int) -> None:
    """What PyTorch says of its GPU."""
    from torch._dynamo.device_interface import CudaInterface

    properties = SimpleNamespace(
        name=f"a GPU that is not there (SM{capability})",
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=132,
        total_memory=80 << 30,
        warp_size=32,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=SHARED_MEMORY[capability],
        L2_cache_size=48 << 20,
        gcnArchName="",
    )
    replaced: dict[Any, dict[str, Any]] = {
        torch.version: {"cuda": "13.0"},
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


def _pretend_values(stack: ExitStack) -> None:
    """Weights without values: exported ones become fake tensors of the exported graph, and Inductor reads numbers."""
    from torch._inductor import graph

    export = package.export_model

    def exported(model: PackedModel) -> torch.export.ExportedProgram:
        with FakeTensorMode(allow_non_fake_inputs=True):
            program = export(model)
        placeholders = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
        with next(value.fake_mode for value in placeholders if isinstance(value, FakeTensor)):
            for tensors in (program._state_dict, program._constants):
                for name, tensor in tensors.items():
                    if isinstance(tensor, torch.Tensor):
                        tensors[name] = _without_values(tensor)
        return program

    def choice(layer: fp8.FP8Linear) -> fp8.ProductChoice:
        sizes = layer.in_features, layer.out_features
        return fp8.choose_product(*sizes, layer.codes.device, layer._dtype, has_one_scale=False)

    replaced: dict[Any, dict[str, Any]] = {
        package: {"export_model": exported},
        fp8.FP8Linear: {"choice": property(choice)},
        graph: {"is_same_tensor": lambda one, other: one is other},
        FakeTensorMode: {"avoid_device_init": True},  # no small tensor is really moved to the device
        FakeTensor: {
            "item": lambda tensor: _ANY_VALUE,
            "tolist": lambda tensor: [_ANY_VALUE] * tensor.numel() if tensor.ndim else _ANY_VALUE,
        },
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
        kernels[name] = Kernel(dict(tuner.triton_meta["signature"]), assembly["ptx"], assembly["cubin"])
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
    settings = {"compile_threads": 1, "triton.autotune_at_compile_time": True, "use_static_triton_launcher": False}
    stack.enter_context(config.patch(settings))


def _without_a_gpu(initialize: Callable[..., Any]) -> Callable[..., Any]:
    def initialized(*_: Any, **__: Any) -> Any:
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            return initialize()

    return initialized


class _Driver:
    """Triton's driver of the GPU."""

    class _Utils:
        def __init__(self, max_shared: int) -> None:
            self._max_shared = max_shared

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": self._max_shared, "multiprocessor_count": 132, "warpSize": 32}

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
        self.utils = self._Utils(SHARED_MEMORY[capability])

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
