"""Errors that came from a lack of memory or threads, in their causes too."""

from __future__ import annotations

import errno
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bei.errors import EngineError
from bei.utils.scarce_resources import scarce_resource


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), r"no memory left for this process \(MemoryError\): raise its limit \(ulimit -v"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory left"),
        (RuntimeError("core.cpp:117:\n std::bad_alloc"), r"no memory left for this process \(std::bad_alloc\)"),
        (ImportError("libx.so: failed to map segment from shared object"), "no memory left"),
        (RuntimeError("can't start new thread"), r"No thread or process can be started \(can't start new thread\)"),
        (OSError(errno.EFBIG, "File too large"), r"No file may become so large.*ulimit -f"),
        (RuntimeError("File too large (os error 27)"), "No file may become so large"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "No thread or process can be started"),
    ],
)
def test_what_the_process_lacks_is_told_with_what_to_do(error: Exception, message: str) -> None:
    outer = EngineError("The engine cannot be loaded.")
    outer.__cause__ = error
    for one in (error, outer):
        found = scarce_resource(one)
        assert found is not None
        assert re.search(message, found)


def test_other_errors_are_left_alone() -> None:
    assert scarce_resource(ValueError("CUDA out of memory")) is None
    assert scarce_resource(KeyError("x")) is None


_LOADED = """
from pathlib import Path
from bei.utils.scarce_resources import prepare_for_scarcity
def is_loaded(): return "libgcc_s" in Path("/proc/self/maps").read_text()
first = is_loaded(); prepare_for_scarcity(); print(first, is_loaded())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries load nothing late")
def test_the_unwinder_is_loaded_before_memory_is_scarce() -> None:
    ended = subprocess.run([sys.executable, "-c", _LOADED], check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("error", [BlockingIOError(errno.EAGAIN, "no"), EngineError("no such format")])
def test_where_the_address_space_is_used_up_it_is_what_is_lacking(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for room, is_full in ((1 << 20, True), (1 << 30, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, room=room: (used + room, used + room))
        assert ("no memory left" in (scarce_resource(error) or "")) == is_full


def test_memory_that_does_not_even_suffice_to_look_is_what_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(_: Path) -> str:
        raise MemoryError

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(Path, "read_text", read_text)
    assert "no memory left" in (scarce_resource(ImportError("numpy")) or "")
