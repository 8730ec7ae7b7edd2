"""Stand-ins of other machines: /proc and /sys in a folder, modules for CUDA and TensorRT, a builder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bei.cli.doctor import targets
from bei.cli.doctor.report import MachineReport, examine
from bei.cli.doctor.targets import Builder, TargetFacts
from bei.engine.nvidia import current_gpu, load_cuda, load_library
from bei.errors import BeiError, ConfigError

XEON = (
    "model name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_int8 amx_bf16\n"
)
OLD_XEON = "model name\t: Intel(R) Xeon(R) CPU E5-2650 v4 @ 2.20GHz\nflags\t\t: fpu sse4_2 avx avx2 fma\n"
GRAVITON = (
    "processor\t: 0\nFeatures\t: fp asimd asimdhp sve bf16 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n"
    "processor\t: 1\nFeatures\t: fp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
)
KERNEL_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (builder@host)\n"
OLD_KERNEL_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"


def machine(folder: Path, *, cpuinfo: str = XEON, driver: str = "", has_device: bool = False, limit: str = "") -> Path:
    """A root folder with what bei doctor reads of /proc and /sys."""
    files = {"proc/cpuinfo": cpuinfo, "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n"}
    if driver:
        files["proc/driver/nvidia/version"] = driver
    if has_device:
        files["sys/bus/pci/devices/0000:01:00.0/vendor"] = "0x10de\n"
        files["sys/bus/pci/devices/0000:01:00.0/class"] = "0x030200\n"
    if limit:
        files["sys/fs/cgroup/memory.max"] = limit
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


@dataclass
class Cuda:
    """A stand-in of cuda.bindings.runtime. ``count_status``: the status of cudaGetDeviceCount."""

    driver_cuda: int = 13000
    count_status: str = "cudaSuccess"
    names: tuple[bytes, ...] = (b"NVIDIA L40S",)
    capability: tuple[int, int] = (8, 9)
    memory_status: str = "cudaSuccess"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace cuda-python; NVML fails, so the driver's version is the kernel's."""
        statuses = pytest.importorskip("cuda.bindings.runtime").cudaError_t
        good = statuses.cudaSuccess
        properties = [
            SimpleNamespace(
                name=name.ljust(256, b"\0"),
                major=self.capability[0],
                minor=self.capability[1],
                totalGlobalMem=48 * 2**30,
            )
            for name in self.names
        ]
        count, memory = getattr(statuses, self.count_status), getattr(statuses, self.memory_status)
        module = ModuleType("cuda.bindings.runtime")
        vars(module).update(
            cudaError_t=statuses,
            cudaDriverGetVersion=lambda: (good, self.driver_cuda),
            cudaGetDeviceCount=lambda: (count, len(self.names) if count == good else None),
            cudaGetDeviceProperties=lambda index: (good, properties[index]),
            cudaSetDevice=lambda index: (good,),
            cudaMemGetInfo=lambda: (memory, *((40 * 2**30, 48 * 2**30) if memory == good else (None, None))),
        )
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", module)
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)


def install_library(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> None:
    """Install a module ``name`` of ``version``; None: uninstall it."""
    if version is None:
        monkeypatch.setattr(sys, "meta_path", [_Missing(name), *sys.meta_path])
        monkeypatch.delitem(sys.modules, name, raising=False)
        return
    module = ModuleType(name)
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


class _Missing:
    """A finder that raises Python's own error for a module, even if it is installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@dataclass
class StandInCompiler:
    """``check``: raises if it cannot build. ``reason_not_to_run``: the result of ``cannot_run``."""

    check: Callable[[], object]
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")
    best: str = "bf16"
    reason_not_to_run: str | None = None

    def resolve_precision(self, precision: str) -> str:
        if precision == "bf16" and self.best != "bf16":
            raise ConfigError("not on this CPU")
        return self.best if precision == "auto" else precision

    def check_able(self) -> None:
        self.check()

    def cannot_run(self) -> str | None:
        return self.reason_not_to_run


@dataclass
class StandInBuilder:
    """Its compilers check libraries and GPU as the real ones do; ``asked`` records the probed attention layers."""

    best_on_cpu: str = "bf16"
    cpu_check: Callable[[], object] = lambda: None
    fused: Callable[[str], str] = lambda form: "no" if form == "packed" else "yes"
    asked: list[tuple[str, int | None, str, str, int]] = field(default_factory=list)

    def builder(self) -> Builder:
        return Builder(
            targets=("cpu", "tensorrt", "tensorrt-rtx", "trtllm"),
            compiler_for=self._compiler,
            forms=("padded", "packed"),
            precisions=("bf16", "fp16"),
            probed=self._probed,
        )

    def _compiler(self, target: str, capabilities: tuple[str, ...]) -> StandInCompiler:
        if target == "cpu":
            return StandInCompiler(self.cpu_check, ("fp32", "bf16", "int8"), self.best_on_cpu)
        if target == "trtllm":
            raise ConfigError("Target 'trtllm' cannot be built yet.")
        reason = None
        if capabilities:
            try:
                current_gpu(load_cuda("", target))
            except BeiError:
                reason = "this machine has no NVIDIA GPU"

        def check() -> None:
            load_library(target, f"Building for the target {target}")
            if not capabilities:
                current_gpu(load_cuda(f"Building for the target {target}", target))

        return StandInCompiler(check, reason_not_to_run=reason)

    def _probed(self, target: str, asked: Sequence[tuple[int | None, str, str, int]]) -> Iterator[Any]:
        for capability, precision, form, head_size in asked:
            self.asked.append((target, capability, precision, form, head_size))
            fused = self.fused(form)
            yield SimpleNamespace(fused=fused, reason="" if fused == "yes" else "why", seconds=0.1)


def with_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this version of bei has an engine for TensorRT."""
    for target in ("tensorrt", "tensorrt-rtx"):
        monkeypatch.setitem(targets.ENGINES, target, "bei.engine.fake")


def examined(root: Path, builder: StandInBuilder | BeiError | None = None, **options: Any) -> MachineReport:
    standing_in = StandInBuilder() if builder is None else builder
    return examine(standing_in if isinstance(standing_in, BeiError) else standing_in.builder(), root=root, **options)


def target_of(report: MachineReport, name: str) -> TargetFacts:
    return next(target for target in report.targets if target.name == name)
