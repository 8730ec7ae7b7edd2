"""Settings of builds that are given for what has been built already: it was built so, or they are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bei.config.settings import ENV_PREFIX, ServeConfig
from bei.config.sources import build_variables, converted
from bei.errors import ConfigError

if TYPE_CHECKING:
    from bei.artifact.manifest import Manifest

# Who signs what is built here, of several models too. Whose signature an artifact must have says require_signature.
_OF_SIGNING = frozenset(("sign", "sign_passphrase", "sign_passphrase_file"))

# What a manifest records, by the setting that made it so.
_RECORDED: Mapping[str, Callable[[Manifest], str | int | bool | None]] = {
    "target": lambda manifest: manifest.target,
    "precision": lambda manifest: manifest.precision,
    "name": lambda manifest: manifest.name,
    "revision": lambda manifest: manifest.source.revision,
    "pooling": lambda manifest: manifest.embedding.pooling if manifest.embedding else None,
    "normalize": lambda manifest: manifest.embedding.normalize if manifest.embedding else None,
    "include_prompt": lambda manifest: manifest.embedding.pools_prompt if manifest.embedding else None,
    "attention": lambda manifest: manifest.spec.attention,
    "adapter": lambda manifest: manifest.spec.adapter,
    "route": lambda manifest: manifest.routes.default if manifest.routes else None,
    "default_prompt_name": lambda manifest: manifest.default_prompt_name,
    "max_seq_len": lambda manifest: manifest.max_seq_len,
    "max_num_tokens": lambda manifest: manifest.max_num_tokens,
    "max_batch_size": lambda manifest: manifest.max_batch_size,
}
# Of a setting that leaves the choice to the build.
_ANY = "auto"


def build_settings(config: ServeConfig) -> dict[str, str]:
    """The settings of a build that are not defaults: the precision of ``config``, and the builder's variables."""
    given = build_variables() | {"precision": config.precision}
    return {name: value for name, value in sorted(given.items()) if value != _ANY and name not in _OF_SIGNING}


def check_built(manifest: Manifest, given: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting in ``given`` that ``manifest`` has otherwise, or does not record."""
    for name, value in given.items():
        said = name if name == "precision" else f"{name} ({ENV_PREFIX}{name.upper()})"
        remedy = "build it anew with 'bei build', or leave the setting out."
        if name not in _RECORDED:
            raise ConfigError(f"{said} is a setting of builds, and {manifest.name} has been built: {remedy}")
        recorded = _RECORDED[name](manifest)
        if recorded is None or converted(value, type(recorded), name, "environment") != recorded:
            has = "has none" if recorded is None else f"was built with {recorded}"
            raise ConfigError(f"{said} is {value}, and {manifest.name}, which is an artifact, {has}: {remedy}")
