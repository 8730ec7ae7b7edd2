"""The files of an artifact, opened once: what was hashed is what is read, by whichever process and however late.

Between a file's hash and its load somebody may put another file under its name. So each file is opened once, hashed
through its descriptor, and later opened by that descriptor (``/proc/self/fd``), whatever lies under its name by then. A
descriptor does not guard against writing into the same file: for that there are sealed copies in memory
(``open_files``). Other processes get the descriptors along with the order to open the model.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from bei.errors import ArtifactError, ArtifactFileMissingError, ArtifactHashMismatchError, ArtifactManifestError
from bei.utils.free_memory import available_bytes
from bei.utils.units import shown_size
from bei.utils.untrusted_files import MOST_JSON_BYTES

# The most files of an artifact that are held: Linux passes 253 descriptors with a message.
MOST_FILES = 250

_DESCRIPTORS = Path("/proc/self/fd")
_CHUNK = 1 << 20
_MOST_NAME_BYTES = 249  # of a file in memory
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_IN_MEMORY, _REMOVED = "/memfd:", " (deleted)"  # around the name of a file in memory, as Linux shows it
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class FileInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the artifact; ``path`` is relative to its root."""

    path: str
    size: int
    sha256: str


class Folder(Protocol):
    """A folder from which an engine reads files by their names: a ``Path``, or a ``HeldFolder``."""

    def __truediv__(self, name: str, /) -> Path: ...


class HeldFiles:
    """Open files of the artifact in ``folder``: ``files`` and their descriptors, which it closes.

    They are closed by ``close``, or with the last reference.
    """

    def __init__(self, folder: Path, files: Sequence[FileInfo], descriptors: Sequence[int]) -> None:
        self._folder = folder
        self._files = {info.path: info for info in files}
        self._descriptors = dict(zip(self._files, descriptors, strict=True))
        self._written = {name: _last_write(held) for name, held in self._descriptors.items()}
        self.close = weakref.finalize(self, _forget, self._descriptors)

    def path(self, name: str) -> Path:
        """A path that opens the held file ``name``, in this process. Raises ArtifactFileMissingError."""
        if name not in self._descriptors:
            raise ArtifactFileMissingError(
                f"{self._folder} lacks {name}, or its manifest does not list it. Build the artifact again."
            )
        return _DESCRIPTORS / str(self._descriptors[name])

    def below(self, folder: str) -> HeldFolder:
        """The files in ``folder``."""
        return HeldFolder(self, folder)

    def names(self, folder: str) -> list[str]:
        """The names of the files in ``folder``, relative to it."""
        return [name.removeprefix(f"{folder}/") for name in self._files if name.startswith(f"{folder}/")]

    def check(self) -> None:
        """Raise ArtifactHashMismatchError if a file was written over since it was hashed: to be called after reading.

        Files that were written to, by their times, are hashed again. This finds mistakes; it is no defence.
        """
        for name, held in self._descriptors.items():
            written, info = _last_write(held), self._files[name]
            if written == self._written[name]:
                continue
            if _sha256(held) != info.sha256:
                raise ArtifactHashMismatchError(
                    f"{self._folder / name} was written over after it was verified. Replace an artifact as a whole "
                    "folder, as 'bei build' does: copy it anew from its source, and restart the server."
                )
            self._written[name] = written

    @contextmanager
    def lent(self) -> Iterator[list[int]]:
        """Duplicates of the descriptors, in the order of the files. They stay open within the block even if ``close``
        is called meanwhile."""
        duplicates: list[int] = []
        try:
            duplicates += map(os.dup, self._descriptors.values())
            yield duplicates
        finally:
            _close(duplicates)


class HeldFolder:
    """``folder / name`` opens a held file, whatever lies in the folder by now."""

    def __init__(self, files: HeldFiles, folder: str) -> None:
        self._files = files
        self._folder = folder

    def __truediv__(self, name: str) -> Path:
        return self._files.path(f"{self._folder}/{name}")

    @contextmanager
    def linked(self) -> Iterator[Path]:
        """A temporary folder of links to the files, for libraries that read a folder, in processes of their own too."""
        with tempfile.TemporaryDirectory(prefix="bei-") as folder:
            for name in self._files.names(self._folder):
                link = Path(folder, name)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(f"/proc/{os.getpid()}/fd/{(self / name).name}")
            yield Path(folder)


@contextmanager
def on_disk(folder: Folder) -> Iterator[Path]:
    """``folder`` as one that libraries can list, within the block."""
    if isinstance(folder, HeldFolder):
        with folder.linked() as path:
            yield path
    else:
        yield folder / "."


