"""Artifacts that ``bei serve CHECKPOINT`` builds on the way, kept for the next start."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bei import __version__
from bei.artifact import SCHEMA_VERSION, load
from bei.errors import ArtifactError, ConfigError
from bei_build.config import BuildConfig
from bei_build.job import OpenEngine
from bei_build.location import locate
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.targets import compiler_for


def build_cached(config: BuildConfig, cache: Path, open_engine: OpenEngine, progress: Progress) -> Path:
    """The artifact of ``config`` in ``cache``; built, with a note that says so, unless it is there. ``out`` is ours.

    The key covers the checkpoint's files by name, size and time of change, the settings, what the compiler says of the
    machine, and the versions of bei.
    Raises what ``build`` raises.
    """
    location = locate(config.model, config.revision)
    compiler = compiler_for(config)
    precision = compiler.resolve_precision(config.precision)
    config = replace(config, precision=precision)
    facts = (__version__, SCHEMA_VERSION, config, compiler.machine(), _fingerprint(location.folder))
    key = hashlib.sha256(repr(facts).encode())
    name = (config.name or location.model).replace("/", "--")
    out = cache / f"{name}-{config.target}-{precision}-{key.hexdigest()[:12]}"
    with _locked(cache, out.name):
        try:
            load(out)
        except ArtifactError:
            shutil.rmtree(out, ignore_errors=True)  # whatever is left of it: the cache is ours
            progress.note(f"{config.model} is a checkpoint: building it into {out} (once)")
            build(replace(config, out=str(out)), open_engine, progress)
    return out


@contextmanager
def _locked(cache: Path, entry: str) -> Iterator[None]:
    """One builder an entry: a second server that starts meanwhile waits and finds it built. Raises ConfigError."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / f".{entry}.lock").touch()
    except OSError as error:
        raise ConfigError(
            f"The cache {cache} cannot be written ({error}): name another folder with --cache-dir or BEI_CACHE_DIR, or "
            "build first and serve the artifact."
        ) from error
    with (cache / f".{entry}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in files]
