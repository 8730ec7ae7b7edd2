"""The output folder of a job: files appear in it whole or not at all, on a disk or in a bucket."""

from __future__ import annotations

import errno
import functools
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from bei.bulk.file_systems import file_system_of, plain_errors
from bei.bulk.watchdog import watched_store
from bei.errors import JobError
from bei.utils.durable_files import sync_folder
from bei.utils.full_disk import naming_full_disk

_PARTIAL = ".partial"
# Name of the file and of where the process runs (``_here``), which may have dots both.
_WRITTEN = re.compile(r"\.(?P<by>.+)\.(?P<process>[0-9]+)\.[0-9a-f]+\.partial")
# No part takes so long to be written.
_OLD_S = 86_400.0
_LOCAL = "file://"
# Errors of a link where the file system has none: FAT and vboxsf, gcsfuse, others.
_NO_LINKS = frozenset((errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK))


class JobFolder(Protocol):
    """``name``: the path of a file below the folder, with ``/``. Raises JobError, DiskFullError."""

    @property
    def shown(self) -> str:
        """Its path, for messages."""

    def read(self, name: str) -> bytes | None:
        """The content; None: no such file."""

    def opened(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """To read parts of it. Raises FileNotFoundError."""

    def exists(self, name: str) -> bool: ...

    def is_empty(self) -> bool:
        """True if there is no file in it but half-written ones, or no folder."""

    def create(self, name: str, content: bytes) -> bool:
        """Write it unless it is there; False: it is. Of several who try one gets True."""

    def commit(self, name: str, content: bytes | memoryview) -> None:
        """Write it whole, also over what is there. When it returns, the file outlasts a loss of power."""

    def remove(self, name: str) -> None:
        """Remove it, if it is there."""

    def clean(self) -> None:
        """Remove what a process that was killed has left half-written."""


def folder_at(path: str) -> JobFolder:
    """The folder ``path``, which need not be there: of this machine, or a URL of fsspec. Raises JobError."""
    if "://" not in path:
        return LocalJobFolder(Path(path).expanduser())
    if path.startswith(_LOCAL):
        return LocalJobFolder(Path(path.removeprefix(_LOCAL)))
    with _reaching(path):
        file_system, root = file_system_of(path)
        return RemoteJobFolder(path, file_system, root)


class LocalJobFolder:
    """On a disk, or a network's file system with renames."""

    def __init__(self, path: Path) -> None:
        self.shown = str(path)
        self._path = path

    def read(self, name: str) -> bytes | None:
        with _reaching(self.shown), suppress(FileNotFoundError):
            return (self._path / name).read_bytes()
        return None

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        if not self.exists(name):
            raise FileNotFoundError(name)
        # ValueErrors are the reader's: pyarrow's of a damaged file are.
        with _reaching(self.shown, errors=(OSError,)), (self._path / name).open("rb") as stream:
            yield stream

    def exists(self, name: str) -> bool:
        # ``Path.is_file`` is False for some errors too, and since Python 3.14 for all.
        with _reaching(self.shown), suppress(FileNotFoundError, NotADirectoryError):
            return stat.S_ISREG((self._path / name).stat().st_mode)
        return False

    def is_empty(self) -> bool:
        with _reaching(self.shown):
            return not self._path.is_dir() or all(path.name.endswith(_PARTIAL) for path in self._path.iterdir())

    def create(self, name: str, content: bytes) -> bool:
        with self._written(name, content) as (partial, path):
            try:
                os.link(partial, path)  # as a whole, and not over another one
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise JobError(
                    f"{self.shown} is on a file system without hard links ({error.strerror}), where processes cannot "
                    "agree on one plan: give a folder on another one, or, of a bucket that is mounted, its URL (gs://, "
                    "s3://)."
                ) from error
            finally:
                partial.unlink()
        return True

    def commit(self, name: str, content: bytes | memoryview) -> None:
        with self._written(name, content) as (partial, path):
            os.replace(partial, path)

    def remove(self, name: str) -> None:
        with _reaching(self.shown):
            (self._path / name).unlink(missing_ok=True)

    def clean(self) -> None:
        for path in [*self._path.rglob(f"*{_PARTIAL}")]:
            with suppress(OSError):
                if not _is_alive(path):
                    path.unlink()

    @contextmanager
    def _written(self, name: str, content: bytes | memoryview) -> Iterator[tuple[Path, Path]]:
        """``content`` under a name of this process beside its own; both are on the disk when the context is left."""
        path = self._path / name
        partial = path.with_name(f".{path.name}.{_here()}.{os.getpid()}.{secrets.token_hex(4)}{_PARTIAL}")
        try:
            with _reaching(self.shown, len(content)):
                path.parent.mkdir(parents=True, exist_ok=True)
                with naming_full_disk(path.parent):
                    with partial.open("wb") as stream:
                        stream.write(content)
                        stream.flush()
                        os.fsync(stream.fileno())
                    yield partial, path
                    sync_folder(path.parent)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


class RemoteJobFolder:
    """Objects of a bucket: a PUT is whole or not at all."""

    def __init__(self, url: str, file_system: Any, root: str) -> None:
        self.shown = url
        self._file_system = file_system
        self._root = root.rstrip("/")

    def read(self, name: str) -> bytes | None:
        with _reaching(self.shown), suppress(FileNotFoundError):
            return bytes(self._file_system.cat_file(self._at(name)))
        return None

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        if not self.exists(name):
            raise FileNotFoundError(name)
        # ValueErrors are the reader's: pyarrow's of a damaged file are.
        with _reaching(self.shown, errors=(OSError,)), self._file_system.open(self._at(name), "rb") as stream:
            yield stream

    def exists(self, name: str) -> bool:
        with _reaching(self.shown):
            self._file_system.invalidate_cache()
            with suppress(FileNotFoundError):  # ``isfile`` is False for any error
                return bool(self._file_system.info(self._at(name))["type"] == "file")
        return False

    def is_empty(self) -> bool:
        with _reaching(self.shown):
            self._file_system.invalidate_cache()
            try:
                return not self._file_system.ls(self._root, detail=False)
            except FileNotFoundError:
                return True

    def create(self, name: str, content: bytes) -> bool:
        with _reaching(self.shown):
            try:
                self._file_system.pipe_file(self._at(name), content, mode="create")
            except FileExistsError:
                return False
            return True

    def commit(self, name: str, content: bytes | memoryview) -> None:
        # Not through an open file: leaving its context by an error would upload what was written so far.
        with _reaching(self.shown, len(content)):
            self._file_system.pipe_file(self._at(name), bytes(content))

    def remove(self, name: str) -> None:
        if self.exists(name):  # a right to remove files is needed where there is one
            with _reaching(self.shown), suppress(FileNotFoundError):
                self._file_system.rm_file(self._at(name))

    def clean(self) -> None:
        """Nothing is ever half-written."""

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def _reaching(
    shown: str, num_bytes: int = 0, errors: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
    """A context in which errors of a file system become JobError, for a call that writes ``num_bytes``."""
    try:
        with watched_store(shown, num_bytes), plain_errors():
            yield
    except errors as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise JobError(
            f"{shown} cannot be used: {reason}. Check that it is a folder that this user may read and write, or name "
            "another."
        ) from error


@functools.cache
def _here() -> str:
    """Where a process's number means that process: containers may share the name of a host, and have numbers of their
    own. Linux tells both."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8])
        parts.append(re.sub(r"\D", "", os.readlink("/proc/self/ns/pid")))
    return "-".join(parts)


def _is_alive(partial: Path) -> bool:
    """False where ``partial`` is of a process that would be seen from here and has ended, or nobody has written to it
    for a day. True also for files that are no job's."""
    written = _WRITTEN.fullmatch(partial.name)
    if written is None:
        return True
    if time.time() - partial.stat().st_mtime > _OLD_S:
        return False
    if not written["by"].endswith(f".{_here()}"):
        return True
    try:
        os.kill(int(written["process"]), 0)
    except PermissionError:  # it runs, for another user
        return True
    except (OSError, OverflowError):
        return False
    return True
