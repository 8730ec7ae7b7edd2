"""What lies below a folder of a file system, all of it or what a pattern means: a folder that cannot be listed is an
error, where fsspec's own ``find`` and ``glob`` leave it out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from bei.bulk.file_systems import FileSystem, plain_errors
from bei.bulk.sources.lance_rows import ENDING
from bei.errors import JobInputError

_LETTERS = frozenset("*?[")
_ANY_DEPTH = "**"


def kind_of(file_system: FileSystem, path: str) -> str | None:
    """What is there: a file, a directory, or another thing; None: nothing. fsspec's own ``exists`` and ``isdir`` are
    False for errors too."""
    try:
        with plain_errors():
            kind = str(file_system.info(path)["type"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    # Of a web server the name alone tells nothing.
    return "directory" if kind != "directory" and file_system.isdir(path) else kind


def is_pattern(path: str) -> bool:
    """True for a path that ``matching`` may find files for."""
    return not _LETTERS.isdisjoint(path)


def is_dataset(path: str) -> bool:
    """True for a name of Lance's datasets, which are folders."""
    return path.rstrip("/").lower().endswith(ENDING)


def is_passed_over(name: str) -> bool:
    """True for files and folders that readers of folders do not see: hidden ones, and what a disk keeps for repairs."""
    return name.startswith((".", "_")) or name == "lost+found"


def files_below(file_system: FileSystem, folder: str) -> list[str]:
    """All files below ``folder``, at any depth; of a dataset of Lance itself, or files in it."""
    if _lists_at_once(file_system):
        return list(file_system.find(folder))
    walk = _Walk(file_system, lambda path: not is_passed_over(path.rpartition("/")[2]))
    return _once(file_system, folder, walk.below(folder))


def matching(file_system: FileSystem, pattern: str) -> list[str]:
    """Files and datasets of Lance that ``pattern`` means. Folders that it does not lead through are not listed."""
    from fsspec.utils import glob_translate

    parts = pattern.split("/")
    root = "/".join(parts[: next(place for place, part in enumerate(parts) if is_pattern(part))])
    matches = re.compile(glob_translate(pattern)).match

    def is_wanted(folder: str) -> bool:
        if folder.endswith("/lost+found"):
            return False
        leading = parts[: folder.count("/") + 1]
        return _ANY_DEPTH in leading or re.match(glob_translate("/".join(leading)), folder) is not None

    if _ANY_DEPTH in parts and _lists_at_once(file_system):
        infos = file_system.find(root, withdirs=True, detail=True)
        found = [path for path, info in infos.items() if info["type"] != "directory" or is_dataset(path)]
    elif kind_of(file_system, root or "/") is not None:
        found = _once(file_system, root, _Walk(file_system, is_wanted).below(root))
    else:
        found = []
    return [path for path in found if matches(path)]


class _Walk:
    """From folder to folder, into those that ``is_wanted`` is true for."""

    def __init__(self, file_system: FileSystem, is_wanted: Callable[[str], bool]) -> None:
        self._file_system = file_system
        self._is_wanted = is_wanted

    def below(self, folder: str, linking: tuple[str, ...] = ()) -> Iterator[str]:
        """Files and datasets below ``folder``. ``linking``: the folders whose links have led to it."""
        for path, kind in self._entries(folder):
            if kind == "file" or is_dataset(path):
                yield path
            elif self._is_wanted(path):
                yield from self.below(path, linking if kind == "directory" else self._followed(path, linking))

    def _entries(self, folder: str) -> list[tuple[str, str]]:
        """Paths, and whether each is a file (or what is opened as one), a directory, or a link to one."""
        found = []
        try:
            with plain_errors():
                for info in self._file_system.ls(folder or "/", detail=True):
                    path, kind = info["name"].rstrip("/"), str(info["type"])
                    if kind not in ("file", "directory"):
                        kind = "link" if self._file_system.isdir(path) else "file"
                    if path != folder.rstrip("/"):
                        found.append((path, kind))
        except OSError as error:
            raise JobInputError(
                f"The folder {folder} cannot be listed: {str(error).rstrip('.') or type(error).__name__}. Make it "
                "readable, or give the inputs beside it one by one."
            ) from error
        return found

    def _followed(self, link: str, linking: tuple[str, ...]) -> tuple[str, ...]:
        """``linking`` with the folder of ``link``. Raises JobInputError where it leads around that, or is elsewhere."""
        if not _is_local(self._file_system):
            raise JobInputError(f"{link} is a link to a folder: give that one itself beside the other inputs.")
        target = os.path.realpath(link)
        linking = (*linking, os.path.realpath(os.path.dirname(link)))
        if any(os.path.commonpath((target, one)) == target for one in linking):
            raise JobInputError(f"{link} is a link to {target}, which it lies in: remove it.")
        return linking


def _once(file_system: FileSystem, root: str, paths: Iterator[str]) -> list[str]:
    """The ``paths`` below ``root``: of one file that links lead to too, its own alone. Raises JobInputError where two
    paths of one file lead through links."""
    if not _is_local(file_system):
        return list(paths)
    found: dict[str, str] = {}
    real: dict[str, str] = {}  # of folders
    own = os.path.realpath(root or "/")
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in real:
            real[folder] = os.path.realpath(folder or "/")
        file = os.path.join(real[folder], name)
        other = found.setdefault(file, path)
        of_no_link = os.path.join(root or "/", os.path.relpath(file, own))
        if path == of_no_link:
            found[file] = path
        elif other not in (path, of_no_link):
            raise JobInputError(
                f"{other} and {path} are one file, and its rows would be twice in the output: remove the link to its "
                "folder, or give the folders one by one."
            )
    return list(found.values())


def _is_local(file_system: FileSystem) -> bool:
    return "file" in file_system.protocol


def _lists_at_once(file_system: FileSystem) -> bool:
    """True for stores, which list all that begins with a prefix: their ``find`` is not fsspec's own, which goes from
    folder to folder."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    if isinstance(file_system, AsyncFileSystem):
        return type(file_system)._find is not AsyncFileSystem._find
    return type(file_system).find is not AbstractFileSystem.find
