"""What a server has beside its models, as its settings say: API keys, access log, traces, files and batches."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from bei.config.settings import ServeConfig
from bei.metrics.registry import Metrics
from bei.server.auth.keys import Keyring, NewBucket, keyring_of, own_bucket
from bei.server.batches.store import BatchStore, store_of
from bei.server.telemetry.access_log import RequestLog, request_log_of
from bei.server.telemetry.middleware import Telemetry
from bei.server.telemetry.otel_settings import tracing_of

if TYPE_CHECKING:
    from bei.server.telemetry.spans import Tracing


@dataclass(frozen=True)
class ServerParts:
    """``keys`` None: everybody is let in. ``batches`` None: there are no files and batches."""

    config: ServeConfig
    metrics: Metrics
    keys: Keyring | None = None
    request_log: RequestLog | None = None
    tracing: Tracing | None = None
    batches: BatchStore | None = None

    @classmethod
    def of(cls, config: ServeConfig, metrics: Metrics, new_bucket: NewBucket = own_bucket) -> ServerParts:
        """As ``config`` says. ``new_bucket``: of a key's rate. Raises ConfigError, MissingDependencyError."""
        keys, request_log, tracing = keyring_of(config, new_bucket), request_log_of(config), tracing_of(config)
        return cls(config, metrics, keys, request_log, tracing, store_of(config))

    def telemetry(self, app: ASGIApp, others: ASGIApp, untraced: Set[str]) -> Telemetry:
        """``app`` behind the middleware that counts, logs and traces."""
        timing = self.config.server_timing
        return Telemetry(
            app, others, self.metrics, self.request_log, self.tracing, untraced=untraced, server_timing=timing
        )
