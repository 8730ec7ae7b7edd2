"""Targets cuda and cuda-twin: refusals and their reasons, the meaning of ``auto``, and parity through compiler and
engine.

PyTorch compiles a dozen seconds per model. In the first tier the module itself replaces its package; the second
compiles packages, here and in tests/e2e/test_cuda_twin.py.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import cpp_extension

from bei.artifact.manifest import CUDA_WEIGHTS, Artifact, cuda_package
from bei.core import Encoding, PackedBatch, rows_of_sequences
from bei.engine.cuda.device import TwinDevice
from bei.engine.load import load_engine
from bei.engine.pytorch import TorchGpu, cpu_name
from bei.errors import (
    BeiError,
    BrokenDependencyError,
    CompileError,
    ConfigError,
    DeviceNotFoundError,
    LibraryVersionError,
    MissingDependencyError,
)
from bei_build.config import BuildConfig
from bei_build.job import fp32_compiler
from bei_build.targets import choose as targets
from bei_build.targets import cuda
from bei_build.targets.base import Numerics
from bei_build.targets.choose import compiler_for, with_target
from bei_build.targets.openvino import OpenVINOCompiler
from bei_build.torch_graph import package
from tests.bei_build.families import nomic
from tests.bei_build.test_parity_matrix import BY_NAME, TOLERANCE, save
from tests.model_matrix import difference, least_cosine, pooled
from tests.support.builds import build_artifact, random_encodings
from tests.support.checkpoints import add_modules
from tests.support.zoo import FIRST_OF_FAMILY, Case

# One of each: tokens' outputs, a decoder, soft caps and windows, relative biases, scores of a vocabulary, positions
# counted over what is not padding.
STRUCTURES = (
    "BertForTokenClassification",
    "BartForSequenceClassification",
    "Gemma2Model",
    "T5EncoderModel-gated",
    "ModernBertForMaskedLM",
    "MPNetModel",
)
NO_LAYER_HIGH = {"max_highprec_layers": 0}


def compiler(target: str = "cuda", precision: str = "auto") -> Any:
    return compiler_for(BuildConfig(model="m", target=target, precision=precision))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not here."""
    monkeypatch.setattr(cuda, "found_gpu", lambda torch, purpose: TorchGpu("NVIDIA H200", 90))


# Refusals and their reasons.


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_without_cuda_a_build_is_refused_before_anything_is_read() -> None:
    with pytest.raises(LibraryVersionError, match=r"Building for the target cuda needs PyTorch with CUDA; .*without"):
        compiler().check_able()


def test_without_a_gpu_other_targets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def found_gpu(torch: Any, purpose: str) -> TorchGpu:
        raise DeviceNotFoundError(f"{purpose} needs an NVIDIA GPU.")

    monkeypatch.setattr(cuda, "found_gpu", found_gpu)
    message = r"Say which GPUs the packages are for, and none is needed: --compute-capability 90; --target cpu needs"
    with pytest.raises(DeviceNotFoundError, match=message):
        compiler().check_able()


def test_a_gpu_that_is_too_old_for_its_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "found_gpu", lambda torch, purpose: TorchGpu("Tesla T4", 75))
    with pytest.raises(CompileError, match=r"Tesla T4 has compute capability 7\.5, .* need 8\.0: .*--target tensorrt"):
        compiler().check_able()


@pytest.mark.usefixtures("h200")
def test_what_compiling_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match=r"'triton': pip install 'bei\[cuda\]'"):
        compiler().check_able()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match=r"needs a C\+\+ compiler .*install g\+\+"):
        compiler("cuda-twin").check_able()


@pytest.mark.usefixtures("h200")
def test_without_a_cuda_toolkit_a_build_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(CompileError, match=r"Building for the target cuda needs a CUDA toolkit, and none is found"):
        compiler().check_able()


@pytest.mark.parametrize(("target", "best"), [("cuda", "bf16"), ("cuda-twin", "fp32")])
def test_precisions(target: str, best: str) -> None:
    assert compiler(target).resolve_precision("auto") == best
    assert [compiler(target).resolve_precision(one) for one in ("bf16", "fp16", "fp32")] == ["bf16", "fp16", "fp32"]
    assert compiler(target).resolve_precision("fp8") == "fp8"
    with pytest.raises(ConfigError, match=f"Target {target} has no precision 'int8'"):
        compiler(target).resolve_precision("int8")


def test_a_gpu_without_fp8_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "found_gpu", lambda torch, purpose: TorchGpu("NVIDIA A100", 80))
    with pytest.raises(CompileError, match=r"A100 has compute capability 8\.0, .* not compute in fp8: .* bf16"):
        compiler(precision="fp8").check_able()


