"""Target cuda for GPUs of other machines: refusals and their reasons, and a build up to the link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bei.engine.pytorch import TorchGpu
from bei.errors import CompileError, ConfigError, DeviceNotFoundError, LibraryVersionError
from bei_build.config import BuildConfig
from bei_build.targets import cuda, cuda_elsewhere
from bei_build.targets.choose import compiler_for
from bei_build.targets.cuda_choices import Choices
from bei_build.targets.cuda_elsewhere import Compiled, Wanted, compile_apart
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, tiny_spec
from tests.support.fake_gpu import reason_to_skip

ROOT = Path(__file__).parent.parent.parent.parent


def compiler(*capabilities: str, precision: str = "auto", target: str = "cuda") -> Any:
    return compiler_for(BuildConfig(model="m", target=target, precision=precision, compute_capability=capabilities))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for CUDA, on a machine without a GPU."""

    def found_gpu(torch: Any, purpose: str) -> TorchGpu:
        raise DeviceNotFoundError(f"{purpose} needs an NVIDIA GPU and its driver.")

    monkeypatch.setattr(cuda, "found_gpu", found_gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


# Refusals and their reasons.


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_pytorch_without_cuda_is_refused() -> None:
    with pytest.raises(LibraryVersionError, match=r"needs PyTorch with CUDA; .*was built without"):
        compiler("90").check_able()


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_packages_are_not_compiled_for_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"compute_capability '75': packages .* compiled for 80, 86, 89, 90, 100, 120"
    ):
        compiler("90", "75").check_able()
    with pytest.raises(ConfigError, match=r"compute capability 8\.0 do not compute in fp8: leave 80 out"):
        compiler("80", "90", precision="fp8").check_able()
    with pytest.raises(
        ConfigError, match="compute_capability is a setting of target tensorrt-rtx or cuda, not of cuda-"
    ):
        compiler("90", target="cuda-twin")


@pytest.mark.usefixtures("no_gpu")
def test_a_pytorch_whose_functions_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.1+cu130")
    message = r"replaces functions of PyTorch 2\.11 and 2\.13, and 2\.15\.1\+cu130 is installed: .*or build on the GPU"
    with pytest.raises(LibraryVersionError, match=message):
        compiler("90").check_able()
    monkeypatch.setattr(cuda, "found_gpu", lambda torch, purpose: TorchGpu("NVIDIA H200", 90))
    monkeypatch.setattr(cuda, "check_cuda_toolkit", lambda torch, purpose: None)
    compiler("90").check_able()  # this machine's own


@pytest.mark.usefixtures("no_gpu")
def test_where_packages_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    both = compiler("89", "90", "89")
    assert both.machine()[1:] == ["any GPU of compute capability 8.9 or 9.0", "SM89", "SM90"]
    assert both.cannot_run() == "this machine has no NVIDIA GPU that PyTorch can use"
    monkeypatch.setattr(cuda, "found_gpu", lambda torch, purpose: TorchGpu("NVIDIA H200", 90))
    assert compiler("89", "90").cannot_run() is None
    assert compiler("90").cannot_run() is None
    reason = "this machine's NVIDIA H200 is SM90, and the packages are for SM89, SM120"
    assert compiler("89", "120").cannot_run() == reason


# Compiled in a process of its own.


def wanted_in(folder: Path) -> Wanted:
    return Wanted(tiny_spec(), MAX_SEQ_LEN, "bfloat16", None, {}, 90, folder / "model-sm90.pt2")


def ended(wanted: Wanted) -> Compiled:
    os._exit(1)


def failed(wanted: Wanted) -> Compiled:
    raise CompileError("PyTorch could not compile the model: a reason")


@pytest.mark.slow
def test_a_compiler_that_ends_its_process_is_a_failed_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_elsewhere, "compiled", ended)
    with pytest.raises(CompileError, match=r"compiled for compute capability 9\.0 has died: memory was short"):
        compile_apart(wanted_in(tmp_path))
    monkeypatch.setattr(cuda_elsewhere, "compiled", failed)
    with pytest.raises(CompileError, match="a reason"):
        compile_apart(wanted_in(tmp_path))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3), "torch.float32"), ((3, 2), "torch.bfloat16")], ids=["shape", "type"]
)
def test_a_weight_that_is_not_as_the_package_reads_it_fails_the_build(
    shape: tuple[int, ...], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 3, bias=False)
    compiled = Compiled(Choices(("input_ids",), ("flash",), ()), {"weight": (shape, dtype)})
    monkeypatch.setattr(cuda, "compile_apart", lambda wanted: compiled)
    with pytest.raises(CompileError, match=r"reads weight as .*, which is not so"):
        cuda._compiled_apart(model, [wanted_in(tmp_path)], tmp_path, lambda _: None)


@pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))
@pytest.mark.parametrize("precision", ["fp8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_build_comes_to_the_link_and_writes_the_weights_that_its_package_reads(precision: str) -> None:
    command = [sys.executable, "-m", "tests.bei_build.targets.elsewhere", precision]
    path = os.pathsep.join([str(ROOT), str(ROOT / "build")])
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    assert result.returncode == 0, result.stderr[-4000:]
    facts = json.loads(result.stdout)
    assert facts["package"] == "model-sm90.pt2"
    assert facts["needs"]["capabilities"] == ["SM90"]
    about = facts["needs"]["package"]
    assert (about["kernels"], about["weights"]) == (["flash", "flash"], "beside")
    assert any("compiled without a GPU" in why for why in about["fallbacks"])
    assert set(facts["read"]) == set(facts["stored"])  # the two numbers of the classifier's bias too
    assert "classifier.bias" in facts["read"]
    assert sum(name.endswith("rotation.cos") for name in facts["read"]) == 1
    assert all(facts["stored"].values())


@pytest.mark.slow
@pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))
def test_models_of_every_family_have_the_same_weights_on_a_cpu_as_their_packages_read() -> None:
    command = [sys.executable, "-m", "tests.bei_build.targets.elsewhere_weights"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "build")])
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    assert result.returncode == 0, result.stderr[-4000:]
    faults = {case: fault for case, fault in json.loads(result.stdout).items() if fault}
    assert faults == {}
