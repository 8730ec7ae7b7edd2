"""Buckets: how much is let in over any time, and when to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.server.auth.rate_limit import Bucket


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def taken(bucket: Bucket, amount: float = 1.0) -> bool:
    if bucket.wait_s(amount) > 0:
        return False
    bucket.take(amount)
    return True


def test_a_second_s_worth_comes_at_once_and_the_rest_at_the_rate() -> None:
    clock = Clock()
    bucket = Bucket(5.0, clock)
    assert [taken(bucket) for _ in range(7)] == [True] * 5 + [False] * 2
    assert bucket.wait_s(1.0) == pytest.approx(0.2)
    clock.now_s += bucket.wait_s(1.0)
    assert [taken(bucket) for _ in range(2)] == [True, False]
    clock.now_s += 1000.0  # what is not used is not kept for later
    assert [taken(bucket) for _ in range(7)] == [True] * 5 + [False] * 2


def test_less_than_one_a_second_lets_one_in_and_the_next_when_its_time_has_come() -> None:
    clock = Clock()
    bucket = Bucket(0.1, clock)
    assert taken(bucket)
    assert bucket.wait_s(1.0) == pytest.approx(10.0)
    clock.now_s += 9.9
    assert not taken(bucket)
    clock.now_s += 0.1
    assert taken(bucket)


def test_what_is_larger_than_the_bucket_comes_in_and_is_paid_for_afterwards() -> None:
    clock = Clock()
    bucket = Bucket(100.0, clock)
    assert taken(bucket, 1000.0)
    assert bucket.wait_s(1.0) == pytest.approx(9.01)
    clock.now_s += 9.5
    assert taken(bucket, 50.0)
    assert not taken(bucket, 50.0)


@given(
    rate=st.floats(0.01, 1e4),
    steps=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 1e4)), min_size=1, max_size=50),
)
def test_over_any_time_no_more_than_the_rate_the_bucket_and_one_request_are_let_in(
    rate: float, steps: list[tuple[float, float]]
) -> None:
    clock = Clock()
    bucket = Bucket(rate, clock)
    total, largest, began_s = 0.0, 0.0, clock.now_s
    for pause_s, amount in steps:
        clock.now_s += pause_s
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            clock.now_s += wait_s * (1 + 1e-9)
        assert bucket.wait_s(amount) <= 1e-6  # who comes when told is let in
        bucket.take(amount)
        total, largest = total + amount, max(largest, amount)
    assert total <= (clock.now_s - began_s) * rate + max(1.0, rate) + largest + 1e-3 * rate + 1e-3


def test_a_bucket_goes_on_from_another_and_holds_no_more_than_its_own() -> None:
    clock = Clock()
    old, larger, smaller = Bucket(10.0, clock), Bucket(20.0, clock), Bucket(2.0, clock)
    for _ in range(7):
        assert taken(old)
    larger.go_on_from(old)
    smaller.go_on_from(old)
    assert [taken(larger) for _ in range(4)] == [True, True, True, False]
    assert [taken(smaller) for _ in range(3)] == [True, True, False]
