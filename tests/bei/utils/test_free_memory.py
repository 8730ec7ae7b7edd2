"""Available memory of the machine and of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.utils.free_memory import available_bytes


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  8000 kB\n")
    return path


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_the_systems_memory_counts_where_there_is_no_limit(meminfo: Path, tmp_path: Path) -> None:
    assert available_bytes(meminfo, tmp_path / "none") == 8000 * 1024
    limits = {"memory__max": "max\n", "memory__current": "5\n", "memory__stat": "file 1\n"}
    assert available_bytes(meminfo, write(tmp_path / "cgroup", **limits)) == 8000 * 1024


def test_a_containers_limit_counts_without_cached_files(meminfo: Path, tmp_path: Path) -> None:
    two = {"memory__max": "1000\n", "memory__current": "900\n", "memory__stat": "anon 300\nfile 600\n"}
    assert available_bytes(meminfo, write(tmp_path / "two", **two)) == 700
    one = {"memory__limit_in_bytes": "1000", "memory__usage_in_bytes": "900", "memory__stat": "total_cache 500"}
    write(tmp_path / "one" / "memory", **one)
    assert available_bytes(meminfo, tmp_path / "one") == 600


def test_where_the_system_says_nothing_it_is_not_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "missing", tmp_path / "missing") is None
