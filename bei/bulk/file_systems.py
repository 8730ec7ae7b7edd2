"""File systems of URLs, by fsspec: ``s3://``, ``gs://``, ``hf://`` and whatever else has a package for it; Lance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

from bei.errors import BeiError
from bei.utils import libraries

FileSystem: TypeAlias = Any  # fsspec's; it has no types


def file_system_of(url: str) -> tuple[FileSystem, str]:
    """The file system of a path or URL, and the path in it.

    Raises MissingDependencyError where fsspec, or the protocol's own package, is not installed; ValueError for a
    protocol that nobody knows; what a file system raises as it connects.
    """
    protocol = url.partition("://")[0] if "://" in url else "file"
    core = libraries.load("fsspec.core", "fsspec", "bulk", "bei embed")
    known = libraries.load("fsspec.registry", "fsspec", "bulk", "bei embed").known_implementations.get(protocol)
    if known is not None:
        module = known["class"].rpartition(".")[0]
        package = module.partition(".")[0]
        libraries.load(module, package, None, f"{protocol}://", f"pip install {package}")
    file_system, path = core.url_to_fs(url)
    return file_system, str(path)


@contextmanager
def plain_errors() -> Iterator[None]:
    """A context for calls of a file system, in which errors that its packages have of their own, as those of missing
    credentials and of connections, become OSError."""
    try:
        yield
    except (BeiError, OSError, ValueError):
        raise
    except Exception as error:  # a border: each package has a tree of its own
        raise OSError(f"{type(error).__name__}: {error}") from error


def load_lance(purpose: str) -> ModuleType:
    """Lance, which reads and writes by itself. Raises MissingDependencyError."""
    os.environ.setdefault("LANCE_LOG", "error")  # it warns of each dataset that it makes
    return libraries.load("lance", "pylance", "lance", purpose)
