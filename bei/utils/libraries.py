"""Imports of libraries that an installation may lack, or have and not be able to load: each is said as what it is."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from bei.errors import BeiError, BrokenDependencyError, MissingDependencyError


def load(module: str, package: str, extra: str | None, purpose: str, remedy: str = "") -> ModuleType:
    """``module``, imported. Raises what ``importing`` does."""
    with importing(package, extra, purpose, modules=(module,), remedy=remedy):
        return importlib.import_module(module)


@contextmanager
def importing(
    package: str, extra: str | None, purpose: str, *, modules: Sequence[str] = (), remedy: str = ""
) -> Iterator[None]:
    """Around the imports of a library. ``modules``: their dotted names, where they are not the package's.

    Raises MissingDependencyError where the library is not installed; BrokenDependencyError with the library's own words
    where it is, and does not load; KeyboardInterrupt where one met the import, whatever the library made of it.
    """
    try:
        yield
    except BeiError:
        raise
    except Exception as error:  # a library may raise anything while it loads
        if any(isinstance(one, KeyboardInterrupt) for one in _chain(error)):  # pybind11 makes an ImportError of it
            raise KeyboardInterrupt from error
        if isinstance(error, ModuleNotFoundError) and _is_of(error.name, modules or (package,)):
            raise MissingDependencyError(package, extra, purpose, remedy) from error
        raise BrokenDependencyError(package, extra, purpose, _words(error), remedy) from error


def _is_of(missing: str | None, modules: Sequence[str]) -> bool:
    """Whether the module ``missing`` is one of ``modules``, or a package that would hold one."""
    return missing is not None and any(f"{module}.".startswith(f"{missing}.") for module in modules)


def _words(error: BaseException) -> str:
    """What ``error`` says, and what the errors say of which it was made, in one line."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:  # an error may be made its own cause
        causes.append(cause)
    return ": ".join(dict.fromkeys(" ".join(str(one).split()) or type(one).__name__ for one in causes))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, what caused it, and what was being handled."""
    found: BaseException | None = error
    seen: list[BaseException] = []
    while found is not None and found not in seen:  # an error may be made its own cause
        seen.append(found)
        yield found
        found = found.__cause__ or found.__context__
