"""The last minute: counts last sixty seconds, and percentiles are close to the measured values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.metrics.last_minute import (
    GROUPS,
    WINDOW_S,
    Percentiles,
    RecentRequests,
    RecentSteps,
    request_counts,
    step_sums,
    summed,
)


class Clock:
    """Stands still until told to advance."""

    def __init__(self, now_s: float = 1000.25) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def test_requests_are_counted_by_lane_and_status() -> None:
    recent = RecentRequests(Clock())
    recent.add("interactive", 200, 0.010)
    recent.add("interactive", 429, 0.001)
    recent.add("bulk", 200, 1.0)
    recent.add(None, 404, 0.001)
    recent.add(None, 404, 0.001)
    counts = request_counts(recent.window())
    assert {group: found.answered for group, found in counts.items()} == {
        "interactive": {200: 1, 429: 1},
        "bulk": {200: 1},
        "other": {404: 2},
    }
    assert counts["other"].latency == Percentiles(None, None, None)  # no good answer


def test_times_are_of_good_answers_and_within_a_twentieth() -> None:
    recent = RecentRequests(Clock())
    for milliseconds in range(1, 101):
        recent.add("bulk", 200, milliseconds / 1000)
        recent.add("bulk", 500, 60.0)
    found = request_counts(recent.window())["bulk"].latency
    assert found == pytest.approx((0.050, 0.090, 0.099), rel=0.06)  # a bucket's half width, and a rank's step


@given(st.lists(st.floats(1e-4, 100), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_within_half_a_bucket_of_the_time_at_its_rank(times: list[float], share: float) -> None:
    recent = RecentRequests(Clock())
    for seconds in times:
        recent.add("interactive", 200, seconds)
    exact = sorted(times)[math.ceil(share * len(times)) - 1]
    found = dict(zip((0.5, 0.9, 0.99), request_counts(recent.window())["interactive"].latency, strict=True))[share]
    assert found == pytest.approx(exact, rel=0.046)


@pytest.mark.parametrize("seconds", [0.0, -1e-9, 1e-9, 1e6])
def test_times_beyond_the_buckets_are_in_the_first_or_the_last(seconds: float) -> None:
    recent = RecentRequests(Clock())
    recent.add("bulk", 200, seconds)
    (p50, *_) = request_counts(recent.window())["bulk"].latency
    assert p50 == pytest.approx(1e-4 if seconds < 1 else 105, rel=0.05)


def test_a_second_is_in_the_list_when_it_is_over_and_a_minute_later_gone() -> None:
    clock = Clock()
    recent = RecentRequests(clock)
    recent.add("bulk", 200, 0.1)
    assert request_counts(recent.window())["bulk"].answered == {200: 1}
    assert sum(request_counts(recent.window())["bulk"].answered_per_second) == 0
    for passed in range(1, WINDOW_S + 1):
        clock.now_s += 1
        found = request_counts(recent.window())["bulk"]
        assert found.answered_per_second.index(1) == WINDOW_S - passed
        assert found.p99_per_second[WINDOW_S - passed] == pytest.approx(0.1, rel=0.05)
        assert sum(value is not None for value in found.p50_per_second) == 1
        assert len(found.answered_per_second) == len(found.p50_per_second) == WINDOW_S
    clock.now_s += 1
    assert request_counts(recent.window())["bulk"].answered == {}


@given(st.lists(st.tuples(st.sampled_from([None, "interactive", "bulk"]), st.integers(0, 200)), max_size=40))
def test_only_the_last_minute_is_counted_whatever_the_pauses(events: list[tuple[None, int]]) -> None:
    clock = Clock(5.5)
    recent = RecentRequests(clock)
    added: list[tuple[str, float]] = []
    for lane, pause_s in events:
        clock.now_s += pause_s / 7
        recent.add(lane, 200, 0.01)
        added.append((lane or "other", clock.now_s))
    clock.now_s += 3
    for group in GROUPS:
        expected = sum(of == group and int(clock.now_s) - int(when) <= WINDOW_S for of, when in added)
        assert sum(request_counts(recent.window())[group].answered.values()) == expected


def test_how_much_time_is_covered() -> None:
    clock = Clock(1000.25)
    recent = RecentRequests(clock)
    clock.now_s = 1002.75
    assert recent.window().covered_s == 2.5
    clock.now_s = 2000.75
    assert recent.window().covered_s == WINDOW_S + 0.75


def test_steps_are_summed_up_for_a_minute() -> None:
    clock = Clock()
    recent = RecentSteps(clock)
    recent.add(4, 100, 160, 0.02)
    clock.now_s += 1
    recent.add(2, 50, 50, 0.01)
    clock.now_s += 1
    sums = step_sums(recent.window())
    assert (sums.steps, sums.sequences, sums.tokens, sums.slots) == (2, 6, 150, 210)
    assert sums.engine_s == pytest.approx(0.03)
    assert sums.tokens_per_second[-2:] == [100, 50]
    assert sums.covered_s == 2.0
    clock.now_s += WINDOW_S - 1
    assert (step_sums(recent.window()).steps, step_sums(recent.window()).tokens) == (1, 50)
    clock.now_s += 1
    assert (step_sums(recent.window()).steps, step_sums(recent.window()).engine_s) == (0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.sampled_from([200, 429, 500])), max_size=30))
def test_windows_of_several_processes_say_together_what_one_would_have_counted(
    events: list[tuple[int, int, int]],
) -> None:
    clock = Clock(1000.5)
    alone, alone_steps = RecentRequests(clock), RecentSteps(clock)
    parts = [(RecentRequests(clock), RecentSteps(clock)) for _ in range(3)]
    for process, pause, status in events:
        clock.now_s += pause / 10
        for requests, steps in ((alone, alone_steps), parts[process]):
            requests.add("bulk", status, pause / 100)
            steps.add(2, pause, 2 * pause, 0.5)
    windows = [(requests.window(), steps.window()) for requests, steps in parts]
    mine, mine_steps = windows[0]
    found = summed([mine, *(window.packed().unpacked_like(mine) for window, _ in windows[1:])])
    assert request_counts(found) == request_counts(alone.window())
    steps_found = summed([mine_steps, *(window.packed().unpacked_like(mine_steps) for _, window in windows[1:])])
    assert step_sums(steps_found) == step_sums(alone_steps.window())


@pytest.mark.parametrize(("behind", "expected"), [(0, 1), (1, 1), (WINDOW_S, 1), (WINDOW_S + 1, 0), (1000, 0)])
def test_what_was_answered_before_another_second_began_stays_in_its_second(behind: int, expected: int) -> None:
    clock = Clock()
    first, second = RecentRequests(clock), RecentRequests(clock)
    first.add("bulk", 200, 0.1)
    early = first.window()
    clock.now_s += behind
    found = summed([early, second.window()])
    assert found.second == int(clock.now_s)
    assert request_counts(found)["bulk"].answered.get(200, 0) == expected
    if expected:
        assert found.rows[-1 - behind].sum() == 2  # its status and its time
