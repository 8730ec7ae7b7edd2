"""Settings of the network that are wrong, or that cannot be combined: refused by name, before anything is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bei.errors import ConfigError

if TYPE_CHECKING:
    from bei.config.settings import ServeConfig

ANY_ORIGIN = "*"

# What paths of routes begin with: a root_path that begins so could not be told from them. A test holds them together.
FIRST_SEGMENTS = frozenset(
    (
        *("api-doc", "certificate", "classify", "decode", "detokenize", "docs", "embed", "embed_all"),
        *("embed_sparse", "embeddings", "health", "info", "invocations", "metrics", "models", "openapi.json"),
        *("pooling", "predict", "predict_tokens", "ready", "rerank", "score", "similarity", "stats", "tokenize"),
        *("ui", "v1", "v2", "vertex"),
        *("cohere", "infinity", "jina", "nim", "tei", "vllm", "voyage"),
    )
)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_MODE = re.compile(r"[0-7]{3}")
_DEFAULT_MODE = "660"


def check(config: ServeConfig) -> None:
    """Raises ConfigError that names the first setting that cannot be honoured."""
    _check_sockets(config)
    _check_keys(config)
    _check_cors(config)
    _check_root_path(config.root_path)
    if config.log_inputs and not config.access_log:
        raise ConfigError("log_inputs is for the lines of access_log: set both, or neither.")
    if config.trace_sample_ratio is not None and config.trace_sample_ratio > 1:
        raise ConfigError(
            f"trace_sample_ratio is a share of the requests, from 0 to 1, not {config.trace_sample_ratio}."
        )


def _check_sockets(config: ServeConfig) -> None:
    if config.uds is None:
        if config.tcp is False:
            raise ConfigError("tcp false leaves nothing to listen on: set uds, or leave tcp out.")
        if config.uds_mode != _DEFAULT_MODE:
            raise ConfigError("uds_mode is of a unix socket: set uds too, or leave it out.")
    if not _MODE.fullmatch(config.uds_mode):
        raise ConfigError(f"uds_mode must be three octal digits as chmod has them, not {config.uds_mode!r}.")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("tls_cert and tls_key belong together: set both, or neither.")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("tls_client_ca needs TLS: set tls_cert and tls_key too.")
    if config.tls_cert is not None and not config.listens_on_tcp:
        raise ConfigError("tls_cert is for TCP, a unix socket has no TLS: set tcp too, or leave tls_cert out.")


def _check_keys(config: ServeConfig) -> None:
    if config.api_keys is not None and not config.api_keys:  # a variable that a lost secret has left empty
        raise ConfigError("api_keys (BEI_API_KEYS) is set and has no key: everybody would be let in. Give it one.")
    if config.metrics_need_key and not config.asks_for_keys:
        raise ConfigError("metrics_need_key needs keys: set api_keys_file or BEI_API_KEYS too.")


def _check_cors(config: ServeConfig) -> None:
    origins = config.cors_origins
    if config.cors_credentials and not origins:
        raise ConfigError("cors_credentials is for pages of cors_origins: set both, or neither.")
    if ANY_ORIGIN in origins:
        if config.cors_credentials:
            raise ConfigError("cors_origins * and cors_credentials exclude each other in browsers: name the origins.")
        if len(origins) > 1:
            raise ConfigError("cors_origins * includes all others: name it alone, or leave it out.")
        return
    for origin in origins:
        if not _ORIGIN.fullmatch(origin.lower()):
            raise ConfigError(
                f"cors_origins has {origin!r}, which is no origin: give scheme, host and port, as https://a.example."
            )


def _check_root_path(root_path: str) -> None:
    if not root_path:
        return
    if not _ROOT_PATH.fullmatch(root_path):
        raise ConfigError(
            f"root_path must begin with / and not end with it, of letters, digits and ._~-, not {root_path!r}."
        )
    first = root_path.split("/")[1]
    if first in FIRST_SEGMENTS:
        raise ConfigError(f"root_path {root_path} begins as paths of routes do (/{first}): choose another one.")
