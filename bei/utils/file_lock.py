"""Locks on files, between processes: ``flock`` on files that may be removed while others wait for them.

The system frees a lock when its process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

# What a file system that must not be written to says.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class FileLock:
    """A lock that is held until ``close``. A context manager."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def touch(self) -> None:
        """Make now the file's time of change, where that is allowed."""
        with suppress(OSError):
            os.utime(self._descriptor)

    def close(self) -> None:
        """Let others have it. Once."""
        os.close(self._descriptor)


def acquire(path: Path, *, shared: bool = False) -> FileLock:
    """Lock the file ``path``, which is made if it is not there, alone or ``shared`` with others who do so. Waits.

    Raises OSError where the file can neither be made nor read.
    """
    lock = _acquire(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    assert lock is not None, "nothing but LOCK_NB gives up"
    return lock


def try_acquire(path: Path) -> FileLock | None:
    """Lock the file ``path`` alone; None where somebody has it. Raises OSError as ``acquire`` does."""
    return _acquire(path, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _acquire(path: Path, operation: int) -> FileLock | None:
    while True:
        descriptor = _opened(path)
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
        os.close(descriptor)  # somebody has removed it meanwhile: the next one to come would lock another file


def _opened(path: Path) -> int:
    """For writing, as network file systems want it; for reading where nothing may be written, which is enough here."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