def open_files(folder: Path, files: Sequence[FileInfo], *, sealed: bool = False) -> HeldFiles:
    """Open ``files`` of the artifact in ``folder``, and check their sizes and hashes.

    ``sealed``: hold copies in memory that nobody can write to, except of files that only root may write (and this
    process is not root's). Raises ArtifactFileMissingError, ArtifactManifestError (no regular file),
    ArtifactHashMismatchError, ArtifactError if the copies exceed the memory, and OSError.
    """
    descriptors: list[int] = []
    try:
        for info in files:
            descriptors.append(_opened(folder, info))
        to_copy = [sealed and not _only_root_writes(os.fstat(held)) for held in descriptors]
        _check_memory(folder, sum(info.size for info, is_due in zip(files, to_copy, strict=True) if is_due))
        for index, info in enumerate(files):
            if to_copy[index]:
                source, descriptors[index] = descriptors[index], _sealed_copy(descriptors[index], folder, info)
                os.close(source)
            if _sha256(descriptors[index]) != info.sha256:
                raise _differs(folder, info)
        return HeldFiles(folder, files, descriptors)
    except BaseException:
        _close(descriptors)
        raise


def read_file(folder: Path, info: FileInfo) -> bytes:
    """The content of a file of at most ``MOST_JSON_BYTES``. Raises what ``open_files`` raises."""
    if info.size > MOST_JSON_BYTES:
        raise ArtifactManifestError(
            f"{folder} lists {info.path} with {info.size:,} bytes, more than the {MOST_JSON_BYTES:,} that are read. "
            "Build it again."
        )
    with open(_opened(folder, info), "rb") as file:
        content = file.read(info.size)
    if hashlib.sha256(content).hexdigest() != info.sha256:
        raise _differs(folder, info)
    return content


def shown_path(path: Path) -> str:
    """``path`` for a message: for a held file, the one by which its descriptor was opened."""
    if path.parent != _DESCRIPTORS:
        return str(path)
    return os.path.realpath(path).removeprefix(_IN_MEMORY).removesuffix(_REMOVED)


def _opened(folder: Path, info: FileInfo) -> int:
    """A descriptor of a regular file of the right size."""
    try:
        # O_NONBLOCK: nobody waits for a pipe that was put in the file's place.
        held = os.open(folder / info.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ArtifactFileMissingError(
            f"{folder} lacks {info.path}, which its manifest lists. Copy the artifact anew from its source, or build "
            "it again."
        ) from None
    found = os.fstat(held)
    if stat.S_ISREG(found.st_mode) and found.st_size == info.size:
        return held
    os.close(held)
    if stat.S_ISREG(found.st_mode):
        raise _differs(folder, info)
    raise ArtifactManifestError(f"{folder / info.path} is no regular file. Copy the artifact anew from its source.")


def _differs(folder: Path, info: FileInfo) -> ArtifactHashMismatchError:
    return ArtifactHashMismatchError(
        f"{folder / info.path} is not the file that was built (size or sha256 differs). "
        "Copy the artifact anew from its source, or build it again."
    )


def _only_root_writes(found: os.stat_result) -> bool:
    """True if neither this process's user nor another one may write the file; the bits of a group cover its ACL."""
    return found.st_uid == 0 and not found.st_mode & _WRITABLE_BY_OTHERS and os.geteuid() != 0


def _check_memory(folder: Path, size: int) -> None:
    available = available_bytes()
    if available is not None and size > available:
        raise ArtifactError(
            f"{folder} is copied into memory, as a signature is required and its files can be written to: that takes "
            f"{shown_size(size)}, and {shown_size(available)} are available. Free some; or have the files owned by "
            "root, writable by nobody else, and run the server as another user: they are not copied then."
        )


def _sealed_copy(source: int, folder: Path, info: FileInfo) -> int:
    """A copy of the file ``source`` in memory. It is sealed before it is hashed: nobody has written to what was hashed,
    through ``/proc`` either."""
    name = os.fsencode(f"{folder}/{info.path}")[-_MOST_NAME_BYTES:]
    copy = os.memfd_create(os.fsdecode(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = info.size
        while left and (sent := os.sendfile(copy, source, None, left)):
            left -= sent
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _sha256(descriptor: int) -> str:
    sha, offset = hashlib.sha256(), 0
    while chunk := os.pread(descriptor, _CHUNK, offset):
        sha.update(chunk)
        offset += len(chunk)
    return sha.hexdigest()


def _last_write(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _forget(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
