"""The GPU memory limit of all engines of a process, which PyTorch's allocator keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bei.engine.cuda.memory_budget import Budget
from bei.errors import EngineError

TOTAL = 1000


@pytest.fixture
def shares() -> list[float]:
    """The fractions that the allocator was given, in order."""
    return []


@pytest.fixture
def torch(shares: list[float]) -> Any:
    cuda = SimpleNamespace(mem_get_info=lambda: (TOTAL // 2, TOTAL), set_per_process_memory_fraction=shares.append)
    return SimpleNamespace(cuda=cuda)


class Owner:
    """An engine's device."""


def test_the_allocator_has_the_limit_and_the_newest_one_counts(torch: Any, shares: list[float]) -> None:
    budget, first, second = Budget(), Owner(), Owner()
    budget.hold(torch, first, 100, 600)
    budget.hold(torch, second, 200, 700)  # or the build that replaces the first
    budget.drop(first)
    budget.drop(first)
    budget.hold(torch, first, 400, 700)
    assert shares == [0.6, 0.7, 0.7]


def test_weights_that_are_more_are_refused_and_not_counted(torch: Any, shares: list[float]) -> None:
    budget, first, third = Budget(), Owner(), Owner()
    budget.hold(torch, first, 100, 600)
    with pytest.raises(EngineError, match=r"need 600 bytes, .*other models included, and gpu_megabytes gives 600"):
        budget.hold(torch, Owner(), 500, 600)
    budget.hold(torch, third, 100, 600)
    assert shares == [0.6, 0.6]


def test_without_a_bound_the_allocator_is_left_alone(torch: Any, shares: list[float]) -> None:
    budget, owner = Budget(), Owner()
    budget.hold(torch, owner, 100, None)
    budget.drop(owner)
    budget.hold(torch, owner, 100, 5000)  # more than there is
    assert shares == [1.0]
