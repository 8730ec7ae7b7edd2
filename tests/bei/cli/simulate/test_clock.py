"""Events run in order."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.cli.simulate.clock import SimulatedClock


@given(st.lists(st.integers(0, 5), max_size=20))
def test_events_happen_in_the_order_of_their_times_and_of_one_instant_as_they_were_set(times: list[int]) -> None:
    clock = SimulatedClock()
    seen: list[tuple[float, int]] = []
    for number, when in enumerate(times):
        clock.at(when, partial(lambda number: seen.append((clock.now_s, number)), number))
    clock.run()
    assert seen == sorted((float(when), number) for number, when in enumerate(times))


def test_an_event_may_set_another_but_not_in_the_past() -> None:
    clock = SimulatedClock()
    seen: list[float] = []
    clock.at(1.0, lambda: clock.at(2.5, lambda: seen.append(clock.now_s)))
    clock.run()
    assert seen == [2.5]
    for when in (2.0, float("nan")):
        with pytest.raises(ValueError, match=r"already"):
            clock.at(when, lambda: None)
