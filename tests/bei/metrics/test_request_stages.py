"""Stages of a request are contiguous from its headers to its answer, whatever its inputs do concurrently."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.metrics.request_stages import MOST_STAGES, InputStep, Stage, ends_of_steps, stages_of, totals_us

Times = st.floats(0, 100, allow_nan=False)


@st.composite
def input_steps(draw: st.DrawFn) -> list[InputStep]:
    return [InputStep(*sorted(draw(st.tuples(Times, Times, Times)))) for _ in range(draw(st.integers(0, 60)))]


def of_steps(*steps: tuple[float, float, float], accepted_s: float = 1.0, ended_s: float = 100.0) -> list[Stage]:
    ends = [*ends_of_steps([InputStep(*step) for step in steps], accepted_s), ("render", ended_s)]
    return stages_of(0.0, [("parse", accepted_s), *ends], ended_s)


def in_seconds(stages: list[Stage]) -> list[tuple[str, float, float]]:
    return [(name, begun_us / 1e6, ended_us / 1e6) for name, begun_us, ended_us in stages]


def test_one_step_is_tokenization_queue_and_inference() -> None:
    assert in_seconds(of_steps((2, 5, 9), ended_s=10)) == [
        ("parse", 0, 1),
        ("tokenization", 1, 2),
        ("queue", 2, 5),
        ("inference", 5, 9),
        ("render", 9, 10),
    ]


def test_a_moment_belongs_to_the_stage_that_is_nearest_to_the_answer() -> None:
    # The first chunk runs from 3 to 6 while the second is tokenized until 5; that waits from then on.
    assert in_seconds(of_steps((2, 3, 6), (5, 8, 9), ended_s=9)) == [
        ("parse", 0, 1),
        ("tokenization", 1, 2),
        ("queue", 2, 3),
        ("inference", 3, 6),
        ("queue", 6, 8),
        ("inference", 8, 9),
        ("render", 9, 9),
    ]


def test_between_two_steps_it_is_tokenized_until_something_waits() -> None:
    names = [name for name, *_ in of_steps((2, 3, 4), (7, 8, 9))]
    assert names == ["parse", "tokenization", "queue", "inference", "tokenization", "queue", "inference", "render"]
    assert totals_us(of_steps((2, 3, 4), (7, 8, 9)))["tokenization"] == (1 + 3) * 1_000_000


def test_steps_side_by_side_are_one_inference() -> None:
    found = totals_us(of_steps((1, 2, 10), (1, 3, 5), (1, 10, 12), ended_s=12))
    assert found == {"parse": 1_000_000, "tokenization": 0, "queue": 1_000_000, "inference": 10_000_000, "render": 0}


def test_what_takes_no_time_is_shown_once() -> None:
    assert [name for name, *_ in of_steps((1, 1, 1), ended_s=1)] == [
        *("parse", "tokenization", "queue", "inference", "render")
    ]


@given(input_steps(), Times, Times)
def test_stages_lie_end_to_end_and_add_up(steps: list[InputStep], accepted_s: float, ended_s: float) -> None:
    ends = [("parse", accepted_s), *ends_of_steps(steps, accepted_s), ("render", ended_s)]
    stages = stages_of(0.0, ends, ended_s)
    assert len(stages) <= MOST_STAGES
    assert stages[0].begun_us == 0
    assert stages[-1].ended_us == round(ended_s * 1e6)
    assert all(before.ended_us == after.begun_us for before, after in pairwise(stages))
    assert all(stage.begun_us <= stage.ended_us for stage in stages)
    assert sum(totals_us(stages).values()) == round(ended_s * 1e6)


@pytest.mark.parametrize("num_steps", [10, 46, 47, 1_000])
def test_of_many_steps_each_stage_keeps_its_time(num_steps: int) -> None:
    steps = [(1.0, 2.0 + 2 * step, 3.0 + 2 * step) for step in range(num_steps)]
    end_s = steps[-1][2]
    stages = of_steps(*steps, ended_s=end_s)
    assert len(stages) <= MOST_STAGES
    assert (num_steps < 47) == (sum(name == "inference" for name, *_ in stages) == num_steps)
    assert totals_us(stages) == {
        **{"parse": 1_000_000, "tokenization": 0, "queue": num_steps * 1_000_000},
        **{"inference": num_steps * 1_000_000, "render": 0},
    }
    assert all(before.ended_us == after.begun_us for before, after in pairwise(stages))
