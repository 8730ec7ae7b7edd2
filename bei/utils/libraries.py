"""Imports of optional libraries, with errors that tell a missing library from a broken one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from bei.errors import BeiError, BrokenDependencyError, MissingDependencyError


def load(module: str, package: str, extra: str | None, purpose: str, remedy: str = "") -> ModuleType:
    """Import ``module``. Raises the errors of ``importing``."""
    with importing(package, extra, purpose, modules=(module,), remedy=remedy):
        return importlib.import_module(module)


@contextmanager
def importing(
    package: str, extra: str | None, purpose: str, *, modules: Sequence[str] = (), remedy: str = ""
) -> Iterator[None]:
    """A context for imports of a library. ``modules``: their dotted names, if they differ from the package's.

    Raises MissingDependencyError if the library is not installed; BrokenDependencyError, with the library's message, if
    it fails to load; KeyboardInterrupt if one arrived during the import, even if the library wrapped it.
    """
    try:
        yield
    except BeiError:
        raise
    except Exception as error:  # a library may raise anything while it loads
        if any(isinstance(one, KeyboardInterrupt) for one in _chain(error)):  # pybind11 turns it into an ImportError
            raise KeyboardInterrupt from error
        if isinstance(error, ModuleNotFoundError) and _is_of(error.name, modules or (package,)):
            raise MissingDependencyError(package, extra, purpose, remedy) from error
        raise BrokenDependencyError(package, extra, purpose, _words(error), remedy) from error


def _is_of(missing: str | None, modules: Sequence[str]) -> bool:
    """True if the missing module is one of ``modules`` or a parent package of one."""
    return missing is not None and any(f"{module}.".startswith(f"{missing}.") for module in modules)


def _words(error: BaseException) -> str:
    """The messages of ``error`` and of its causes, in one line."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:  # an error may be its own cause
        causes.append(cause)
    return ": ".join(dict.fromkeys(" ".join(str(one).split()) or type(one).__name__ for one in causes))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, its causes and contexts."""
    found: BaseException | None = error
    seen: list[BaseException] = []
    while found is not None and found not in seen:  # an error may be its own cause
        seen.append(found)
        yield found
        found = found.__cause__ or found.__context__
