"""Other names of served models, as the operator gives them: ``ALIAS`` of the only model, or ``ALIAS=MODEL``."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from bei.artifact.manifest import Manifest
from bei.artifact.model_names import matching
from bei.errors import ConfigError


def alias_names(given: Iterable[str], manifests: Seq[Manifest]) -> dict[str, str]:
    """The name of the served model by alias. Raises ConfigError."""
    found: dict[str, str] = {}
    names = [manifest.name for manifest in manifests]
    for entry in given:
        alias, equals, model = entry.partition("=")
        if not alias or not alias.isprintable() or (equals and not model):
            raise ConfigError(f"alias {entry!r} must be a name, or ALIAS=MODEL.")
        if alias in names:
            raise ConfigError(f"alias {alias!r} is the name of a served model: leave it out.")
        name = _meant(entry, model, manifests)
        if found.setdefault(alias, name) != name:
            raise ConfigError(f"alias {alias!r} is given to {found[alias]} and to {name}: keep one.")
    return found


def _meant(entry: str, model: str, manifests: Seq[Manifest]) -> str:
    names = ", ".join(manifest.name for manifest in manifests)
    if not model:
        if len(manifests) > 1:
            raise ConfigError(f"alias {entry!r} does not say of which model: write {entry}=MODEL, with one of {names}.")
        return manifests[0].name
    meant = matching(model, {manifest.name: manifest for manifest in manifests})
    if len(meant) != 1:
        many = "several served models" if meant else "no served model"
        raise ConfigError(f"alias {entry!r} means {many}: name one of {names}.")
    return meant[0]
