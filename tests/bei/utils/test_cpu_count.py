"""The number of cores of a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bei.utils.cpu_count import usable_cores


def test_an_affinity_mask_narrows_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert usable_cores(Path("no cgroup")) == 3


@pytest.mark.parametrize(("count", "usable"), [(6, 6), (None, 1)])
def test_without_masks_the_machine_s_cores_count(
    monkeypatch: pytest.MonkeyPatch, count: int | None, usable: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores(Path("no cgroup")) == usable


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu.max": "6400000 100000"}, 8),
        ({}, 8),
    ],
)
def test_a_container_s_quota_narrows_the_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content + "\n")
    assert usable_cores(tmp_path) == usable
