"""Which repetitions of a benchmark count."""

from __future__ import annotations

import pytest

from benchmarks.harness import rounds
from benchmarks.harness.rounds import MOST_FOREIGN, alternate, least_disturbed


@pytest.mark.parametrize(
    ("loads", "kept", "num_left_out"),
    [
        ([0.0, MOST_FOREIGN, 0.5], "ab", 0),
        ([0.5, 0.0, 0.4, 0.01], "bd", 2),
        ([0.2, 0.5, 0.1, 0.3, 0.0], "ac", 2),  # no more than twice as many: the least disturbed
        ([0.2, 0.5, 0.0, 0.3, 0.0], "ac", 2),
    ],
)
def test_a_repetition_that_others_disturb_is_made_again_but_not_for_ever(
    loads: list[float], kept: str, num_left_out: int
) -> None:
    told: list[int] = []
    made = iter(zip("abcde", loads, strict=False))

    def measure(number: int) -> tuple[str, float]:
        told.append(number)
        return next(made)

    assert least_disturbed(2, measure) == (list(kept), num_left_out)
    assert told == [sum(load <= MOST_FOREIGN for load in loads[:index]) for index in range(2 + num_left_out)]


def test_sides_are_measured_forwards_and_backwards_and_disturbed_repetitions_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreign = iter([0.0, 0.0, 0.0, 0.4, 0.0, 0.0])
    monkeypatch.setattr(rounds, "with_foreign_load", lambda measure: (measure(), next(foreign)))
    measured: list[str] = []

    def side(name: str) -> float:
        measured.append(name)
        return float(len(measured))

    results = alternate({"a": lambda: side("a"), "b": lambda: side("b")}, repetitions=2)
    assert "".join(measured) == "ab" + "ab" + "ba" + "ba"  # warm-up, first, disturbed, second
    assert results["a"]["values"] == [3.0, 8.0]
    assert results["b"]["values"] == [4.0, 7.0]
    assert results["a"]["repetitions left out"] == 1
