"""PyTorch and its GPU, for the compiler and engine of target ``cuda`` and for ``bei doctor``.

Importing this module does not import PyTorch; callers pass the module as an argument.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bei.errors import DeviceNotFoundError, LibraryVersionError
from bei.utils import libraries

EXTRA = "cuda"

# The oldest version with the interfaces that compiler, packages and engine use (docs/decisions.md).
LEAST = (2, 11)


@dataclass(frozen=True)
class TorchGpu:
    """PyTorch's device 0 (``CUDA_VISIBLE_DEVICES`` selects it). ``capability``: 90 for compute capability 9.0."""

    name: str
    capability: int

    @property
    def architecture(self) -> str:
        """``SM90``."""
        return f"SM{self.capability}"


def load_torch(purpose: str) -> Any:
    """The torch module. Raises MissingDependencyError and BrokenDependencyError with ``purpose``,
    LibraryVersionError."""
    torch: Any = libraries.load("torch", "torch", EXTRA, purpose)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < LEAST:
        least = ".".join(map(str, LEAST))
        raise LibraryVersionError(
            f"PyTorch {torch.__version__} is installed, {purpose[0].lower()}{purpose[1:]} needs {least} or newer: "
            f"pip install 'bei[{EXTRA}]'."
        )
    return torch


def check_built_with_cuda(torch: Any, purpose: str) -> None:
    """Raise LibraryVersionError if ``torch`` was built without CUDA."""
    if torch.version.cuda is None:
        raise LibraryVersionError(
            f"{purpose} needs PyTorch with CUDA; {torch.__version__}, which is installed, was built without: take a "
            "build of PyTorch's own index whose name has cu in it, with pip install --index-url."
        )


def found_gpu(torch: Any, purpose: str) -> TorchGpu:
    """The GPU that ``torch`` uses. Raises LibraryVersionError if it was built without CUDA, DeviceNotFoundError."""
    check_built_with_cuda(torch, purpose)
    try:
        torch.cuda.init()
        name, (major, minor) = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    except (RuntimeError, AssertionError) as error:  # no driver, an old driver, no device
        raise DeviceNotFoundError(
            f"{purpose} needs an NVIDIA GPU and its driver. PyTorch says: {' '.join(str(error).split()).rstrip('.')}."
        ) from error
    return TorchGpu(name, 10 * major + minor)


def cpu_name() -> str:
    """The CPU's model name; its architecture if Linux does not know the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()
