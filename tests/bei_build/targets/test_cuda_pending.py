"""Packages for GPUs that are elsewhere, from build to served: without a GPU each command says in a line what to do, and
on the GPU the certificate is completed.

The packed module on this CPU is in the package's place, and reads the weights that the build has stored. PyTorch's GPU
is that of ``tests.bei.engine.cuda.torch_standin``. The engine and its calls of PyTorch are those of every server.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bei.artifact import store
from bei.artifact.manifest import CUDA_WEIGHTS, REFERENCE_DIR, Artifact, cuda_package
from bei.cli.main import main
from bei.config.settings import ServeConfig
from bei.engine.cuda import engine as cuda_engine
from bei.engine.pytorch import TorchGpu
from bei.errors import DeviceNotFoundError, VerificationError
from bei.metrics.registry import Metrics
from bei.scheduler.device_gate import DeviceGate
from bei.service.loader import load_service
from bei_build.targets import cuda
from bei_build.targets.cuda_choices import choices_of
from bei_build.targets.cuda_elsewhere import Compiled, Wanted
from bei_build.torch_graph.model import PackedModel
from bei_build.torch_graph.parameters import TensorOptions, join_linear_layers
from tests.bei.engine.cuda.torch_standin import StandIn
from tests.support.builds import build_artifact
from tests.support.checkpoints import save_checkpoint

NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver."


class Module:
    """The module of a package, without weights until it is given them."""

    def __init__(self, wanted: Wanted) -> None:
        options = TensorOptions(torch.device("cpu"), getattr(torch, wanted.dtype))
        self.model = PackedModel(wanted.spec, wanted.max_seq_len, options, quantization=wanted.quantization)
        join_linear_layers(self.model)
        self.inputs: Sequence[str] = self.model.input_names
        self.tensors: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self.names: Sequence[str] = [*self.tensors]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(weights[name])

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode():
            return list(self.model(dict(zip(self.inputs, inputs, strict=True))).values())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Wanted]:
    """An artifact for compute capability 9.0, built where there is no GPU, and its package."""
    packages: list[Wanted] = []

    def compile_apart(wanted: Wanted) -> Compiled:
        packages.append(wanted)
        wanted.path.write_text("compiled code")
        module = Module(wanted)
        weights = {name: (tuple(it.shape), str(it.dtype)) for name, it in module.tensors.items()}
        return Compiled(choices_of(module.model), weights)

    folder = tmp_path_factory.mktemp("elsewhere")
    checkpoint = save_checkpoint(folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(cuda, "found_gpu", no_gpu)
        patch.setattr(cuda.CudaCompiler, "check_able", lambda self: None)
        patch.setattr(cuda, "driver_stub", lambda torch, purpose: nullcontext())
        patch.setattr(cuda, "compile_apart", compile_apart)
        settings: Any = {"precision": "bf16", "max_num_tokens": 256, "max_batch_size": 8, "compute_capability": ("90",)}
        artifact = build_artifact(checkpoint, folder / "artifact", target="cuda", **settings)
    (wanted,) = packages
    return artifact, wanted


def no_gpu(torch: Any, purpose: str) -> TorchGpu:
    raise DeviceNotFoundError(f"{purpose} needs an NVIDIA GPU and its driver.")


@pytest.fixture
def pending(built: tuple[Artifact, Wanted], tmp_path: Path) -> Artifact:
    """A copy of the artifact."""
    return store.load(Path(shutil.copytree(built[0].path, tmp_path / "artifact")))


@pytest.fixture
def gpu(built: tuple[Artifact, Wanted], monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A machine with an H200 and the PyTorch of the build."""
    stand = StandIn(lambda path: Module(built[1]), torch.__version__)
    monkeypatch.setattr(cuda_engine, "load_torch", lambda purpose: stand.torch)
    return stand


@pytest.fixture
def no_driver(gpu: StandIn) -> None:
    """The same PyTorch on a machine without a GPU."""

    def init() -> None:
        raise RuntimeError(NO_DRIVER)

    gpu.torch.cuda.init = init


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The one line with which a command ends."""
    with pytest.raises(SystemExit) as stop:
        main([*command])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1, shown
    return shown


def test_the_build_keeps_what_to_compare_with(pending: Artifact) -> None:
    assert (pending.certificate.kind, pending.certificate.passed) == ("pending", False)
    assert pending.manifest.engine.capabilities == ["SM90"]
    names = {info.path for info in pending.manifest.files}
    assert names >= {f"engine/{cuda_package('SM90')}", f"engine/{CUDA_WEIGHTS}", f"{REFERENCE_DIR}/answers.npz"}


def test_inspect_needs_no_gpu(pending: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(pending.path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "any GPU of compute capability 9.0" in shown
    assert "PENDING: the engine could not run where it was built; 'bei verify'" in shown


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("command", [("verify",), ("serve", "--port", "0")], ids=str)
def test_without_a_gpu_a_line_says_where_it_runs(
    command: tuple[str, ...], pending: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, command[0], str(pending.path), *command[1:])
    assert "needs an NVIDIA GPU and its driver" in said
    assert NO_DRIVER in said
    where = "It was compiled for any GPU of compute capability 9.0: verify and serve it on a machine with one"
    assert where in said
    assert store.load(pending.path) == pending


def test_verify_completes_the_certificate_on_the_gpu(
    pending: Artifact, gpu: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["verify", str(pending.path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "passed on " in shown
    assert "verified on NVIDIA H200 (SM90)" in shown
    completed = store.load(pending.path).certificate
    assert (completed.kind, completed.passed, completed.device) == ("reference", True, "NVIDIA H200 (SM90)")
    assert completed.canary_row == pytest.approx(pending.certificate.canary_row, abs=0.05)
    assert "launch" in {call[0] for call in gpu.log}


@pytest.mark.usefixtures("gpu")
def test_the_first_server_on_the_gpu_completes_it(pending: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert served(pending) == ("reference", True)
    assert "verifying its engine on NVIDIA H200 (SM90), which the build could not do" in caplog.text
    assert store.load(pending.path).certificate.passed


def test_a_gpu_that_computes_something_else_is_not_served(
    pending: Artifact, gpu: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = Module.__call__
    monkeypatch.setattr(Module, "__call__", lambda self, inputs: [rows.roll(1, 1) for rows in compute(self, inputs)])
    said = refused(capsys, "verify", str(pending.path))
    assert "differs from its reference (transformers, FP32" in said
    assert "on NVIDIA H200 (SM90)" in said
    with pytest.raises(VerificationError, match="differs from its reference"):
        served(pending)


@pytest.mark.usefixtures("gpu")
def test_weights_of_another_file_are_refused_before_they_are_loaded(
    pending: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pending.engine_dir / CUDA_WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert f"engine/{CUDA_WEIGHTS}" in refused(capsys, "verify", str(pending.path))


def served(artifact: Artifact) -> tuple[str, bool]:
    """The kind of a server's certificate, once it is ready, and whether the engine has passed."""

    async def start() -> tuple[str, bool]:
        config = ServeConfig(tokenizer_threads=1, tune="off")
        service = load_service(artifact.path, config, Metrics(), DeviceGate())
        try:
            await service.check_ready()
            return service.certificate.kind, service.certificate.passed
        finally:
            service.close()

    return asyncio.run(start())
