"""Loads the engine of an artifact; each target's module is imported on demand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from bei.artifact.held_files import Folder
from bei.artifact.manifest import Manifest
from bei.core import Engine
from bei.errors import ArtifactWrongTargetError, ConfigError

OptionsT = TypeVar("OptionsT")

# Names of engine options among the server's settings (bei.config), and the targets that have them.
_SETTINGS = {
    "num_threads": ("engine_threads", "cpu"),
    "num_streams": ("engine_streams", "cpu, tensorrt, tensorrt-rtx and cuda"),
    "cuda_graphs": ("graph_megabytes", "tensorrt, tensorrt-rtx and cuda"),
    "memory": ("gpu_megabytes", "cuda"),
}


def load_engine(folder: Folder, manifest: Manifest, options: Mapping[str, int] | None = None) -> Engine:
    """The engine in ``folder`` (an artifact's ``engine_files``), described by ``manifest``.

    ``options`` are the target's own: for ``cpu`` those of ``OpenVINOOptions``, for ``tensorrt`` and ``tensorrt-rtx``
    those of ``GpuOptions``, for ``cuda`` and ``cuda-twin`` those of ``CudaOptions``, for ``trtllm`` those of
    ``TRTLLMOptions``; missing ones have their defaults. Raises ConfigError for an option that the target lacks,
    ArtifactWrongTargetError, ArtifactWrongDeviceError, ArtifactWrongVersionError, DeviceNotFoundError,
    MissingDependencyError, LibraryVersionError, EngineError.
    """
    if manifest.target == "cpu":
        from bei.engine.openvino import OpenVINOEngine, OpenVINOOptions

        return OpenVINOEngine(folder, manifest, _options(OpenVINOOptions, manifest.target, options or {}))
    if manifest.target in ("tensorrt", "tensorrt-rtx"):
        from bei.engine.recorded_steps import GpuOptions
        from bei.engine.tensorrt.engine import TensorRTEngine

        return TensorRTEngine(folder, manifest, _options(GpuOptions, manifest.target, options or {}))
    if manifest.target in ("cuda", "cuda-twin"):
        from bei.engine.cuda.engine import CudaEngine, CudaOptions

        return CudaEngine(folder, manifest, _options(CudaOptions, manifest.target, options or {}))
    if manifest.target == "trtllm":
        from bei.engine.trtllm import TRTLLMEngine, TRTLLMOptions

        return TRTLLMEngine(folder, manifest, _options(TRTLLMOptions, manifest.target, options or {}))
    raise ArtifactWrongTargetError(
        f"The artifact of {manifest.name} was built for {manifest.target}, which this version of bei cannot serve. "
        "Build it again with --target cpu."
    )


def _options(cls: type[OptionsT], target: str, given: Mapping[str, int]) -> OptionsT:
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in given:
        if name not in known and name in _SETTINGS:
            setting, targets = _SETTINGS[name]
            raise ConfigError(
                f"The setting {setting} is for target {targets}; this artifact is for {target}: leave it out."
            )
        if name not in known:
            raise ConfigError(f"Engines of target {target} have no option {name!r}; they have: {', '.join(known)}.")
    return cls(**given)


def given_options(chosen: Mapping[str, int], num_streams: int | None) -> dict[str, int]:
    """Engine options from a server's settings: only those that were set, since not every target has them all."""
    return {**chosen} if num_streams is None else {**chosen, "num_streams": num_streams}
