"""Builds that do not fit into memory are refused."""

from __future__ import annotations

import pytest

from bei.errors import VerificationError
from bei_build import memory


def test_where_nothing_is_known_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.require(10**15, "A model")


def test_what_does_not_fit_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2_000_000_000)
    memory.require(2_000_000_000, "A model")
    with pytest.raises(VerificationError, match=r"A model takes 3\.0 GB of memory, and 2\.0 GB .* --no-verify"):
        memory.require(3_000_000_000, "A model")
