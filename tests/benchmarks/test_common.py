"""Which repetitions of a benchmark count."""

from __future__ import annotations

import pytest

from benchmarks import common
from benchmarks.common import Quiet, alternate


def test_a_repetition_that_others_disturb_is_made_again_but_not_for_ever() -> None:
    quiet = Quiet(repetitions=2)
    assert quiet.keeps([0.0, Quiet.MOST])
    assert [quiet.keeps([0.0, 0.5]) for _ in range(5)] == [False, False, False, False, True]
    assert quiet.num_disturbed == 4


def test_sides_are_measured_forwards_and_backwards_and_disturbed_repetitions_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreign = iter([0.0, 0.0, 0.0, 0.4, 0.0, 0.0])
    monkeypatch.setattr(common, "with_foreign_load", lambda measure: (measure(), next(foreign)))
    measured: list[str] = []

    def side(name: str) -> float:
        measured.append(name)
        return float(len(measured))

    results = alternate({"a": lambda: side("a"), "b": lambda: side("b")}, repetitions=2)
    assert "".join(measured) == "ab" + "ab" + "ba" + "ba"  # warm-up, first, disturbed, second
    assert results["a"]["values"] == [3.0, 8.0]
    assert results["b"]["values"] == [4.0, 7.0]
    assert results["a"]["repetitions made again"] == 1
