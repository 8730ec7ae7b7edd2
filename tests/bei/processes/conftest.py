"""Addresses for a test's length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bei.processes import lending
from tests.bei.processes.chain import Place, places


@pytest.fixture
def place() -> Iterator[Place]:
    """Where one process accepts, or several, one after the other."""
    with places(1) as (made,):
        yield made


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of any size lie in shared memory."""
    monkeypatch.setattr(lending, "_SMALL_BYTES", 0)
