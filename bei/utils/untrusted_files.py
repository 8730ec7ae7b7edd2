"""Safe reading of files from untrusted sources: checks of paths, file types and sizes before anything is read."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bei.errors import ConfigError

# Linux's PATH_MAX: longer strings cannot be file names.
_MOST_NAME_BYTES = 255
_MOST_PATH_BYTES = 4095

# Limit for manifests and certificates: a certificate may hold a row as wide as a vocabulary.
MOST_JSON_BYTES = 64_000_000
# The largest known tokenizers have 256,000 tokens and 34 MB (Gemma's); parsing takes about ten times the file's size.
MOST_TOKENIZER_BYTES = 100_000_000


class UnfitError(ValueError):
    """A file is unfit for use. The message gives the reason, not the file's name, which the caller knows."""


def home_expanded(path: str) -> Path:
    """``path`` with a leading ~ replaced. Raises ConfigError if the home directory is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no HOME, and no entry in passwd
        raise ConfigError(
            f"{path} begins with ~, and this user has no home directory ({error}): set HOME, or give the whole path "
            "(the cache's with --cache-dir or BEI_CACHE_DIR)."
        ) from error


def within(folder: Path, name: str) -> Path:
    """The path of ``name`` inside ``folder``. Raises UnfitError if it leads outside.

    Links are followed inside the folder, and from a snapshot of the hub's cache to its blobs.
    """
    _check_name(name)
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise UnfitError(f"{_shown(name)} leads nowhere ({error})") from error
    if not any(target.is_relative_to(place) for place in (home, *_blobs(home))):
        raise UnfitError(f"{_shown(name)} is a link that leads out of its folder: put the file itself there")
    return path


def _check_name(name: str) -> None:
    try:
        sizes = [len(part.encode()) for part in name.split("/")]
    except UnicodeEncodeError as error:
        raise UnfitError(f"{_shown(name)} is no text") from error
    if "\0" in name:
        raise UnfitError(f"{_shown(name)} has a NUL byte in it")
    if name.startswith("/") or ".." in name.split("/"):
        raise UnfitError(f"{_shown(name)} leads out of its folder")
    if max(sizes) > _MOST_NAME_BYTES or sum(sizes) + len(sizes) > _MOST_PATH_BYTES:
        raise UnfitError(f"{_shown(name)} is longer than a path may be")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else f"{name[:77]}...")


def _blobs(home: Path) -> Sequence[Path]:
    """The folder that a hub snapshot's links lead to: ``models--a--b/snapshots/COMMIT`` lies beside
    ``models--a--b/blobs``."""
    return [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"][:1]


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Raise UnfitError if ``path`` exists and is not a regular file of at most ``most_bytes``."""
    try:
        found = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise UnfitError("it is a link to a file that is not there") from None
        return
    except (OSError, ValueError, RuntimeError) as error:
        raise UnfitError(f"it cannot be looked at ({error})") from error
    _check_kind(found, most_bytes)


def _check_kind(found: os.stat_result, most_bytes: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise UnfitError("it is a directory, no regular file")
    if not stat.S_ISREG(found.st_mode):
        raise UnfitError("it is no regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise UnfitError(f"it has {found.st_size:,} bytes, more than the {most_bytes:,} that are read")


def open_regular(path: Path, most_bytes: int = MOST_JSON_BYTES) -> BinaryIO:
    """The regular file ``path`` of at most ``most_bytes``, open for reading.

    Devices, pipes and directories are refused, and not waited for. Raises UnfitError, OSError.
    """
    check_regular(path, most_bytes)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_kind(os.fstat(descriptor), most_bytes)  # it may be another file by now
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """The content of the regular file ``path``. Raises UnfitError, before reading, if it is too large; OSError."""
    with open_regular(path, most_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most_bytes) + 1)  # Python allocates the size that is requested
    if len(content) > size:
        raise UnfitError("it grew while it was read")
    return content


def check_unpacked(path: Path, most_bytes: int) -> None:
    """Raise UnfitError if ``path`` is not a zip archive, or declares more than ``most_bytes`` unpacked.

    Readers extract no more than the declared size of each part.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(part.file_size for part in archive.infolist())
    except zipfile.BadZipFile as error:
        raise UnfitError(f"it is no archive ({error})") from error
    if size > most_bytes:
        raise UnfitError(f"it has {size:,} bytes when it is unpacked, more than the {most_bytes:,} that are read")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` for JSON. Raises UnfitError for duplicate keys, which parsers read differently."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content and content[key] != value:
            raise UnfitError(f"it has the key {_shown(key)} twice, with two values")
        content[key] = value
    return content


def unlisted(folder: Path, listed: Sequence[str]) -> Iterator[str]:
    """The files below ``folder`` whose relative paths are not ``listed``, and links to folders without listed files."""
    known = set(listed)
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in sorted((*files, *links)):
            path = os.path.relpath(os.path.join(root, name), folder)
            is_known = path in known or any(one.startswith(f"{path}/") for one in (known if name in links else ()))
            if not is_known:
                yield path
