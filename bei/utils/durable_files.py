"""Files that are there after a power cut as they were before it, and never half-written."""

from __future__ import annotations

import os
from pathlib import Path

from bei.utils.full_disk import naming_full_disk


def write_durably(path: Path, content: bytes) -> None:
    """Replace ``path``: by a temporary file beside it that is on the disk before it takes the name.

    Only one process at a time may write ``path``. Raises DiskFullError, OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming_full_disk(path.parent):
            write_to_disk(partial, content)
            os.replace(partial, path)
            sync_folder(path.parent)
    except BaseException:  # raised again: nothing half-written is left
        partial.unlink(missing_ok=True)
        raise


def write_to_disk(path: Path, content: bytes) -> None:
    """Write ``path``, and return when its bytes are on the disk; ``sync_folder`` sees to its name."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names of the files in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
