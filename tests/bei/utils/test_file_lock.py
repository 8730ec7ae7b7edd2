"""Locks that are still locks when their files are removed, and where files may not be written."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from bei.utils import file_lock
from bei.utils.file_lock import acquire, try_acquire
from tests.support.engines import DEADLINE_S


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_one_has_it_alone(file: Path) -> None:
    with acquire(file):
        assert try_acquire(file) is None
    lock = try_acquire(file)
    assert lock is not None
    lock.close()


def test_a_file_that_is_not_to_be_created_is_not(file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        try_acquire(file, create=False)
    assert not file.exists()
    with acquire(file):
        assert try_acquire(file, create=False) is None


def test_several_share_it_and_nobody_has_it_alone_meanwhile(file: Path) -> None:
    with acquire(file, shared=True):
        with acquire(file, shared=True):
            assert try_acquire(file) is None
        assert try_acquire(file) is None
    assert try_acquire(file) is not None


def test_who_waits_for_a_file_that_is_removed_gets_the_next_one(file: Path) -> None:
    """Otherwise a later process would lock another file, and both would hold the lock."""
    first = acquire(file)
    got: list[file_lock.FileLock] = []
    waiting = threading.Thread(target=lambda: got.append(acquire(file)))
    waiting.start()
    assert not got
    file.unlink()
    first.close()
    waiting.join(DEADLINE_S)
    assert file.is_file()
    assert try_acquire(file) is None, "the one who waited has it"
    got[0].close()


def test_it_says_when_it_was_touched_last(file: Path) -> None:
    with acquire(file) as lock:
        os.utime(file, (1, 1))
        lock.touch()
        assert file.stat().st_mtime > 1


def test_where_nothing_can_be_written_a_file_that_is_there_can_be_locked(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image whose file system is read-only."""
    file.touch()
    system_open = os.open

    def read_only(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return system_open(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    with acquire(file, shared=True), acquire(file, shared=True):
        assert try_acquire(file) is None
    with pytest.raises(OSError, match="Read-only file system"):
        acquire(file.with_name("absent"))


def test_a_folder_that_is_not_there_is_no_reason_to_try_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        acquire(tmp_path / "absent" / "lock")
