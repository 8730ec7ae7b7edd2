"""The GPU of ``bei_build.torch_graph.pretended_gpu`` where PyTorch has no CUDA: code is generated, kernels are compiled
to cubins, and it ends where the C++ compiler would begin.

Use it in a process of its own for each compute capability (``tests.bei_build.torch_graph.generated``).
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bei_build.torch_graph import package
from bei_build.torch_graph.model import PackedModel
from bei_build.torch_graph.pretended_gpu import (
    KNOWN_VERSIONS,
    Kernel,
    export_without_values,
    model_without_values,
    pretended,
)

_GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new impl::NoOpDeviceGuardImpl<DeviceType::CUDA>());
"""
_GUARDS: list[ctypes.CDLL] = []

# Calls of the generated C++ code that start work on the GPU: Triton's kernels, and PyTorch's operators.
_LAUNCH = re.compile(r"^\s*(?:call_(\w+)\(|AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cuda_(\w+?)\()", re.MULTILINE)
_PROXY = "aoti_torch_proxy_executor_call_function"


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
    if ".".join(torch.__version__.split(".")[:2]) not in KNOWN_VERSIONS:
        return f"a pretended GPU needs PyTorch {' or '.join(KNOWN_VERSIONS)}, and this is {torch.__version__}"
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
    with tempfile.TemporaryDirectory() as folder, pretended(capability, kernels, Path(folder)):
        register_guard(Path(folder))
        try:
            with mock.patch.object(codecache.AotCodeCompiler, "compile", stop):
                package.write_package(export_without_values(model_without_values(make)), Path(folder) / "model.pt2")
        except BeforeTheLinkError as stopped:
            return Generated(stopped.wrapper, kernels)
    raise AssertionError("AOTInductor has not come to the C++ compiler")


def stop(graph: Any, wrapper_code: str, *_: Any, **__: Any) -> Any:
    raise BeforeTheLinkError(wrapper_code)


class BeforeTheLinkError(BaseException):
    """Not an Exception, which Inductor would wrap."""

    def __init__(self, wrapper: str) -> None:
        super().__init__()
        self.wrapper = wrapper


def register_guard(folder: Path) -> None:
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
