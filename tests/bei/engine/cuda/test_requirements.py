"""Checks before a package is loaded: PyTorch, its CUDA, the GPU or the CPU it was compiled on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from bei.engine.cuda.requirements import check
from bei.engine.load import load_engine
from bei.engine.pytorch import cpu_name, load_torch
from bei.errors import (
    ArtifactManifestError,
    ArtifactWrongDeviceError,
    ArtifactWrongVersionError,
    BeiError,
    DeviceNotFoundError,
    LibraryVersionError,
    MissingDependencyError,
)
from tests.bei.engine.cuda.simulated import manifest_in


def torch_of(
    version: str = "2.13.0", cuda: str | None = "13.0", capability: tuple[int, int] = (9, 0), error: str = ""
) -> Any:
    """A module with the attributes that the checks use."""

    def init() -> None:
        if error:
            raise RuntimeError(error)

    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        backends=SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX512")),
        cuda=SimpleNamespace(
            init=init, get_device_name=lambda index: "NVIDIA H200", get_device_capability=lambda index: capability
        ),
    )


def test_the_machine_that_compiled_it_runs_it(tmp_path: Path) -> None:
    manifest = manifest_in(tmp_path)
    assert check(manifest, torch_of(), "Serving") is manifest.engine.package


@pytest.mark.parametrize(
    ("torch", "error", "message"),
    [
        (torch_of("2.12.0"), ArtifactWrongVersionError, r"by PyTorch 2\.13\.0, 2\.12\.0 is installed: build it again"),
        (torch_of("2.13.0+cpu"), ArtifactWrongVersionError, r"by PyTorch 2\.13\.0, 2\.13\.0\+cpu is installed"),
        (torch_of(cuda="12.8"), ArtifactWrongVersionError, r"for CUDA 13\.0, this machine's PyTorch is for 12\.8"),
        (torch_of(cuda=None), ArtifactWrongVersionError, r"for CUDA 13\.0, this machine's PyTorch is for none"),
        (
            torch_of(error="Found no NVIDIA driver"),
            DeviceNotFoundError,
            r"Serving needs an NVIDIA GPU.*no NVIDIA driver",
        ),
        (torch_of(capability=(8, 9)), ArtifactWrongDeviceError, r"compiled for SM90; .* NVIDIA H200 \(SM89\)"),
    ],
    ids=["version", "build", "CUDA", "no CUDA", "no driver", "capability"],
)
def test_what_does_not_fit_is_refused_by_name(torch: Any, error: type[BeiError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        check(manifest_in(tmp_path), torch, "Serving")


def twin_in(folder: Path, device: str) -> Any:
    manifest = manifest_in(folder, target="cuda-twin")
    about = msgspec.structs.replace(manifest.engine.package, cuda=None)  # type: ignore[type-var]
    needs = msgspec.structs.replace(manifest.engine, device=device, capabilities=["AVX512"], package=about)
    return msgspec.structs.replace(manifest, engine=needs)


def test_a_twin_runs_on_the_cpu_that_compiled_it_and_on_no_other(tmp_path: Path) -> None:
    check(twin_in(tmp_path / "here", cpu_name()), torch_of(cuda=None), "Serving")
    with pytest.raises(ArtifactWrongDeviceError, match=r"for Another CPU with AVX512; this machine has .* with AVX512"):
        check(twin_in(tmp_path / "elsewhere", "Another CPU"), torch_of(cuda=None), "Serving")


def test_a_manifest_that_describes_no_package_is_refused(tmp_path: Path) -> None:
    manifest = manifest_in(tmp_path)
    needs = msgspec.structs.replace(manifest.engine, package=None)
    with pytest.raises(ArtifactManifestError, match="does not describe its package"):
        check(msgspec.structs.replace(manifest, engine=needs), torch_of(), "Serving")


def test_a_package_that_holds_its_weights_is_of_an_earlier_version(tmp_path: Path) -> None:
    manifest = manifest_in(tmp_path)
    about = msgspec.structs.replace(manifest.engine.package, weights=msgspec.UNSET)  # type: ignore[type-var]
    needs = msgspec.structs.replace(manifest.engine, package=about)
    with pytest.raises(ArtifactWrongVersionError, match=r"has its weights in its package, as earlier .*build it again"):
        check(msgspec.structs.replace(manifest, engine=needs), torch_of(), "Serving")


def test_without_pytorch_the_extra_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [_NoTorch(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(MissingDependencyError, match=r"Serving tiny \(target cuda\) needs .*'torch'.*'bei\[cuda\]'"):
        load_engine(tmp_path / "artifact" / "engine", manifest_in(tmp_path))


class _NoTorch:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


def test_a_pytorch_that_is_too_old_or_broken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("torch")
    old.__version__ = "2.10.0+cu128"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", old)
    with pytest.raises(LibraryVersionError, match=r"2\.10\.0\+cu128 is installed, serving needs 2\.11 or newer"):
        load_torch("Serving")
    old.__version__ = "2.11.0a0+git1234.nv26.1"  # type: ignore[attr-defined]
    assert load_torch("Serving") is old


def test_a_pytorch_without_cuda_is_told_from_a_machine_without_a_gpu(tmp_path: Path) -> None:
    """The artifact's own build of PyTorch, hypothetically."""
    manifest = manifest_in(tmp_path)
    about = msgspec.structs.replace(manifest.engine.package, cuda=None)  # type: ignore[type-var]
    needs = msgspec.structs.replace(manifest.engine, package=about)
    with pytest.raises(LibraryVersionError, match=r"needs PyTorch with CUDA; 2\.13\.0, which is installed"):
        check(msgspec.structs.replace(manifest, engine=needs), torch_of(cuda=None), "Serving")
