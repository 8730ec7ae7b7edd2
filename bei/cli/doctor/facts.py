"""Facts about this machine: system, CPU, memory, NVIDIA's GPUs and driver, installed packages and libraries.

A field that is None could not be determined; the report's ``unknown`` says why. ``root``: the folder of /proc and /sys.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.engine.nvidia import LIBRARIES, current_gpu, load_cuda, load_library
from bei.engine.openvino import cpu_capabilities
from bei.errors import BeiError, MissingDependencyError
from bei.utils.cpu_count import usable_cores
from bei.version import __version__

ValueT = TypeVar("ValueT")

# Why there is, or is not, a GPU that CUDA can use.
GpuState: TypeAlias = Literal["ready", "absent", "no driver", "hidden", "old driver", "no cuda-python", "failed"]

# /proc/cpuinfo's flag for each instruction set that engines use, the best last.
_X86 = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "AMX_BF16": "amx_bf16",
}
_ARM = {"NEON": "asimd", "FP16": "asimdhp", "I8MM": "i8mm", "BF16": "bf16", "SVE": "sve", "SVE2": "sve2"}

# Server cores by Arm's implementer and part numbers: on Arm /proc/cpuinfo has no model name.
_ARM_CORES = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0xc0", "0xac3"): "Ampere-1",
}
_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"  # NVIDIA's PCI devices
_DRIVER_VERSION = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")

_PURPOSES = {
    "tokenizers": "serving",
    "openvino": "target cpu",
    "onnx": "building",
    "transformers": "building",
    "torch": "target cuda; building: verification against the HF model",
    "cuda-bindings": "GPU targets",
    "tensorrt-llm": "target trtllm",
}
# What an extra is for, and the package of it that is looked for.
EXTRAS = {
    "bench": ("hdrhistogram", "bei bench"),
    "bulk": ("pyarrow", "bei embed"),
    "lance": ("pylance", "bei embed on Lance's datasets"),
    "sign": ("cryptography", "signatures of artifacts"),
    "otel": ("opentelemetry-sdk", "traces"),
    "grpc": ("grpcio", "gRPC"),
    "image": ("pillow", "models that read images"),
    "gguf": ("gguf", "GGUF files as checkpoints"),
    "fp8": ("onnxruntime", "quantized builds for GPUs that are elsewhere"),
    "scale": ("ray", "bulk jobs and replicas on Ray"),
    "completion": ("shtab", "bei completion"),
}
_REQUIREMENT = re.compile(r"([\w.-]+)(?:[^;]*?>=([\d.]+))?.*extra == ['\"]build['\"]")


class System(msgspec.Struct, frozen=True, kw_only=True):
    """``glibc``: its version, or another C library's name. ``open_files``: soft and hard limit; -1 is unlimited."""

    bei: str
    python: str
    system: str
    glibc: str
    open_files: tuple[int, int] | None
    cache_dir: str | None
    cache_writable: bool | None
    cache_free_bytes: int | None


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """``instruction_sets``: those that engines use. ``computes_in``: OpenVINO's words (BF16, INT8, ...)."""

    model: str | None
    architecture: str
    usable_cores: int
    instruction_sets: dict[str, bool] | None
    computes_in: list[str] | None
    memory_bytes: int | None
    available_bytes: int | None
    container_limit_bytes: int | None


