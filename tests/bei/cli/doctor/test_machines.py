"""Reports of ``bei doctor`` on stand-ins of other machines."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from bei.cli.doctor import targets
from bei.cli.doctor.report import MachineReport
from bei.errors import ConfigError, MissingDependencyError
from tests.bei.cli.doctor.machines import (
    GRAVITON,
    KERNEL_DRIVER,
    OLD_KERNEL_DRIVER,
    OLD_XEON,
    XEON,
    Cuda,
    StandInBuilder,
    examined,
    install_library,
    machine,
    target_of,
    with_engines,
)


@pytest.fixture(autouse=True)
def _only_what_is_installed_by_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library of TensorRT, no GPU, and every package that builds need."""
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        install_library(monkeypatch, name, None)
    Cuda(driver_cuda=0, count_status="cudaErrorInsufficientDriver").install(monkeypatch)
    monkeypatch.setattr("bei.cli.doctor.targets.lacking_for_builds", list)
    monkeypatch.setattr("bei.cli.doctor.facts.cpu_capabilities", lambda: ["FP32", "BF16", "INT8"])
    monkeypatch.setattr("bei.cli.doctor.targets.cpu_capabilities", list)
    with_engines(monkeypatch)


@pytest.fixture
def l40s(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda().install(monkeypatch)


def to_do(report: MachineReport, name: str) -> str:
    return next(step for step in report.to_do if step.startswith(f"{name}: "))


@pytest.mark.parametrize(
    ("version", "cpuinfo", "is_told"),
    [("0.2.0", XEON, True), ("0.2.0", OLD_XEON, False), ("0.3.0", XEON, False), (None, XEON, False)],
)
def test_kernels_that_a_cpu_s_engines_pass_over_are_to_be_updated(
    version: str | None, cpuinfo: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.cli.doctor.report.version_of", lambda _: version)
    steps = examined(machine(tmp_path, cpuinfo=cpuinfo), target="cpu").to_do
    assert any("pip install -U bei-kernels-cpu" in step for step in steps) is is_told


# GPUs


def test_a_gpu_with_tensorrt_can_build_and_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, l40s: None) -> None:
    install_library(monkeypatch, "tensorrt", "11.4.0.106")
    builder = StandInBuilder()
    report = examined(machine(tmp_path, driver=KERNEL_DRIVER), builder, head_sizes=(64,))
    assert "This machine can build and serve for tensorrt (bf16, NVIDIA L40S)." in report.summary
    target = target_of(report, "tensorrt")
    assert target.verdicts == ("yes", "yes")
    assert (target.precisions, target.auto, target.next_step) == (["bf16", "fp16", "fp32"], "bf16", "")
    assert report.nvidia.state == "ready"
    assert (report.nvidia.driver, report.nvidia.driver_cuda) == ("580.95.05", 13000)
    (gpu,) = report.nvidia.gpus
    assert (gpu.name, gpu.capability, gpu.memory_bytes, gpu.free_bytes) == ("NVIDIA L40S", 89, 48 * 2**30, 40 * 2**30)
    assert {target for target, *_ in builder.asked} == {"tensorrt"}
    assert {capability for _, capability, *_ in builder.asked} == {None}
    assert {(layer.form, layer.fused) for layer in report.attention} == {("padded", "yes"), ("packed", "no")}


def test_all_gpus_are_listed_and_memory_that_cannot_be_asked_is_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cuda(names=(b"NVIDIA L4", b"NVIDIA L40S"), memory_status="cudaErrorDevicesUnavailable").install(monkeypatch)
    report = examined(machine(tmp_path), with_attention=False)
    assert [(gpu.index, gpu.name, gpu.free_bytes) for gpu in report.nvidia.gpus] == [
        (0, "NVIDIA L4", None),
        (1, "NVIDIA L40S", None),
    ]


def test_the_driver_s_version_is_nvml_s_where_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, l40s: None
) -> None:
    nvml = ModuleType("cuda.bindings.nvml")
    vars(nvml).update(init_v2=lambda: None, shutdown=lambda: None, system_get_driver_version=lambda: "590.10")
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", nvml)
    assert examined(machine(tmp_path, driver=KERNEL_DRIVER), with_attention=False).nvidia.driver == "590.10"


def test_an_old_driver_is_named_with_the_one_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(driver_cuda=12040, count_status="cudaErrorInsufficientDriver").install(monkeypatch)
    install_library(monkeypatch, "tensorrt", "11.4.0.106")
    report = examined(machine(tmp_path, driver=OLD_KERNEL_DRIVER, has_device=True))
    assert report.nvidia.state == "old driver"
    assert target_of(report, "tensorrt").verdicts == ("no", "no")
    assert to_do(report, "tensorrt") == (
        "tensorrt: update NVIDIA's driver to 580 or newer: 550.54.15 serves CUDA 12.4, cuda-python needs 13"
    )
    assert "fused attention with TensorRT: it builds for the GPU of this machine only" in report.unknown


