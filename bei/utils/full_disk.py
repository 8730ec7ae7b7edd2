"""Writing files whole or not at all, and telling that a disk is full from other errors."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bei.errors import DiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = tuple(os.strerror(number) for number in _FULL)  # as libraries in C++ and Rust quote them
_TRIED_BYTES = 1 << 16


def full_disk(error: BaseException, folder: Path, needed_bytes: int = 0) -> DiskFullError | None:
    """The error that says that ``folder``, or the folder of temporary files, is full, if that is what ``error`` came
    from; else None.

    Some libraries say only that they could not write. Call it before what was written is removed; where the library
    has removed it, ``needed_bytes`` is what it tried to write into ``folder``.
    """
    if not isinstance(error, Exception):
        return None
    found = next((place for place in (folder, Path(tempfile.gettempdir())) if _is_full(place)), None)
    if found is None and needed_bytes and folder.is_dir() and needed_bytes > shutil.disk_usage(folder).free:
        found = folder
    if found is None and not any(_says_so(one) for one in _chain(error)):
        return None
    return DiskFullError(
        f"The disk of {found or folder} is full: free space there, or choose another place. Nothing half-written is "
        "kept."
    )


@contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """A context in which errors from a full disk become DiskFullError, which names ``folder``."""
    try:
        yield
    except Exception as error:  # some libraries only say that they could not write; others are raised again
        if (full := full_disk(error, folder)) is not None:
            raise full from error
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write ``path``, or leave it as it was. What is there and is no regular file (/dev/stdout) is written to.

    Raises DiskFullError, OSError.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()
    partial = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        with naming_full_disk(path.parent):
            partial.write_bytes(content)
            os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error  # which was asked for
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return isinstance(error, DiskFullError) or any(text in str(error) for text in _TEXTS)


def _is_full(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * _TRIED_BYTES)
    except OSError as error:
        return error.errno in _FULL
    return False
