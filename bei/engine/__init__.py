"""Engines: one module a target, loaded by ``load_engine``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path

from bei.artifact import Manifest
from bei.core import Engine
from bei.errors import ArtifactWrongTargetError


def load_engine(folder: Path, manifest: Manifest, *, num_threads: int = 0, num_streams: int = 1) -> Engine:
    """The engine in ``folder`` (an artifact's ``engine/``), described by ``manifest``.

    ``num_threads`` 0 means all cores. ``num_streams`` batches may run side by side, sharing the threads.
    Raises ArtifactWrongTargetError, ArtifactWrongDeviceError, MissingDependencyError, EngineError.
    """
    if manifest.target == "cpu":
        from bei.engine.openvino import OpenVINOEngine

        return OpenVINOEngine(folder, manifest, num_threads=num_threads, num_streams=num_streams)
    raise ArtifactWrongTargetError(
        f"The artifact of {manifest.name} was built for {manifest.target}, which this version of bei cannot serve. "
        "Build it again with --target cpu."
    )
