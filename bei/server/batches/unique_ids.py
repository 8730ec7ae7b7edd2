"""Finds a ``custom_id`` that a batch has twice, in bounded memory whatever the number of lines."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

# Digests by their first byte: each part is looked at alone.
_NUM_PARTS = 256
_DIGEST_BYTES = 16
# Parts in memory are written to files once they have so many bytes together: of two million lines.
_MOST_BYTES = 32_000_000


class UniqueIds:
    """Digests of ids. A context manager; its files are in ``folder``, without names: nothing is left there."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._parts = [bytearray() for _ in range(_NUM_PARTS)]
        self._files: list[IO[bytes]] = []
        self._closed = ExitStack()

    def __enter__(self) -> UniqueIds:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.close()

    def add(self, custom_id: str) -> None:
        """Count one."""
        digest = digest_of(custom_id)
        self._parts[digest[0]] += digest
        self._num_bytes += _DIGEST_BYTES
        if self._num_bytes >= self._most_bytes:
            self._write_out()

    def _write_out(self) -> None:
        if not self._files:
            self._files = [self._closed.enter_context(_scratch(self._folder)) for _ in range(_NUM_PARTS)]
        for part, file in zip(self._parts, self._files, strict=True):
            file.write(part)
            part.clear()
        self._num_bytes = 0

    def repeated(self) -> set[bytes]:
        """The digests of ids that were added more than once, of one part at least if there are any: all of them may be
        as many as the ids."""
        for number, part in enumerate(self._parts):
            content = bytes(part)
            if self._files:
                self._files[number].seek(0)
                content += self._files[number].read()
            found, counts = np.unique(np.frombuffer(content, f"V{_DIGEST_BYTES}"), return_counts=True)
            if (counts > 1).any():
                return {digest.tobytes() for digest in found[counts > 1]}
        return set()


def _scratch(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)


def digest_of(custom_id: str) -> bytes:
    """Two ids have the same one only if they are the same."""
    return hashlib.blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
