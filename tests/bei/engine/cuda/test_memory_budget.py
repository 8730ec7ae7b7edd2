"""The GPU memory limit of all engines of a process: PyTorch's allocator gets what the weights leave."""

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


def test_the_allocator_may_have_what_weights_leave(torch: Any, shares: list[float]) -> None:
    budget, first, second = Budget(), Owner(), Owner()
    budget.hold(torch, first, 100, 600)
    budget.hold(torch, second, 200, 600)  # or the build that replaces the first
    budget.drop(torch, first)
    budget.drop(torch, first)
    assert shares == [0.5, 0.3, 0.4]


def test_weights_that_are_more_are_refused_and_not_counted(torch: Any, shares: list[float]) -> None:
    budget, first, third = Budget(), Owner(), Owner()
    budget.hold(torch, first, 100, 600)
    with pytest.raises(EngineError, match=r"need 600 bytes, .*other models included, and gpu_megabytes gives 600"):
        budget.hold(torch, Owner(), 500, 600)
    budget.hold(torch, third, 100, 600)
    assert shares == [0.5, 0.4]


def test_without_a_bound_the_allocator_is_left_alone(torch: Any, shares: list[float]) -> None:
    budget, owner = Budget(), Owner()
    budget.hold(torch, owner, 100, None)
    budget.drop(torch, owner)
    budget.hold(torch, owner, 100, 5000)  # more than there is
    assert shares == [1.0]
