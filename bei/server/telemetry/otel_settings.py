"""Whether a server sends traces, and where to: settings, and the standard variables of OpenTelemetry.

Off unless a setting or a variable asks for it. What the library itself reads of the environment (sampler, resource,
headers, certificates, batches) is left to it; what it would pass over without a word is refused here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bei.config.settings import ServeConfig
from bei.errors import ConfigError
from bei.utils import libraries

if TYPE_CHECKING:
    from bei.server.telemetry.spans import Tracing

log = logging.getLogger(__name__)

_SETTING = "otlp_endpoint"
_DISABLED = "OTEL_SDK_DISABLED"
_EXPORTER = "OTEL_TRACES_EXPORTER"
# That of traces goes before that of all signals; the first is a whole URL, the second gets a path.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

# What bei.server.telemetry.spans imports, and the distributions that have it.
_LIBRARIES = {
    "opentelemetry.sdk.trace": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter": "opentelemetry-exporter-otlp-proto-http",
}

_PROTOCOL = "http/protobuf"
_PATH = "/v1/traces"
_DEFAULT_ENDPOINT = "http://localhost:4318"  # OpenTelemetry's


def tracing_of(config: ServeConfig, env: Mapping[str, str] | None = None) -> Tracing | None:
    """What makes the traces; None: nobody asks for them.

    Raises ConfigError where what was asked for cannot be, MissingDependencyError and
    BrokenDependencyError where the packages of the extra are not there or do not load.
    """
    env = os.environ if env is None else env
    source = _source(config, env)
    if source is None:
        if config.trace_sample_ratio is not None:
            raise ConfigError(f"trace_sample_ratio is for traces: set {_SETTING} too, or leave it out.")
        return None
    url = _url(source, config, env)
    for variable in _PROTOCOLS:
        if env.get(variable, _PROTOCOL).strip() not in ("", _PROTOCOL):
            raise ConfigError(
                f"{variable} is {env[variable]!r}, and bei sends traces as {_PROTOCOL}: set it so, with the port that "
                "the collector has for it (4318 by default)."
            )
    for module, package in _LIBRARIES.items():
        libraries.load(module, package, "otel", f"Tracing ({source} is set)")
    try:
        from bei.server.telemetry.spans import tracing_to
    except ValueError as error:
        raise ConfigError(f"OTEL_PROPAGATORS cannot be honoured: {error}") from error
    try:
        tracing = tracing_to(url, config.trace_sample_ratio)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"OpenTelemetry refuses its variables (OTEL_*): {error}") from error
    parts = urlsplit(url)
    log.info("traces go to %s%s (%s)", parts.netloc.rpartition("@")[2], parts.path, source)
    return tracing


def _source(config: ServeConfig, env: Mapping[str, str]) -> str | None:
    """The name of what asks for traces."""
    exporter = env.get(_EXPORTER, "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise ConfigError(f"{_EXPORTER} is {env[_EXPORTER]!r}, and bei sends traces by otlp: set it so, or to none.")
    is_off = exporter == "none" or env.get(_DISABLED, "").strip().lower() == "true"
    if config.otlp_endpoint is not None:
        if is_off:
            off = _EXPORTER if exporter == "none" else _DISABLED
            raise ConfigError(f"{off} forbids the traces that {_SETTING} asks for: leave one of them out.")
        return _SETTING
    if is_off:
        return None
    asked = next((variable for variable in _ENDPOINTS if env.get(variable, "").strip()), None)
    return asked or (_EXPORTER if exporter else None)


def _url(source: str, config: ServeConfig, env: Mapping[str, str]) -> str:
    """Where the traces go. Raises ConfigError where it is no URL."""
    given = config.otlp_endpoint if source == _SETTING else env.get(source, "")
    base = _DEFAULT_ENDPOINT if source == _EXPORTER or given is None else given.strip()
    try:
        parts = urlsplit(base)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half of an IPv6 address
        is_url = False
    if not is_url:
        raise ConfigError(f"{source} must be a URL as {_DEFAULT_ENDPOINT}, not {base!r}.")
    if source == _ENDPOINTS[0] or parts.path.endswith(_PATH):
        return base
    return base.rstrip("/") + _PATH
