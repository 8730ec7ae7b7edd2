"""Checks before a package is loaded: the versions of PyTorch and CUDA that compiled it, and the kind of GPU.

Unsuitable compiled code would fail later with unclear messages, or compute wrong results.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bei.artifact.manifest import Manifest, Package
from bei.engine.nvidia import where_it_runs
from bei.engine.pytorch import TorchGpu, cpu_name, found_gpu
from bei.errors import (
    ArtifactManifestError,
    ArtifactWrongDeviceError,
    ArtifactWrongVersionError,
    DeviceNotFoundError,
)


def check(manifest: Manifest, torch: Any, purpose: str) -> Package:
    """The package's manifest entry, if ``torch`` and this machine suit it.

    Raises ArtifactManifestError, ArtifactWrongVersionError, ArtifactWrongDeviceError, and the errors of ``found_gpu``.
    """
    about = manifest.engine.package
    if about is None:
        raise ArtifactManifestError(
            f"The manifest of {manifest.name} does not describe its package. Build the artifact again."
        )
    if about.weights is msgspec.UNSET:
        raise ArtifactWrongVersionError(
            f"The artifact of {manifest.name} has its weights in its package, as earlier versions of bei built it, and "
            "this one reads them from a file beside it: build it again."
        )
    _check_torch(manifest, about, torch)
    if manifest.target == "cuda-twin":
        _check_cpu(manifest, torch)
    else:
        try:
            gpu = found_gpu(torch, purpose)
        except DeviceNotFoundError as error:
            raise DeviceNotFoundError(f"{error} {where_it_runs(manifest)}") from error
        _check_gpu(manifest, gpu)
    return about


def _check_torch(manifest: Manifest, about: Package, torch: Any) -> None:
    """A package calls libraries of the PyTorch build that compiled it."""
    made_by = manifest.engine.compiler_version
    if torch.__version__ != made_by:
        raise ArtifactWrongVersionError(
            f"The artifact of {manifest.name} was compiled by PyTorch {made_by}, {torch.__version__} is installed: "
            f"build it again, or install PyTorch {made_by}."
        )
    if about.cuda is not None and torch.version.cuda != about.cuda:
        raise ArtifactWrongVersionError(
            f"The artifact of {manifest.name} was compiled for CUDA {about.cuda}, this machine's PyTorch is for "
            f"{torch.version.cuda or 'none'}: build it again, or install PyTorch {made_by} for CUDA {about.cuda}."
        )


def _check_gpu(manifest: Manifest, gpu: TorchGpu) -> None:
    if gpu.architecture not in manifest.engine.capabilities:
        raise ArtifactWrongDeviceError(
            f"The artifact of {manifest.name} was compiled for {', '.join(manifest.engine.capabilities)}; this "
            f"machine's GPU is {gpu.name} ({gpu.architecture}). Build it again on this machine."
        )


def _check_cpu(manifest: Manifest, torch: Any) -> None:
    """A CPU package runs only on the CPU model that compiled it."""
    here = cpu_name(), torch.backends.cpu.get_cpu_capability()
    made_on = manifest.engine.device, *manifest.engine.capabilities
    if here != made_on:
        raise ArtifactWrongDeviceError(
            f"The artifact of {manifest.name} was compiled for {' with '.join(made_on)}; this machine has "
            f"{' with '.join(here)}. Build it again on this machine."
        )
