"""Artifacts that ``bei serve CHECKPOINT`` builds on the way, kept for the next start."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from bei import __version__
from bei.artifact import SCHEMA_VERSION, load_manifest
from bei.errors import ArtifactError
from bei_build.checkpoint import locate
from bei_build.config import BuildConfig
from bei_build.pipeline import OpenEngine, build
from bei_build.progress import Progress
from bei_build.targets import compiler_for


def build_cached(config: BuildConfig, cache: Path, open_engine: OpenEngine, progress: Progress) -> Path:
    """The artifact of ``config`` in ``cache``; built, with a note that says so, unless it is there. ``out`` is ours.

    The key covers the checkpoint's files by name, size and time of change, the settings, and the versions of bei.
    Raises what ``build`` raises.
    """
    location = locate(config.model, config.revision)
    precision = compiler_for(config.target).resolve_precision(config.precision)
    config = replace(config, precision=precision)
    key = hashlib.sha256(repr((__version__, SCHEMA_VERSION, config, _fingerprint(location.folder))).encode())
    name = (config.name or location.model).replace("/", "--")
    out = cache / f"{name}-{config.target}-{precision}-{key.hexdigest()[:12]}"
    try:
        load_manifest(out)
    except ArtifactError:
        shutil.rmtree(out, ignore_errors=True)  # whatever is left of it: the cache is ours
        progress.note(f"{config.model} is a checkpoint: building it into {out} (once)")
        build(replace(config, out=str(out)), open_engine, progress)
    return out


def _fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in files]
