"""Pages of mapped files are dropped, and come back when they are read."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import pytest

from bei.utils.mapped_files import release_pages, releasing_pages

MEGABYTES = 16


def resident_kb(file: Path) -> int:
    """Memory that this process's mappings of ``file`` hold."""
    total, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_of_file = line.endswith(str(file))
        elif is_of_file and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_dropped_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a name with blanks.bin"
    content = bytes(range(256)) * (MEGABYTES * 4096)
    path.write_bytes(content)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == content
        assert resident_kb(path) > MEGABYTES * 1000
        release_pages(path)
        assert resident_kb(path) < 1000
        assert mapped[:] == content


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_dropped_while_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(MEGABYTES << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        with releasing_pages(path):
            assert sum(mapped[:]) == 0
            give_up_s = time.monotonic() + 30
            while resident_kb(path) > 1000:
                assert time.monotonic() < give_up_s
            assert sum(mapped[:]) == 0
        assert resident_kb(path) < 1000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_may_have_been_written_to_stays(tmp_path: Path) -> None:
    path = tmp_path / "copied.bin"
    path.write_bytes(b"0" * 8192)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:4] = b"mine"
        release_pages(path)
        assert mapped[:4] == b"mine"


def test_a_file_that_is_not_mapped_is_no_error(tmp_path: Path) -> None:
    release_pages(tmp_path / "missing")