def test_inputs_of_layers_are_shown_by_another_compiler(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="shows no inputs of linear layers"):
        compiler("cuda-twin").compile(None, None, Numerics("fp32", observed={"x": None}), None, tmp_path, print)  # type: ignore[dict-item]
    config = BuildConfig(model="m", target="cuda-twin")
    assert isinstance(fp32_compiler(config, compiler("cuda-twin")), cuda.CudaCompiler)
    assert isinstance(fp32_compiler(config, compiler("cuda-twin"), shows_layers=True), OpenVINOCompiler)


def test_what_pytorch_cannot_compile_is_one_line(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_package(program: Any, path: Path) -> None:
        raise AssertionError("an inner\nmatter " + "x" * 5000)

    monkeypatch.setattr(package, "write_package", write_package)
    with pytest.raises(CompileError, match=rf"PyTorch {torch.__version__.split('+')[0]}.* an inner matter x") as caught:
        build_artifact(bert, tmp_path / "artifact", load_engine, target="cuda-twin")
    assert len(str(caught.value)) < 1000
    assert list(tmp_path.iterdir()) == []


# The target that "auto" means.


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [((), "tensorrt"), (("tensorrt",), "cuda"), (("tensorrt", "cuda"), "cpu"), (("cuda",), "tensorrt")],
    ids=str,
)
def test_auto_is_the_best_target_that_this_machine_has(
    missing: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stand:
        def __init__(self, target: str) -> None:
            self._target = target

        def check_able(self) -> None:
            if self._target in missing:
                raise BeiError("not here")

    monkeypatch.setattr(targets, "compiler_for", lambda config: Stand(config.target))
    assert with_target(BuildConfig(model="m", target="auto", max_seq_len=7)).target == chosen
    assert with_target(BuildConfig(model="m", target="auto", max_seq_len=7)).max_seq_len == 7
    assert with_target(BuildConfig(model="m", target="tensorrt-rtx")).target == "tensorrt-rtx"


def test_auto_does_not_pass_over_a_library_that_is_installed_and_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stand:
        def check_able(self) -> None:
            raise BrokenDependencyError("tensorrt", "tensorrt", "Building", "libnvinfer.so.11: cannot open")

    monkeypatch.setattr(targets, "compiler_for", lambda config: Stand())
    with pytest.raises(BrokenDependencyError, match="libnvinfer"):
        with_target(BuildConfig(model="m", target="auto"))


def test_settings_of_one_target_do_not_go_with_auto() -> None:
    with pytest.raises(ConfigError, match="hardware_compatible is a setting of target tensorrt, not of auto"):
        BuildConfig(model="m", target="auto", hardware_compatible=True)


# Parity through compiler, artifact and engine.


class Uncompiled:
    """The module in place of its package."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def boxed_run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        tensors = dict(zip(self._model.input_names, inputs, strict=True))
        inputs.clear()
        with torch.inference_mode():
            return list(self._model(tensors).values())


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []

    def export_model(model: Any) -> Any:
        models.append(model)
        return model

    def write_package(model: Any, path: Path) -> None:
        path.write_text(str(models.index(model)))

    def loaded(self: TwinDevice, package: Path, weights: Path) -> Uncompiled:
        return Uncompiled(models[int(package.read_text())])

    monkeypatch.setattr(package, "export_model", export_model)
    monkeypatch.setattr(package, "weights_of", lambda model: model.state_dict())
    monkeypatch.setattr(package, "names_read", lambda path, index: models[int(path.read_text())].state_dict())
    monkeypatch.setattr(package, "write_package", write_package)
    monkeypatch.setattr(TwinDevice, "load", loaded)


def twin_of(folder: Path, out: Path, **settings: Any) -> Artifact:
    return build_artifact(folder, out, load_engine, target="cuda-twin", **settings)


def rows_of(artifact: Artifact, output: str, encodings: list[Encoding]) -> tuple[list[Any], list[Any]]:
    """The engine's rows for all ``encodings`` in one batch, and one by one."""
    with closing(load_engine(artifact.engine_dir, artifact.manifest)) as engine:
        per_token = output in engine.info.per_token

        def rows(some: list[Encoding]) -> list[Any]:
            batch = PackedBatch.from_encodings(some)
            return rows_of_sequences(engine.run(batch, {output})[output], batch, per_token=per_token)

        return rows(encodings), [rows([one])[0] for one in encodings]


def check_parity(case: Case, folder: Path) -> Artifact:
    saved = save(case, folder / "checkpoint")
    artifact = twin_of(saved.folder, folder / "artifact", verify=False)  # compared here
    expected = pooled(case, saved.rows, None)
    in_one_batch, alone = rows_of(artifact, case.output, saved.encodings)
    assert difference(in_one_batch, expected) <= TOLERANCE
    assert difference(alone, expected) <= TOLERANCE
    return artifact


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_engine_equals_the_hf_class_in_batches_and_alone(name: str, tmp_path: Path) -> None:
    artifact = check_parity(BY_NAME[name], tmp_path)
    needs = artifact.manifest.engine
    assert (needs.compiler, needs.compiler_version, needs.device) == ("aotinductor", torch.__version__, cpu_name())
    assert needs.package is not None
    assert set(needs.package.kernels) == {"plain"}
    assert needs.package.cuda is None
    assert needs.package.weight_bytes > 1000
    assert any("packed kernels need CUDA" in why for why in needs.package.fallbacks)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_in_16_bits_it_stays_close(precision: str, tmp_path: Path) -> None:
    case = BY_NAME["BertForTokenClassification"]
    saved = save(case, tmp_path / "checkpoint")
    artifact = twin_of(saved.folder, tmp_path / "artifact", precision=precision, verify=False)
    actual, _ = rows_of(artifact, case.output, saved.encodings)
    expected = pooled(case, saved.rows, None)
    assert least_cosine(case, actual, expected) >= 0.999
    assert difference(actual, expected) > 1e-5  # it is not FP32 under another name


@pytest.mark.usefixtures("uncompiled")
def test_in_fp8_the_layers_that_calibration_says_are_rounded(tmp_path: Path) -> None:
    case = BY_NAME["BertForTokenClassification"]
    saved = save(case, tmp_path / "checkpoint")
    settings = {"precision": "fp8", "allow_below_threshold": True}
    artifact = twin_of(saved.folder, tmp_path / "artifact", **settings, **NO_LAYER_HIGH)
    actual, _ = rows_of(artifact, case.output, saved.encodings)
    expected = pooled(case, saved.rows, None)
    assert least_cosine(case, actual, expected) >= 0.99
    assert difference(actual, expected) > 1e-3  # nor is it BF16 under another name
    assert artifact.certificate.quantization is not None
    assert artifact.certificate.quantization.format == "fp8"
    assert artifact.manifest.engine.package is not None
    assert any("FP8 products need CUDA" in why for why in artifact.manifest.engine.package.fallbacks)


def experts_in(folder: Path, precision: str) -> tuple[Artifact, Any, Any]:
    """NomicBERT with experts, which transformers does not have: the artifact, its vectors, and those of the original
    code."""
    checkpoint = nomic.save(folder / "nomic")
    add_modules(checkpoint, ("mean",), hidden=nomic.HIDDEN)
    settings = {"precision": precision, "allow_below_threshold": True}
    artifact = twin_of(checkpoint, folder / "artifact", **settings, **NO_LAYER_HIGH if precision == "fp8" else {})
    encodings = random_encodings([5, 33, 1, 64, 17], nomic.VOCABULARY)
    oracle = nomic.Oracle(checkpoint)
    vectors, _ = rows_of(artifact, "embedding", encodings)
    return artifact, np.stack(vectors), np.stack([oracle.states(text).mean(0).numpy() for text in encodings])


@pytest.mark.usefixtures("uncompiled")
def test_experts_in_fp8_are_calibrated_and_rounded(tmp_path: Path) -> None:
    artifact, actual, expected = experts_in(tmp_path, "fp8")
    cosines = (actual * expected).sum(1) / np.linalg.norm(actual, axis=1) / np.linalg.norm(expected, axis=1)
    assert 0.9 <= cosines.min() < 0.9999  # the router may choose another expert
    about = artifact.certificate.quantization
    assert about is not None
    assert {"layers.1.mlp.experts.7.up", "layers.1.mlp.experts.7.down"} <= {layer.layer for layer in about.layers}
    assert not any(layer.is_high for layer in about.layers)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_a_package_of_a_model_with_experts_equals_the_original_code(tmp_path: Path) -> None:
    _, actual, expected = experts_in(tmp_path, "fp32")
    np.testing.assert_allclose(actual, expected, atol=2e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
@pytest.mark.parametrize("case", FIRST_OF_FAMILY, ids=lambda case: case.name)
def test_a_package_of_each_family_equals_the_hf_class(case: Case, tmp_path: Path) -> None:
    artifact = check_parity(case, tmp_path)
    names = {info.path for info in artifact.manifest.files if info.path.startswith("engine/")}
    (capability,) = artifact.manifest.engine.capabilities
    assert names == {f"engine/{cuda_package(capability)}", f"engine/{CUDA_WEIGHTS}"}


@pytest.mark.gpu
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", STRUCTURES)
def test_on_a_gpu_packages_stay_close_recorded_or_not(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    saved = save(case, tmp_path / "checkpoint")
    artifact = build_artifact(saved.folder, tmp_path / "artifact", load_engine, target="cuda", precision="bf16")
    expected = pooled(case, saved.rows, None)
    with closing(load_engine(artifact.engine_dir, artifact.manifest)) as engine:
        for _ in range(2):  # as it is, then recorded
            batch = PackedBatch.from_encodings(saved.encodings)
            rows = engine.run(batch, {case.output})[case.output]
            actual = rows_of_sequences(rows, batch, per_token=case.output in engine.info.per_token)
            assert least_cosine(case, actual, expected) >= 0.999
            engine.warmup()
