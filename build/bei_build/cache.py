"""Cached artifacts that ``bei serve CHECKPOINT`` builds at start and reuses at the next (``bei.artifact.cache``)."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from bei.artifact.cache import EntryUse, ModelCache
from bei.artifact.manifest import SCHEMA_VERSION, Artifact
from bei.artifact.store import load
from bei.errors import ArtifactError
from bei.version import __version__
from bei_build.checkpoint.locate import Location, locate
from bei_build.config import BuildConfig
from bei_build.job import OpenEngine
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.targets.choose import compiler_for, with_target


def build_cached(
    config: BuildConfig, cache: ModelCache, open_engine: OpenEngine, progress: Progress
) -> tuple[Artifact, EntryUse]:
    """The verified artifact of ``config`` in ``cache``; it is built, with a note, unless it is there. ``out`` is set
    here. It stays in the cache until the returned use is closed.

    The key covers the checkpoint's files by name, size and time of change, the settings, the compiler's record of the
    machine, and the versions of bei. Raises the errors of ``build``.
    """
    config = with_target(config)
    location = locate(config.model, config.revision)
    compiler = compiler_for(config)
    precision = compiler.resolve_precision(config.precision)
    config = replace(config, precision=precision)
    name = config.name or location.name
    named = replace(config, model=location.model, name=name)  # the same, whatever the user called it
    facts = (__version__, SCHEMA_VERSION, named, compiler.machine(), _fingerprint(location))
    key = hashlib.sha256(repr(facts).encode())
    use = cache.use(f"{name.replace('/', '--')}-{config.target}-{precision}-{key.hexdigest()[:12]}")
    try:
        artifact = _found(use.path)
        if artifact is None:
            with cache.building(use.path.name):
                artifact = _found(use.path) or _built(config, use.path, open_engine, progress)
    except BaseException:
        use.close()
        raise
    return artifact, use


def _found(path: Path) -> Artifact | None:
    try:
        return load(path)
    except ArtifactError:
        return None


def _built(config: BuildConfig, path: Path, open_engine: OpenEngine, progress: Progress) -> Artifact:
    shutil.rmtree(path, ignore_errors=True)  # remains of an earlier build: only bei writes into the cache
    progress.note(f"{config.model} is a checkpoint: building it into {path} (once)")
    return build(replace(config, out=str(path)), open_engine, progress)


def _fingerprint(location: Location) -> list[tuple[str, int, int]]:
    read = location.gguf  # of several GGUF files in a folder one is read
    paths = (path for path in sorted(location.folder.rglob("*")) if path.is_file())
    files = [(path, path.stat()) for path in paths if read is None or path == read or path.suffix != ".gguf"]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in files]