@pytest.mark.parametrize(
    ("files", "cuda", "state", "remedy"),
    [
        ({}, Cuda(0, "cudaErrorInsufficientDriver"), "absent", "take a machine with an NVIDIA GPU"),
        ({"has_device": True}, Cuda(0, "cudaErrorInsufficientDriver"), "no driver", "install NVIDIA's driver"),
        ({"driver": KERNEL_DRIVER}, Cuda(0, "cudaErrorInsufficientDriver"), "hidden", "docker run --gpus all"),
        ({"driver": KERNEL_DRIVER}, Cuda(13000, "cudaErrorNoDevice"), "hidden", "CUDA_VISIBLE_DEVICES"),
        ({"driver": KERNEL_DRIVER}, Cuda(13000, "cudaErrorInitializationError"), "failed", "nvidia-smi"),
    ],
    ids=["no GPU", "no driver", "container without it", "made invisible", "broken"],
)
def test_a_gpu_that_cannot_be_used_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cuda: Cuda, state: str, remedy: str
) -> None:
    cuda.install(monkeypatch)
    install_library(monkeypatch, "tensorrt", "11.4.0.106")
    report = examined(machine(tmp_path, **files), with_attention=False, target="tensorrt")  # type: ignore[arg-type]
    assert report.nvidia.state == state
    assert remedy in to_do(report, "tensorrt")


def test_without_cuda_python_a_gpu_is_found_and_the_package_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    report = examined(machine(tmp_path, driver=KERNEL_DRIVER, has_device=True), with_attention=False)
    assert (report.nvidia.state, report.nvidia.driver) == ("no cuda-python", "580.95.05")
    assert "pip install 'bei[tensorrt]'" in to_do(report, "tensorrt")


def test_what_cuda_raises_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cuda.bindings.runtime")

    def broken() -> None:
        raise RuntimeError("Failed to dlopen\nlibcuda.so.1")

    vars(module).update(cudaDriverGetVersion=broken, cudaGetDeviceCount=broken)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", module)
    report = examined(machine(tmp_path), with_attention=False)
    assert report.nvidia.state == "absent"
    assert "CUDA does not work on this machine: Failed to dlopen libcuda.so.1." in report.nvidia.problem
    assert any("Failed to dlopen libcuda.so.1" in sentence for sentence in report.unknown)


# TensorRT


def test_a_gpu_without_tensorrt_is_told_what_to_install(tmp_path: Path, l40s: None) -> None:
    report = examined(machine(tmp_path, driver=KERNEL_DRIVER))
    assert target_of(report, "tensorrt").verdicts == ("no", "no")
    assert to_do(report, "tensorrt") == "tensorrt: pip install 'bei[tensorrt]'"
    assert "fused attention with TensorRT: not installed" in report.unknown
    assert report.attention == []


def test_without_a_gpu_installing_tensorrt_is_not_enough_to_build(tmp_path: Path) -> None:
    step = "tensorrt: take a machine with an NVIDIA GPU, then pip install 'bei[tensorrt]'"
    assert to_do(examined(machine(tmp_path), target="tensorrt"), "tensorrt") == step


@pytest.mark.parametrize("version", ["10.9.0.34", "11.0.0.1", "12.0.1.2"])
def test_a_tensorrt_of_another_version_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, l40s: None, version: str
) -> None:
    install_library(monkeypatch, "tensorrt", version)
    report = examined(machine(tmp_path, driver=KERNEL_DRIVER), with_attention=False)
    assert f"TensorRT {version} is installed, bei needs >=11.1,<12" in target_of(report, "tensorrt").can_build.reason
    assert to_do(report, "tensorrt") == "tensorrt: pip install 'bei[tensorrt]'"


def test_tensorrt_rtx_builds_without_a_gpu_and_says_that_it_does_not_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_library(monkeypatch, "tensorrt_rtx", "1.7.1.116")
    builder = StandInBuilder()
    report = examined(machine(tmp_path), builder, head_sizes=(64, 128), target="tensorrt-rtx")
    assert (
        "This machine can build for tensorrt-rtx (bf16), and cannot serve it: this machine has no NVIDIA GPU."
        in report.summary
    )
    assert target_of(report, "tensorrt-rtx").verdicts == ("yes", "no")
    assert {capability for _, capability, *_ in builder.asked} == {89, 120}


def test_tensorrt_rtx_is_asked_about_the_gpu_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, l40s: None
) -> None:
    install_library(monkeypatch, "tensorrt_rtx", "1.7.1.116")
    builder = StandInBuilder()
    report = examined(machine(tmp_path), builder)
    assert target_of(report, "tensorrt-rtx").verdicts == ("yes", "yes")
    assert {capability for _, capability, *_ in builder.asked} == {89}
    builder.asked.clear()
    examined(machine(tmp_path), builder, capabilities=("75", "86"))
    assert {capability for _, capability, *_ in builder.asked} == {75, 86}


