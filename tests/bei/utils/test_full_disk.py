"""Full disks are called so, and files are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from bei.errors import ConfigError, DiskFullError
from bei.utils import full_disk as module
from bei.utils.full_disk import full_disk, naming_full_disk, write_whole


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_an_error_of_a_full_disk_names_the_disk(error: Exception, tmp_path: Path) -> None:
    def write() -> None:
        try:
            raise error
        except Exception as cause:
            raise ConfigError("The graph was refused.") from cause

    with pytest.raises(DiskFullError, match=f"The disk of {tmp_path} is full: free space"), naming_full_disk(tmp_path):
        write()


def test_a_library_that_does_not_say_why_is_asked_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("iostream error")
    assert full_disk(error, tmp_path) is None
    assert full_disk(error, tmp_path, needed_bytes=1 << 62) is not None
    monkeypatch.setattr(module, "_is_full", lambda place: place == tmp_path)
    assert str(tmp_path) in str(full_disk(error, tmp_path))


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), naming_full_disk(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert full_disk(KeyboardInterrupt(), tmp_path) is None


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    write_whole(file, b"former")
    real = Path.write_bytes

    def half(path: Path, content: Any) -> int:
        real(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(DiskFullError, match=str(tmp_path)):
        write_whole(file, b"the next one")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert file.read_bytes() == b"former"


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", b"content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"content"
    write_whole(Path("/dev/null"), b"content")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("name", ["nowhere/job.prom", "file/job.prom"])
def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"'{tmp_path / name}'"):
        write_whole(tmp_path / name, b"content")
