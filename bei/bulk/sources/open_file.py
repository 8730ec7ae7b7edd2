"""Opens an input file: unpacked, and with a watch on each read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import IO, Any, cast

from bei.bulk.file_systems import FileSystem, plain_errors
from bei.bulk.watchdog import watched_store
from bei.errors import JobInputError

_BUFFER_BYTES = 1 << 16
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


@contextmanager
def opened_file(file_system: FileSystem, path: str) -> Iterator[IO[bytes]]:
    """The content of ``path``. Raises JobInputError."""
    with reaching(path), ExitStack() as stack:
        with watched_store(path), plain_errors():
            raw = stack.enter_context(file_system.open(path, "rb"))
        stream: IO[bytes] = stack.enter_context(io.BufferedReader(_WatchedReads(path, raw), _BUFFER_BYTES))
        if path.lower().endswith(COMPRESSIONS):
            stream = stack.enter_context(closing(_unpacked(path, stream)))
        yield stream


@contextmanager
def reaching(path: str) -> Iterator[None]:
    """A context in which errors of a file system become JobInputError."""
    try:
        yield
    except JobInputError:
        raise
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise JobInputError(
            f"{path} cannot be read: {reason}. Check that it is there, whole and of this format, or leave it out."
        ) from error


def _unpacked(path: str, stream: IO[bytes]) -> IO[bytes]:
    from fsspec.compression import compr
    from fsspec.core import get_compression

    return cast("IO[bytes]", compr[get_compression(path, "infer")](stream, mode="rb"))


class _WatchedReads(io.RawIOBase):
    """Single reads of ``raw``, each of which must return. Reading on after a place in a packed file is many of them."""

    def __init__(self, path: str, raw: Any) -> None:
        super().__init__()
        self._path = path
        self._raw = raw

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with watched_store(self._path), plain_errors():
            return int(self._raw.readinto(buffer))

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        return int(self._raw.seek(place, whence))

    def tell(self) -> int:
        return int(self._raw.tell())