def test_tensorrt_rtx_does_not_serve_on_gpus_that_it_makes_no_plans_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_library(monkeypatch, "tensorrt_rtx", "1.7.1.116")
    Cuda(names=(b"NVIDIA H200",), capability=(9, 0)).install(monkeypatch)
    report = examined(machine(tmp_path, driver=KERNEL_DRIVER), with_attention=False)
    target = target_of(report, "tensorrt-rtx")
    assert target.can_serve.verdict == "no"
    assert "has no plans for NVIDIA H200 (SM90)" in target.can_serve.reason
    assert "--target tensorrt" in target.can_serve.reason


# The builder


def test_without_the_builder_nothing_is_built_and_serving_is_still_looked_at(tmp_path: Path) -> None:
    report = examined(machine(tmp_path), MissingDependencyError("onnx", "cpu", "Building an artifact"))
    target = target_of(report, "cpu")
    assert target.verdicts == ("no", "yes")
    assert "needs the Python package 'onnx'" in target.can_build.reason
    assert to_do(report, "cpu") == "cpu: pip install 'bei[cpu]'"
    assert report.summary[0].startswith("This machine can serve for cpu (bf16, AMX) what was built elsewhere")
    assert any(sentence.startswith("fused attention: ") for sentence in report.unknown)


def test_a_package_that_builds_need_and_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.cli.doctor.targets.lacking_for_builds", lambda: ["transformers>=5.0"])
    target = target_of(examined(machine(tmp_path)), "cpu")
    assert target.can_build.verdict == "no"
    assert "'transformers>=5.0': pip install 'bei[cpu]'" in target.can_build.reason


def test_a_compiler_that_raises_what_it_should_not_is_unknown(tmp_path: Path) -> None:
    def broken() -> None:
        raise ZeroDivisionError("of a library")

    target = target_of(examined(machine(tmp_path), StandInBuilder(cpu_check=broken)), "cpu")
    assert (target.can_build.verdict, target.can_build.reason) == ("unknown", "ZeroDivisionError: of a library")


def test_a_target_that_the_compiler_refuses_has_the_compiler_s_reason(tmp_path: Path) -> None:
    def refused() -> None:
        raise ConfigError("not here")

    report = examined(machine(tmp_path), StandInBuilder(cpu_check=refused), target="cpu")
    assert (report.targets[0].can_build.verdict, report.targets[0].can_build.reason) == ("no", "not here")


def test_what_this_version_has_not_is_said_plainly_and_nothing_is_to_be_installed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(targets.ENGINES, "cuda")
    target = target_of(examined(machine(tmp_path)), "cuda")
    assert target.verdicts == ("no", "no")
    assert target.can_build.reason == "this version of bei has no target cuda yet"
    assert target.next_step == ""


# CPUs


def test_a_cpu_without_avx_512_computes_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei.cli.doctor.facts.cpu_capabilities", lambda: ["FP32", "INT8"])
    report = examined(machine(tmp_path, cpuinfo=OLD_XEON), StandInBuilder(best_on_cpu="fp32"))
    assert report.summary[0] == "This machine can build and serve for cpu (fp32, AVX2)."
    assert target_of(report, "cpu").precisions == ["fp32", "int8"]
    sets = report.cpu.instruction_sets
    assert sets is not None
    assert [name for name, is_there in sets.items() if is_there] == ["AVX2"]


def test_an_arm_cpu_is_named_by_its_numbers(tmp_path: Path) -> None:
    report = examined(machine(tmp_path, cpuinfo=GRAVITON))
    assert report.cpu.model == "Arm Neoverse V1"
    assert report.cpu.instruction_sets == {
        "NEON": True,
        "FP16": True,
        "I8MM": True,
        "BF16": True,
        "SVE": True,
        "SVE2": False,
    }
    assert report.summary[0] == "This machine can build and serve for cpu (bf16, BF16)."


def test_a_container_s_memory_limit_counts_where_it_is_the_lower(tmp_path: Path) -> None:
    assert examined(machine(tmp_path / "a", limit="2147483648\n")).cpu.container_limit_bytes == 2**31
    assert examined(machine(tmp_path / "b", limit="9223372036854771712\n")).cpu.container_limit_bytes is None
    assert examined(machine(tmp_path / "c", limit="max\n")).cpu.container_limit_bytes is None


def test_a_system_without_proc_has_gaps_with_reasons(tmp_path: Path) -> None:
    report = examined(tmp_path)
    assert (report.cpu.model, report.cpu.instruction_sets, report.cpu.memory_bytes) == (None, None, None)
    assert any(sentence.startswith("CPU model and instruction sets: FileNotFoundError") for sentence in report.unknown)
    assert any(sentence.startswith("memory: FileNotFoundError") for sentence in report.unknown)


def test_a_cache_folder_that_cannot_be_written_is_something_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEI_CACHE_DIR", str(tmp_path / "cache" / "bei"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    report = examined(machine(tmp_path))
    assert report.system.cache_writable is False
    assert f"cache: {tmp_path / 'cache' / 'bei'} cannot be written; set BEI_CACHE_DIR" in report.to_do


def test_the_hub_is_never_asked_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("bei doctor opened a connection")

    monkeypatch.setattr("socket.socket.connect", connect)
    assert any("whether the hub can be reached" in sentence for sentence in examined(machine(tmp_path)).unknown)
