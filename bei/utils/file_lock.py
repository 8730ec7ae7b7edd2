"""File locks between processes: ``flock`` on lock files that may be removed while other processes wait for them.

The kernel releases a lock when its process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

# Errors of a read-only file system.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class FileLock:
    """A lock, held until ``close``. A context manager."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def touch(self) -> None:
        """Set the file's modification time to now, if permitted."""
        with suppress(OSError):
            os.utime(self._descriptor)

    def close(self) -> None:
        """Release the lock. Call it once."""
        os.close(self._descriptor)


def acquire(path: Path, *, shared: bool = False) -> FileLock:
    """Wait for a lock on the file ``path``, created if missing: exclusive, or ``shared``.

    Raises OSError if the file can be neither created nor read.
    """
    lock = _acquire(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    assert lock is not None, "nothing but LOCK_NB gives up"
    return lock


def try_acquire(path: Path, *, create: bool = True) -> FileLock | None:
    """An exclusive lock on the file ``path``, or None if another process holds it.

    Raises OSError like ``acquire``, and FileNotFoundError if the file is missing and not to be created.
    """
    return _acquire(path, fcntl.LOCK_EX | fcntl.LOCK_NB, create=create)


def _acquire(path: Path, operation: int, *, create: bool = True) -> FileLock | None:
    while True:
        descriptor = _opened(path, create=create)
        try:
            fcntl.flock(descriptor, operation)
            if _is_at(path, descriptor):
                return FileLock(path, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed by another process: later processes would lock a new file


def _opened(path: Path, *, create: bool) -> int:
    """Open for writing, as network file systems require for exclusive locks; read-only on a read-only file system."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise error from None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
