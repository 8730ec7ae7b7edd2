"""NVIDIA's GPUs and driver, as CUDA, NVML and the kernel know them, and why there are none."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from bei.cli.doctor.guarded import Unknowns, reason_of
from bei.cli.doctor.report import GpuFacts, GpuState, Nvidia
from bei.engine.nvidia import current_gpu, load_cuda
from bei.errors import BeiError

_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"
_DRIVER_VERSION = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")


def nvidia_facts(root: Path, unknowns: Unknowns) -> Nvidia:
    """``root``: where /proc and /sys are."""
    kernel_driver, has_device = _kernel_driver(root), _has_device(root)
    try:
        cuda = load_cuda("Asking for GPUs", "tensorrt")
    except BeiError as error:
        state: GpuState = "no cuda-python" if has_device or kernel_driver else "absent"
        return Nvidia(state=state, problem=str(error), driver=kernel_driver, driver_cuda=None, gpus=[])
    driver_cuda = unknowns.ask("the CUDA that the driver serves", _value, cuda.cudaDriverGetVersion) or None
    problem, gpus = "", []
    try:
        current_gpu(cuda)
        gpus = _gpus(cuda, unknowns)
    except Exception as error:  # a foreign library may raise anything
        problem = reason_of(error)
    driver = _driver_version() or kernel_driver
    return Nvidia(
        state="ready" if gpus else _why_none(cuda, driver, driver_cuda, has_device),
        problem=problem,
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
    )


def _gpus(cuda: Any, unknowns: Unknowns) -> list[GpuFacts]:
    found = (unknowns.ask(f"GPU {index}", _gpu, cuda, index) for index in range(_value(cuda.cudaGetDeviceCount)))
    return [gpu for gpu in found if gpu is not None]


def _gpu(cuda: Any, index: int) -> GpuFacts:
    properties = _value(cuda.cudaGetDeviceProperties, index)
    try:  # opens the device, which may be another process's alone
        _value(cuda.cudaSetDevice, index)
        free: int | None = _value(cuda.cudaMemGetInfo)
    except RuntimeError:
        free = None
    return GpuFacts(
        index=index,
        name=properties.name.split(b"\0")[0].decode(),
        capability=10 * properties.major + properties.minor,
        memory_bytes=properties.totalGlobalMem,
        free_bytes=free,
    )


def _value(function: Any, *arguments: Any) -> Any:
    """The first value behind CUDA's status, or None where there is none. Raises RuntimeError with the status's name."""
    status, *values = function(*arguments)
    if status.value != 0:
        raise RuntimeError(status.name)
    return values[0] if values else None


def _why_none(cuda: Any, driver: str | None, driver_cuda: int | None, has_device: bool) -> GpuState:
    try:
        status = cuda.cudaGetDeviceCount()[0].name
    except RuntimeError:  # cuda-python's own, where there is no libcuda
        status = ""
    if driver_cuda and status == "cudaErrorInsufficientDriver":
        return "old driver"
    if driver or driver_cuda:
        return "hidden" if status in ("", "cudaErrorNoDevice", "cudaErrorInsufficientDriver") else "failed"
    return "no driver" if has_device else "absent"


def _driver_version() -> str | None:
    """By NVML; None where it does not work."""
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
        try:
            return str(nvml.system_get_driver_version())
        finally:
            nvml.shutdown()
    except Exception:  # not in older cuda-python; its errors are classes of its own; the kernel knows the version too
        return None


def _kernel_driver(root: Path) -> str | None:
    """Version of the driver that the kernel has loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = _DRIVER_VERSION.search(text)
    return found.group() if found else "of unknown version"


def _has_device(root: Path) -> bool:
    """Whether a display controller of NVIDIA is in the machine, with a driver or without."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        if vendor == _VENDOR and kind.startswith(_DISPLAY_CLASS):
            return True
    return False
