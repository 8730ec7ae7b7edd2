"""The files that a server's settings name, read once before checkpoints are built, which takes minutes. What reads them
at the start proper reads them again: it keeps what it has read."""

from __future__ import annotations

from bei.artifact.signing_keys import trusted_keys
from bei.config.settings import ServeConfig
from bei.server.http.tls import check_tls
from bei.utils.named_files import is_pipe_of_shell


def check_named_files(config: ServeConfig) -> None:
    """Raise ConfigError for API keys, TLS files or trusted keys that cannot be used; MissingDependencyError."""
    if config.asks_for_keys:
        from bei.server.auth.key_file import key_specs  # most servers have no use for YAML

        key_specs(config.api_keys_file, config.api_keys or ())
    check_tls(config)
    if config.require_signature is not None:
        # A pipe can be read once.
        trusted_keys([file for file in config.require_signature if not is_pipe_of_shell(file)])
