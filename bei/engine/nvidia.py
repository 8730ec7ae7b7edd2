"""TensorRT's two libraries and the GPU, for compiler, engine and ``bei doctor``. Importing this module imports neither.

``tensorrt`` and ``tensorrt_rtx`` have the same classes; callers pass the module as an argument. cuda-python exposes
CUDA's runtime and driver as functions that return a status first.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bei.artifact.manifest import Manifest
from bei.errors import DeviceNotFoundError, LibraryVersionError, MissingDependencyError
from bei.utils import libraries


@dataclass(frozen=True)
class NvidiaLibrary:
    """A library. ``modules``: its possible import names; the first that is installed is used. Supported versions:
    ``least`` <= version < ``below``."""

    target: str
    title: str
    modules: tuple[str, ...]
    least: tuple[int, int]
    below: tuple[int, int]

    @property
    def versions(self) -> str:
        """``>=11.1,<12``."""
        least, below = (".".join(map(str, version)).removesuffix(".0") for version in (self.least, self.below))
        return f">={least},<{below}"


LIBRARIES = {
    library.target: library
    for library in (
        # 11.1 moved the lengths of TRT_Attention to inputs 4 and 5, as our graph has them.
        NvidiaLibrary("tensorrt", "TensorRT", ("tensorrt",), (11, 1), (12, 0)),
        # 1.7 is the version that was run; its parser is that of TensorRT 11.
        NvidiaLibrary("tensorrt-rtx", "TensorRT-RTX", ("tensorrt_rtx", "tensorrt_rtx_bindings"), (1, 7), (2, 0)),
    )
}


def load_library(target: str, purpose: str) -> ModuleType:
    """The module of ``target``'s library. Raises MissingDependencyError and BrokenDependencyError, which name
    ``purpose``, and LibraryVersionError."""
    library = LIBRARIES[target]
    for name in library.modules:
        try:
            module = libraries.load(name, name, target, purpose)
        except MissingDependencyError:
            continue
        version = tuple(int(part) for part in module.__version__.split(".")[:2])
        if not library.least <= version < library.below:
            raise LibraryVersionError(
                f"{library.title} {module.__version__} is installed, bei needs {library.versions}: "
                f"pip install 'bei[{target}]'."
            )
        return module
    raise MissingDependencyError(library.modules[0], target, purpose)


# Architectures that TensorRT-RTX 1.7 supports: no data center GPU from Hopper on, among others.
RTX_CAPABILITIES = (75, 80, 86, 89, 120, 121)


@dataclass(frozen=True)
class Gpu:
    """CUDA's device 0, for which engines are built and on which they run (``CUDA_VISIBLE_DEVICES`` selects it).

    ``capability``: 89 for compute capability 8.9. ``driver_cuda``: the newest CUDA that its driver supports, 13000 for
    13.0.
    """

    name: str
    capability: int
    memory_bytes: int
    driver_cuda: int

    @property
    def architecture(self) -> str:
        """``SM89``: TensorRT's term, also in plans."""
        return f"SM{self.capability}"


def load_cuda(purpose: str, extra: str) -> Any:
    """cuda-python's runtime module. Raises MissingDependencyError and BrokenDependencyError, which name ``purpose``."""
    return libraries.load("cuda.bindings.runtime", "cuda-bindings", extra, purpose)


def where_it_runs(manifest: Manifest) -> str:
    """What to do with an artifact on a machine without a GPU."""
    return (
        f"It was compiled for {manifest.engine.device}: verify and serve it on a machine with one, or build it again "
        "with --target cpu."
    )


def current_gpu(cuda: Any) -> Gpu:
    """The GPU that CUDA's runtime module ``cuda`` uses. Raises DeviceNotFoundError with CUDA's message."""
    driver = _asked(cuda.cudaDriverGetVersion)
    count = _asked(cuda.cudaGetDeviceCount)
    if not count:
        raise DeviceNotFoundError("CUDA finds no NVIDIA GPU on this machine.")
    properties = _asked(cuda.cudaGetDeviceProperties, 0)
    return Gpu(
        name=properties.name.split(b"\0")[0].decode(),
        capability=10 * properties.major + properties.minor,
        memory_bytes=properties.totalGlobalMem,
        driver_cuda=driver,
    )


def _asked(function: Any, *arguments: Any) -> Any:
    try:
        status, *values = function(*arguments)
    except RuntimeError as error:  # raised by cuda-python without libcuda
        raise DeviceNotFoundError(f"CUDA does not work on this machine: {' '.join(str(error).split())}.") from error
    if status.value != 0:
        raise DeviceNotFoundError(f"CUDA finds no NVIDIA GPU on this machine ({status.name}): is its driver installed?")
    return values[0]
