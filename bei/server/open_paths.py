"""Paths that monitors and browsers read: without an API key, or without a trace."""

from __future__ import annotations

from collections.abc import Iterable

from bei.config.settings import ServeConfig
from bei.server.dialects.base import Dialect
from bei.server.routes.pages import page_paths
from bei.server.status.stats import PATH as STATS


def open_paths(config: ServeConfig, dialects: Iterable[Dialect]) -> frozenset[str]:
    """Paths that need no API key: probes, metrics unless they need one, and the files of the page, which asks for the
    key itself."""
    probes, metrics_paths = _monitored(dialects)
    return frozenset(page_paths(config)) | probes | (frozenset() if config.metrics_need_key else metrics_paths)


def untraced_paths(config: ServeConfig, dialects: Iterable[Dialect]) -> frozenset[str]:
    """Paths that are read every few seconds, with and without the root path: probes, metrics, statistics."""
    paths = frozenset((STATS,)).union(*_monitored(dialects))
    return paths | {config.root_path + path for path in paths}


def _monitored(dialects: Iterable[Dialect]) -> tuple[frozenset[str], frozenset[str]]:
    """Probes of liveness and readiness, and metrics."""
    probes, metrics_paths = {"/", "/health", "/ping", "/ready"}, {"/metrics"}
    for dialect in dialects:
        for root in dialect.roots:
            mount = f"/{dialect.name}{root}"
            probes |= {mount + path for path in dialect.probes}
            if dialect.metrics_path is not None:
                metrics_paths.add(mount + dialect.metrics_path)
    return frozenset(probes), frozenset(metrics_paths)
