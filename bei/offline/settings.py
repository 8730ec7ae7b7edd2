"""The settings of ``bei serve`` that a Model has: those of engine, tokenizers, queue and cache, not the network's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict

from bei.config.settings import ServeConfig
from bei.config.sources import load, nearest
from bei.errors import ConfigError


class ModelSettings(TypedDict, total=False):
    """Fields of ``bei.config.settings.ServeConfig`` (docs/reference.md, "Settings of bei serve")."""

    engine_threads: int
    engine_streams: int | None
    graph_megabytes: int | None
    gpu_megabytes: int | None
    tune: str
    tokenizer_threads: int
    interactive_inputs: int
    interactive_tokens: int
    bulk_share: float
    step_cap_ms: float
    hang_timeout: float
    cache_megabytes: int
    auto_truncate: bool
    untrained_dimensions: str
    cache_dir: str | os.PathLike[str]
    cache_max_size: str
    require_signature: tuple[str, ...] | None
    precision: str


def configured(settings: Mapping[str, object]) -> ServeConfig:
    """``settings`` over ``BEI_*`` variables over defaults. Raises ConfigError, also for a setting that no Model has."""
    names = sorted(ModelSettings.__optional_keys__)
    for name in settings:
        if name not in names:
            raise ConfigError(f"A Model has no setting {name!r}.{nearest(name, names)}")
    given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    return load(ServeConfig, given)
