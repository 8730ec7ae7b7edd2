"""Which requests need an API key, and that they have one."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope

from bei.config.settings import ServeConfig
from bei.server.auth.keys import Key, Keyring
from bei.server.dialects.base import Dialect
from bei.server.routes.pages import page_paths
from bei.server.scope import SCOPE_API_KEY


class Guard:
    """Holds requests to ``keys``, but those that read one of ``open_paths``."""

    def __init__(self, keys: Keyring, open_paths: frozenset[str]) -> None:
        self._keys = keys
        self._open_paths = open_paths

    def check(self, scope: Scope) -> None:
        """Raises UnauthorizedError, RateLimitedError."""
        if scope["path"] not in self._open_paths or scope["method"] not in ("GET", "HEAD"):
            self._keys.check(scope)

    def count(self, scope: Scope, status: int) -> None:
        """The request was answered: count it for its key, if it had a good one."""
        key: Key | None = scope.get(SCOPE_API_KEY)
        if key is not None:
            self._keys.count(key, status)


def open_paths(config: ServeConfig, dialects: Iterable[Dialect]) -> frozenset[str]:
    """What may be read without a key: whether the server lives and is ready, its metrics unless they need one, and the
    files of the page, which asks for the key itself."""
    probes, metrics_paths = monitors_paths(dialects)
    return frozenset(page_paths(config)) | probes | (frozenset() if config.metrics_need_key else metrics_paths)


def monitors_paths(dialects: Iterable[Dialect]) -> tuple[frozenset[str], frozenset[str]]:
    """What monitors read: whether the server lives and is ready, and its metrics."""
    probes, metrics_paths = {"/health", "/ready"}, {"/metrics"}
    for dialect in dialects:
        for root in dialect.roots:
            mount = f"/{dialect.name}{root}"
            probes |= {mount + path for path in dialect.probes}
            if dialect.metrics_path is not None:
                metrics_paths.add(mount + dialect.metrics_path)
    return frozenset(probes), frozenset(metrics_paths)
