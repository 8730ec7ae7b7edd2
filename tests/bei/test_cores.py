"""How many cores a process counts."""

from __future__ import annotations

import os

import pytest

from bei.cores import usable_cores


def test_an_affinity_mask_narrows_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert usable_cores() == 3


@pytest.mark.parametrize(("count", "usable"), [(6, 6), (None, 1)])
def test_without_masks_the_machine_s_cores_count(
    monkeypatch: pytest.MonkeyPatch, count: int | None, usable: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores() == usable