class InstalledPackage(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution that bei needs for ``purpose``. ``version`` None: not installed."""

    name: str
    version: str | None
    purpose: str


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """An extra of bei that adds something beside targets."""

    name: str
    is_installed: bool
    purpose: str


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A CUDA device. ``capability`` 89 is compute capability 8.9."""

    index: int
    name: str
    capability: int
    memory_bytes: int
    free_bytes: int | None


class Nvidia(msgspec.Struct, frozen=True, kw_only=True):
    """``driver``: its version. ``driver_cuda``: the newest CUDA it serves, 13000 is 13.0. ``problem``: CUDA's error."""

    state: GpuState
    problem: str
    driver: str | None
    driver_cuda: int | None
    gpus: list[GpuFacts]


class LibraryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """TensorRT or TensorRT-RTX. ``problem`` is empty if it can be loaded and bei supports its version."""

    target: str
    title: str
    version: str | None
    problem: str


class Unknowns(list[str]):
    """Facts that could not be determined, a sentence each."""

    def ask(self, what: str, function: Callable[..., ValueT], *arguments: object) -> ValueT | None:
        """The function's result, or None with the reason noted.

        Every exception is caught: a report with a gap is of more use than none, whatever a foreign library raises.
        """
        try:
            return function(*arguments)
        except Exception as error:  # doctor reports what a broken installation raises, and goes on
            self.append(f"{what}: {reason_of(error)}")
            return None


def reason_of(error: BaseException) -> str:
    """The error on one line, with its class unless it is bei's."""
    text = " ".join(str(error).split())
    return text if isinstance(error, BeiError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


# System.


def system_facts(unknowns: Unknowns) -> System:
    """Versions, limits, and the cache of bei serve."""
    cache = unknowns.ask("cache folder", lambda: Path(load(ServeConfig, {}).cache_dir).expanduser())
    there = next(folder for folder in (cache, *cache.parents) if folder.exists()) if cache else None
    return System(
        bei=__version__,
        python=platform.python_version(),
        system=unknowns.ask("system", _system_name) or platform.platform(),
        glibc=" ".join(platform.libc_ver()).strip() or "not glibc",
        open_files=unknowns.ask("limit of open files", resource.getrlimit, resource.RLIMIT_NOFILE),
        cache_dir=str(cache) if cache else None,
        cache_writable=os.access(there, os.W_OK | os.X_OK) if there else None,
        cache_free_bytes=unknowns.ask("room in the cache folder", lambda: shutil.disk_usage(there).free)
        if there
        else None,
    )


def _system_name() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, kernel {platform.release()}"


# CPU and memory.


def cpu_facts(root: Path, unknowns: Unknowns) -> Cpu:
    """CPU and memory, from /proc and the container's limits."""
    cgroup = root / "sys/fs/cgroup"
    described = unknowns.ask("CPU model and instruction sets", _described, root / "proc/cpuinfo")
    model, instruction_sets = described or (None, None)
    meminfo = unknowns.ask("memory", _meminfo, root / "proc/meminfo") or {}
    return Cpu(
        model=model,
        architecture=platform.machine(),
        usable_cores=usable_cores(cgroup),
        instruction_sets=instruction_sets,
        computes_in=unknowns.ask("what the CPU computes in", cpu_capabilities),
        memory_bytes=meminfo.get("MemTotal"),
        available_bytes=meminfo.get("MemAvailable"),
        container_limit_bytes=_container_limit(cgroup, meminfo.get("MemTotal")),
    )


def _described(cpuinfo: Path) -> tuple[str | None, dict[str, bool]]:
    """Model and instruction sets of the first core."""
    rows: dict[str, str] = {}
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        rows.setdefault(name.strip(), value.strip())
    model, known = rows.get("model name"), _X86
    if "Features" in rows:
        core, known = (rows.get("CPU implementer", ""), rows.get("CPU part", "")), _ARM
        model = model or _ARM_CORES.get(core, f"Arm, implementer {core[0]}, part {core[1]}")
    flags = rows["flags" if known is _X86 else "Features"].split()
    return model, {title: flag in flags for title, flag in known.items()}


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name."""
    rows = (line.split(":", 1) for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in rows}


def _container_limit(cgroup: Path, total: int | None) -> int | None:
    """The container's memory limit in bytes (cgroup 2 or 1); None if there is none below the machine's memory."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return limit if total is None or limit < total else None
    return None


# NVIDIA.


def nvidia_facts(root: Path, unknowns: Unknowns) -> Nvidia:
    """GPUs and driver, as CUDA, NVML and the kernel report them, or why there are none."""
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
        found = (unknowns.ask(f"GPU {index}", _gpu, cuda, index) for index in range(_value(cuda.cudaGetDeviceCount)))
        gpus = [gpu for gpu in found if gpu is not None]
    except Exception as error:  # a foreign library may raise anything
        problem = reason_of(error)
    driver = _nvml_driver() or kernel_driver
    return Nvidia(
        state="ready" if gpus else _why_none(cuda, driver, driver_cuda, has_device),
        problem=problem,
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
    )


def _gpu(cuda: Any, index: int) -> GpuFacts:
    properties = _value(cuda.cudaGetDeviceProperties, index)
    try:  # fails if another process has the device exclusively
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
    """The first value behind CUDA's status, None if there is none. Raises RuntimeError with the status's name."""
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


def _nvml_driver() -> str | None:
    """The driver's version by NVML; None where NVML does not work."""
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
        try:
            return str(nvml.system_get_driver_version())
        finally:
            nvml.shutdown()
    except Exception:  # missing in older cuda-python, and its error classes are its own; the kernel has the version too
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
    """True if the machine has a display controller of NVIDIA, with a driver or without."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
        except OSError:
            continue
        if vendor == _VENDOR and kind.startswith(_DISPLAY_CLASS):
            return True
    return False


# Packages and libraries.


def packages() -> list[InstalledPackage]:
    """Installed versions, read without importing anything."""
    return [InstalledPackage(name=name, version=version_of(name), purpose=why) for name, why in _PURPOSES.items()]


def extras() -> list[Extra]:
    """Those that add something beside targets, by one package of each."""
    return [
        Extra(name=name, is_installed=version_of(package) is not None, purpose=why)
        for name, (package, why) in EXTRAS.items()
    ]


def lacking_for_builds() -> list[str]:
    """Packages of bei's extra ``build`` that are missing or too old, as "onnx>=1.17".

    Raises PackageNotFoundError where bei is not installed as a distribution.
    """
    lacking = []
    for requirement in importlib.metadata.requires("bei") or []:
        if found := _REQUIREMENT.match(requirement):
            name, least = found.groups()
            version = version_of(name)
            if version is None or (least and _numbers(version) < _numbers(least)):
                lacking.append(f"{name}>={least}" if least else name)
    return lacking


def version_of(name: str) -> str | None:
    """The version of the distribution ``name``; None: it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu and of 2.13.0rc1."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version.strip())[0].split("."))  # type: ignore[index]


def libraries() -> list[LibraryFacts]:
    """TensorRT and TensorRT-RTX, each loaded as build and serve load it."""
    return [_library(target) for target in LIBRARIES]


def _library(target: str) -> LibraryFacts:
    version, problem = None, ""
    try:
        version = str(load_library(target, f"Target {target}").__version__)
    except MissingDependencyError:
        problem = "not installed"
    except Exception as error:  # a broken installation may raise anything
        problem = reason_of(error)
    return LibraryFacts(target=target, title=LIBRARIES[target].title, version=version, problem=problem)
