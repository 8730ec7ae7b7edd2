"""Files that somebody replaces while they are read: by rename, by writing over them, by a link in their place."""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Of inotify.
CLOSED, OPENED = 0x10, 0x20  # not written to
_EVENT_BYTES = 4096
_POLL_S = 0.05


def by_rename(file: Path, content: bytes) -> None:
    """Another file has its name."""
    other = file.parents[2] / "other"
    other.write_bytes(content)
    other.rename(file)


def by_writing(file: Path, content: bytes) -> None:
    """The same file has other bytes, as many."""
    with file.open("r+b") as opened:
        opened.write(content)


def by_link(file: Path, content: bytes) -> None:
    """A link has its name."""
    other = file.parents[2] / "other"
    other.write_bytes(content)
    file.unlink()
    file.symlink_to(other)


WAYS: dict[str, Callable[[Path, bytes], None]] = {"rename": by_rename, "writing": by_writing, "link": by_link}


@contextmanager
def replaced_when(event: int, file: Path, replace: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Call ``replace`` the first time that ``event`` (``OPENED``, ``CLOSED``) happens to ``file`` in this block, in
    another thread; yields whether it was called. The most patient of attackers: he knows when a file was read."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init()
    assert libc.inotify_add_watch(watch, os.fsencode(file), event) >= 0
    is_over, is_done = threading.Event(), threading.Event()

    def act() -> None:
        while not is_over.is_set():
            if select.select([watch], [], [], _POLL_S)[0]:
                os.read(watch, _EVENT_BYTES)
                replace()
                is_done.set()
                return

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    try:
        yield is_done.is_set
    finally:
        is_over.set()
        thread.join()
        os.close(watch)
