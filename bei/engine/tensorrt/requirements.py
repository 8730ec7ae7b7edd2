"""Checks before a plan is loaded: the GPU it was compiled for, the driver, and the library's version.

TensorRT would refuse it too, but later and without naming a remedy.
"""

from __future__ import annotations

import logging
from typing import Any

from bei.artifact.manifest import Manifest
from bei.engine.nvidia import LIBRARIES, RTX_CAPABILITIES, Gpu, current_gpu, where_it_runs
from bei.errors import ArtifactWrongDeviceError, ArtifactWrongVersionError, DeviceNotFoundError

log = logging.getLogger(__name__)

# A hardware-compatible plan runs on every architecture from Ampere on.
_LEAST_COMPATIBLE = 80


def found_gpu(manifest: Manifest, cuda: Any) -> Gpu:
    """The GPU that CUDA's module uses, if it suits ``manifest``'s plan.

    Raises DeviceNotFoundError: no GPU, or its driver is too old; ArtifactWrongDeviceError.
    """
    purpose = f"Serving {manifest.name} (target {manifest.target})"
    _check_driver(purpose, cuda)
    try:
        gpu = current_gpu(cuda)
    except DeviceNotFoundError as error:
        raise DeviceNotFoundError(f"{purpose} needs an NVIDIA GPU. {error} {where_it_runs(manifest)}") from error
    _check_capability(manifest, gpu)
    return gpu


def _check_driver(purpose: str, cuda: Any) -> None:
    """A driver supports CUDA versions up to its own, and later ones of the same major version."""
    status, runtime = cuda.cudaRuntimeGetVersion()
    other, driver = cuda.cudaDriverGetVersion()
    if status.value or other.value or not driver:  # no driver at all: the query for the GPU reports it
        return
    if driver // 1000 < runtime // 1000:
        raise DeviceNotFoundError(
            f"{purpose} needs a driver for CUDA {_version(runtime // 1000 * 1000)}, this machine's is for CUDA "
            f"{_version(driver)}: install a newer driver of NVIDIA."
        )


def _version(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _check_capability(manifest: Manifest, gpu: Gpu) -> None:
    needs = manifest.engine
    is_compatible = needs.plan is not None and needs.plan.hardware_compatible and gpu.capability >= _LEAST_COMPATIBLE
    if gpu.architecture not in needs.capabilities and not is_compatible:
        raise ArtifactWrongDeviceError(
            f"The artifact of {manifest.name} was compiled for {', '.join(needs.capabilities)}; this machine's GPU is "
            f"{gpu.name} ({gpu.architecture}){_remedy(manifest.target, gpu)}."
        )
    if manifest.target == "tensorrt" and gpu.name != needs.device and not is_compatible:
        log.warning(
            "%s was compiled on %s and runs on %s: it may be slower than one that is built here",
            manifest.name,
            needs.device,
            gpu.name,
        )


def _remedy(target: str, gpu: Gpu) -> str:
    """How to get an artifact for ``gpu``; the end of a sentence."""
    if target == "tensorrt":
        return ". Build it again on this machine, or with --hardware-compatible for every GPU from Ampere on"
    if gpu.capability in RTX_CAPABILITIES:
        return f". Build it again with --compute-capability {gpu.capability}"
    return ", on which TensorRT-RTX does not run. Build it again on this machine with --target tensorrt"


def check_version(manifest: Manifest, trt: Any) -> None:
    """Raise ArtifactWrongVersionError unless this version made the plan."""
    made_by, title = manifest.engine.compiler_version, LIBRARIES[manifest.target].title
    if trt.__version__ != made_by:
        raise ArtifactWrongVersionError(
            f"The artifact of {manifest.name} was compiled by {title} {made_by}, {trt.__version__} is installed: "
            f"build it again, or install {title} {made_by}."
        )
