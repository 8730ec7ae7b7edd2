"""Detection of NVIDIA libraries and GPUs, and errors without them."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bei.engine.nvidia import LIBRARIES, Gpu, current_gpu, load_cuda, load_library
from bei.errors import BrokenDependencyError, DeviceNotFoundError, LibraryVersionError, MissingDependencyError


class Status(IntEnum):
    """As cuda-python's cudaError_t."""

    cudaSuccess = 0
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100


def cuda(*, count: int | None = 1, status: Status = Status.cudaSuccess, driver: int = 13010) -> Any:
    """CUDA's runtime module on a machine of ``count`` GPUs."""
    properties = SimpleNamespace(name=b"NVIDIA L4\0\0", major=8, minor=9, totalGlobalMem=24 << 30)
    return SimpleNamespace(
        cudaDriverGetVersion=lambda: (Status.cudaSuccess, driver),
        cudaGetDeviceCount=lambda: (status, count),
        cudaGetDeviceProperties=lambda index: (Status.cudaSuccess, properties),
    )


def test_the_gpu_is_named_with_what_matters() -> None:
    gpu = current_gpu(cuda())
    assert gpu == Gpu("NVIDIA L4", 89, 24 << 30, 13010)
    assert gpu.architecture == "SM89"


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (cuda(count=0), "finds no NVIDIA GPU"),
        (cuda(count=None, status=Status.cudaErrorInsufficientDriver), "cudaErrorInsufficientDriver"),
        (cuda(count=None, status=Status.cudaErrorNoDevice), "is its driver installed"),
    ],
)
def test_a_machine_without_a_gpu_says_why(machine: Any, words: str) -> None:
    with pytest.raises(DeviceNotFoundError, match=words):
        current_gpu(machine)


def test_a_machine_without_cudas_driver_library_says_so() -> None:
    def fails() -> None:
        raise RuntimeError("Failed to dlopen\nlibcuda.so.1")

    with pytest.raises(DeviceNotFoundError, match=r"Failed to dlopen libcuda\.so\.1"):
        current_gpu(SimpleNamespace(cudaDriverGetVersion=fails))


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed (extra trt-ci)")
def test_the_real_module_is_asked_in_its_own_way() -> None:
    """With a GPU or without, but with nothing that cuda-python does not have."""
    with suppress(DeviceNotFoundError):
        assert current_gpu(load_cuda("A test", "tensorrt")).capability >= 50


def test_without_cuda_python_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(MissingDependencyError, match=r"Serving needs .*pip install 'bei\[tensorrt\]'"):
        load_cuda("Serving", "tensorrt")


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("10.16.1.11", False), ("11.0.0.114", False), ("11.1.0.106", True), ("11.10.0.1", True), ("12.0.0.1", False)],
)
def test_versions_that_are_not_known_are_refused(version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tensorrt")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    if accepted:
        assert load_library("tensorrt", "A test") is module
    else:
        with pytest.raises(LibraryVersionError, match=rf"TensorRT {version} is installed, bei needs >=11\.1,<12"):
            load_library("tensorrt", "A test")


def test_a_library_under_its_second_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tensorrt_rtx_bindings")
    module.__version__ = "1.7.1.116"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", module)
    assert load_library("tensorrt-rtx", "A test") is module


@pytest.mark.parametrize("target", LIBRARIES)
def test_a_library_that_is_not_installed_names_the_extra(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES[target].modules:
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingDependencyError, match=rf"A test needs .* pip install 'bei\[{target}\]'"):
        load_library(target, "A test")


def test_a_package_that_lacks_its_own_bindings_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Of another Python, say: the module that is missing is not the one that was asked for."""
    (tmp_path / "tensorrt.py").write_text("import tensorrt_bindings_of_another_python")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenDependencyError, match=r"cannot be loaded .*tensorrt_bindings_of_another_python"):
        load_library("tensorrt", "A test")


def test_bindings_whose_library_does_not_load_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.11: cannot open\\nshared object file')")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenDependencyError, match=r"cannot be loaded \(libnvinfer\.so\.11: cannot open shared"):
        load_library("tensorrt", "A test")
