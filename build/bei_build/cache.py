"""Cached artifacts that ``bei serve CHECKPOINT`` builds at start and reuses at the next (``bei.artifact.cache``)."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from bei.artifact.cache import EntryUse, ModelCache
from bei.artifact.manifest import SCHEMA_VERSION, Artifact
from bei.artifact.store import load
from bei.errors import ArtifactError
from bei.version import __version__
from bei_build.checkpoint.adapter_folder import base_of
from bei_build.checkpoint.gliner import FILE as GLINER
from bei_build.checkpoint.gliner_folder import encoder_of
from bei_build.checkpoint.label_tower import labels_encoder_of
from bei_build.checkpoint.locate import Location, locate
from bei_build.config import BuildConfig
from bei_build.files.json_settings import read_object
from bei_build.job import OpenEngine
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.targets.choose import compiler_for, with_target
from bei_build.weights.peft_adapter import CONFIG

# Builds the artifact of a configuration, as ``bei_build.pipeline.build`` does.
Build = Callable[[BuildConfig, OpenEngine, Progress], Artifact]


def build_cached(
    config: BuildConfig, cache: ModelCache, open_engine: OpenEngine, progress: Progress, build: Build = build
) -> tuple[Artifact, EntryUse]:
    """The verified artifact of ``config`` in ``cache``; ``build`` makes it, with a note, unless it is there. ``out`` is
    set here. It stays in the cache until the returned use is closed.

    The key covers the files that are read by name, size and time of change, of the checkpoint and of what its files and
    the settings name; the settings, the compiler's record of the machine, and the versions of bei and of the libraries
    that read checkpoints. Raises the errors of ``build``.
    """
    config = with_target(config)
    location = locate(config.model, config.revision)
    compiler = compiler_for(config)
    precision = compiler.resolve_precision(config.precision)
    config = replace(config, precision=precision)
    name = config.name or location.name
    named = replace(config, model=location.model, name=name)  # the same, whatever the user called it
    files = [_fingerprint(path, location.gguf) for path in _sources(config, location)]
    facts = (__version__, SCHEMA_VERSION, _libraries(), named, compiler.machine(), files)
    key = hashlib.sha256(repr(facts).encode())
    use = cache.use(f"{name.replace('/', '--')}-{config.target}-{precision}-{key.hexdigest()[:12]}")
    try:
        artifact = _found(use.path)
        if artifact is None:
            waiting = f"another process builds {config.model} into {use.path}: waiting for it"
            with cache.building(use.path.name, lambda: progress.note(waiting)):
                artifact = _found(use.path)
                if artifact is None:
                    shutil.rmtree(use.path, ignore_errors=True)  # remains of an earlier one: only bei writes here
                    progress.note(f"{config.model} is a checkpoint: building it into {use.path} (once)")
                    artifact = build(replace(config, out=str(use.path)), open_engine, progress)
    except BaseException:
        use.close()
        raise
    return artifact, use


def _found(path: Path) -> Artifact | None:
    try:
        return load(path)
    except ArtifactError:
        return None


def _sources(config: BuildConfig, location: Location) -> Iterator[Path]:
    """Files and folders that a build reads."""
    folder = location.folder
    yield folder
    yield from (locate(path).folder for path in config.lora_paths.values())
    yield from (Path(path) for path in (config.calibration_data, config.plan_of, config.sign) if path is not None)
    if (folder / CONFIG).is_file():
        yield base_of(folder)
    encoders = [encoder_of(folder)]
    if (settings := folder / GLINER).is_file():
        encoders.append(labels_encoder_of(folder, read_object(settings)))
    yield from (encoder for encoder in encoders if encoder is not None)


def _fingerprint(source: Path, gguf: Path | None) -> list[tuple[str, int, int]]:
    """``gguf``: the file that is read of several GGUF files in a folder."""
    paths = [path for path in sorted(source.rglob("*")) if path.is_file()] if source.is_dir() else [source]
    read = [path for path in paths if gguf is None or path == gguf or path.suffix != ".gguf"]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in read if path.exists()]


def _libraries() -> list[str]:
    """Versions of the libraries whose defaults and tokenizers an artifact has."""
    return [f"{name} {version(name)}" for name in ("transformers", "tokenizers") if find_spec(name) is not None]
