"""From what a user calls a model to an artifact on disk: a path, an entry of the cache, or a checkpoint that is built
first and kept. ``bei.artifact.model_names`` says which names mean the same model.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.artifact.model_names import DEFAULT_MODEL, matching, near_names
from bei.errors import (
    ArtifactError,
    ArtifactFileMissingError,
    ArtifactUntrustedError,
    ConfigError,
    HubUnreachableError,
)
from bei.utils import libraries
from bei.utils.untrusted_files import home_expanded

if TYPE_CHECKING:
    from bei.artifact.cache import ModelCache
    from bei.artifact.manifest import Artifact, Manifest
    from bei.config.settings import ServeConfig

log = logging.getLogger(__name__)

# Variables of the builder that cannot hold for a server.
_OF_BUILDS_ALONE = {
    "model": "and BEI_MODELS says what is served",
    "out": "and what is built to be served lies in BEI_CACHE_DIR",
}
# Every build needs these; the builder imports them, and the rest, where it uses them. Looked for first, so that an
# installation without the extra is told so before anything is read.
_EVERY_BUILD_NEEDS = ("ml_dtypes", "onnx")
_BUILDER = "pip install 'bei[cpu]', or in a container the image cpu-build"


def cache_of(config: ServeConfig) -> ModelCache:
    """The folder of built artifacts."""
    from bei.artifact.cache import ModelCache

    return ModelCache(home_expanded(config.cache_dir))


def check_if_built(model: str, config: ServeConfig) -> None:
    """Raise ConfigError where ``model`` is an artifact, and was built otherwise than the settings of builds say."""
    from bei.artifact.store import is_artifact, load_manifest
    from bei.service.build_settings import build_settings, check_built

    path = home_expanded(model)
    if is_artifact(path) and (given := build_settings(config)):
        check_built(load_manifest(path), given)


def artifact_for(model: str, config: ServeConfig, held: ExitStack, *, apart: bool = False) -> Path | Artifact:
    """The artifact that ``model`` is: a path, or the name of an entry in ``config.cache_dir``; else of the checkpoint
    (a folder, or by name), built into the cache unless it is there. ``held`` keeps what is in the cache in use.
    ``apart``: build in a process of its own, whose progress is on this one's stderr.

    An artifact of a name whose checkpoint is not on this machine any more is taken from the cache, if the hub cannot be
    asked. Raises what building raises; MissingDependencyError where the builder is not installed;
    ArtifactUntrustedError for a checkpoint where only signed artifacts are taken; ConfigError as ``check_if_built``,
    and for a name that means several models.
    """
    from bei.artifact.manifest import ENGINE_DIR
    from bei.artifact.store import is_artifact

    path = home_expanded(model)
    check_if_built(model, config)
    if is_artifact(path) or (path / ENGINE_DIR).is_dir():  # loading says what the second one lacks
        return path
    if path.exists():
        return _built(model, config, held, apart)
    return _named(model, config, held, apart)


def default_artifact(config: ServeConfig, held: ExitStack, *, apart: bool = False) -> Path | Artifact:
    """That of the embedded default. Arguments and errors are those of ``artifact_for``."""
    return _named(DEFAULT_MODEL.name, config, held, apart)


def _named(model: str, config: ServeConfig, held: ExitStack, apart: bool) -> Path | Artifact:
    cache = cache_of(config)
    kept = _kept(cache)
    if model in kept:
        check_if_built(str(cache.folder / model), config)
        return _in_use(cache, model, held)
    try:
        return _built(model, config, held, apart)
    except HubUnreachableError as error:
        found = [entry for entry in matching(model, kept) if _is_built_so(kept[entry], config)]
        if not found:
            raise
        log.warning("%s is served as it was built before, from the cache: %s", model, error)
        return _in_use(cache, _the_only(model, found), held)


def built_artifact(model: str, cache: Callable[[], ModelCache], held: ExitStack) -> Path:
    """The artifact that ``model`` is, which exists: a path, an entry of the cache, or the name of a model of which the
    cache has one artifact. ``held`` keeps it in use.

    Raises ArtifactFileMissingError, and ConfigError for a name that means several.
    """
    path = home_expanded(model)
    if path.exists() or model.startswith((".", "/", "~")):
        return path
    folder = cache()
    kept = _kept(folder)
    found = [model] if model in kept else matching(model, kept)
    if found:
        entry = _the_only(model, found)
        with suppress(ConfigError):  # in a read-only folder nothing is removed either
            return _in_use(folder, entry, held)
        return folder.folder / entry
    names = [*kept, *(manifest.name for manifest in kept.values())]
    near = [*_built_here(model), *(name for name in near_names(model, names) if name != model)]
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ArtifactFileMissingError(
        f"{model} is neither a folder here nor a model that 'bei serve' has built into {folder.folder}: give an "
        f"artifact's folder, or build it with 'bei build'.{meant}"
    )


def _built_here(model: str) -> list[str]:
    """The artifacts in the current folder that 'bei build' may have made of ``model``."""
    from bei.artifact.store import is_artifact

    return sorted(path.name for path in Path().glob(f"{glob.escape(model.rpartition('/')[2])}-*") if is_artifact(path))


def check_is_checkpoint(model: str, cache: Callable[[], ModelCache]) -> None:
    """Raise ConfigError where ``model``, which is to be built, is an artifact, by its path or its name in the cache."""
    from bei.artifact.store import is_artifact, load_manifest

    path = home_expanded(model)
    if not path.exists() and "/" not in model:
        path = cache().folder / model
    if is_artifact(path):
        source = load_manifest(path).source
        raise ConfigError(
            f"{model} is an artifact, built of {source.model}: serve it with 'bei serve', or name a checkpoint."
        )


def _kept(cache: ModelCache) -> dict[str, Manifest]:
    """The manifests of the artifacts in the cache, by the name of their folder; those that cannot be read are left
    out."""
    from bei.artifact.store import load_manifest

    found: dict[str, Manifest] = {}
    for path in cache.artifacts():
        with suppress(ArtifactError, OSError):
            found[path.name] = load_manifest(path)
    return found


def _in_use(cache: ModelCache, entry: str, held: ExitStack) -> Path:
    return held.enter_context(cache.use(entry)).path


def _the_only(model: str, found: Sequence[str]) -> str:
    if len(found) > 1:
        raise ConfigError(f"{model} means several models: {', '.join(found)}. Name one of these.")
    return found[0]


def _is_built_so(manifest: Manifest, config: ServeConfig) -> bool:
    from bei.service.build_settings import build_settings, check_built

    try:
        check_built(manifest, build_settings(config))
    except ConfigError:
        return False
    return True


def _built(model: str, config: ServeConfig, held: ExitStack, apart: bool) -> Artifact:
    config_class = build_config_class()
    from bei.config.build_flags import variables_in_errors, with_variable_names
    from bei.config.settings import ENV_PREFIX
    from bei.config.sources import build_variables, load
    from bei.engine.load import load_engine
    from bei.service.build_process import build_apart
    from bei_build.cache import build_cached
    from bei_build.pipeline import build
    from bei_build.progress import Progress

    # BEI_* variables of the builder hold here too, but for those of which a server has its own.
    variables = build_variables()
    for variable, instead in _OF_BUILDS_ALONE.items():
        if variable in variables:
            raise ConfigError(f"{ENV_PREFIX}{variable.upper()} is for bei build, {instead}: unset it.")
    options = {"model": model, "precision": config.precision}
    with variables_in_errors(config_class):
        build_config = load(config_class, options)
    if config.require_signature is not None and build_config.sign is None:
        raise ArtifactUntrustedError(
            f"{model} is a checkpoint, which would be built here and signed by nobody, and only signed artifacts are "
            "served: build it with 'bei build --sign', and serve that."
        )
    progress = Progress(worded=partial(with_variable_names, build_config=config_class))
    make = build_apart if apart else build
    with variables_in_errors(config_class):
        artifact, use = build_cached(build_config, cache_of(config), load_engine, progress, make)
    held.enter_context(use)
    return artifact


def build_config_class() -> type[Any]:
    """The builder's configuration. Raises MissingDependencyError and BrokenDependencyError where what building needs is
    not installed, or does not load."""
    for library in _EVERY_BUILD_NEEDS:
        libraries.load(library, library, "cpu", "Building an artifact", _BUILDER)
    from bei_build.config import BuildConfig

    return BuildConfig
