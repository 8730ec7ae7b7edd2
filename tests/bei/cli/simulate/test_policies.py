"""The batching rules of the peers, as their descriptions have them."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from bei.cli.simulate.policies import FifoTokenBudget, FixedBatches, Policy
from bei.core import Encoding, Limits
from bei.port import Lane
from bei.scheduler.queue import Entry, Waiter

LIMITS = Limits(20_000, 256, 512)


def entries(*lengths: int, lane: Lane = "bulk") -> list[Entry]:
    waiter = Waiter(0, 0, inf, frozenset())
    return [Entry(Encoding(np.zeros(length, np.int32)), waiter, lane, 0.0, 0.0) for length in lengths]


def steps(policy: Policy) -> list[list[int]]:
    found = []
    while step := policy.cut(0.0):
        found.append([entry.num_tokens for entry in step])
    return found


def test_fifo_keeps_the_order_of_arrival_over_lanes_and_a_text_that_does_not_fit_ends_the_batch() -> None:
    policy = FifoTokenBudget(LIMITS, max_batch_tokens=100)
    policy.add(entries(60, 50, 10, 300), 0.0)
    policy.add(entries(1, lane="interactive"), 0.0)
    assert steps(policy) == [[60], [50, 10], [300], [1]]


def test_fifo_has_tei_s_budget_within_the_engine_s_limits() -> None:
    for limits, most in ((LIMITS, 16_384), (Limits(4096, 256, 512), 4096), (Limits(20_000, 5, 512), 5 * 256)):
        policy = FifoTokenBudget(limits)
        policy.add(entries(*[256] * 100), 0.0)
        assert sum(steps(policy)[0]) == most


@pytest.mark.parametrize("waiting", [1, 20, 32, 63])
def test_fewer_texts_than_two_batches_stay_in_the_order_of_arrival(waiting: int) -> None:
    policy = FixedBatches(LIMITS)
    lengths = list(range(waiting, 0, -1))
    policy.add(entries(*lengths), 0.0)
    assert steps(policy)[0] == lengths[:32]


def test_up_to_eight_batches_of_32_are_sorted_by_length_together() -> None:
    policy = FixedBatches(LIMITS)
    lengths = list(range(300, 0, -1))
    policy.add(entries(*lengths), 0.0)
    found = steps(policy)
    assert found[:8] == [sorted(lengths[:256])[start : start + 32] for start in range(0, 256, 32)]
    assert [len(step) for step in found] == [32] * 9 + [12]
    assert found[8] == lengths[256:288]


def test_a_batch_of_32_is_cut_where_the_engine_s_limits_are() -> None:
    policy = FixedBatches(Limits(512, 16, 512))
    policy.add(entries(*[200] * 5), 0.0)
    assert steps(policy) == [[200, 200], [200, 200], [200]]
    policy.add(entries(*[1] * 20), 0.0)
    assert [len(step) for step in steps(policy)] == [16, 4]


def test_texts_that_come_later_wait_behind_batches_that_were_sorted() -> None:
    policy = FixedBatches(LIMITS, batch_size=2)
    policy.add(entries(9, 8, 7, 6), 0.0)
    first = policy.cut(0.0)
    policy.add(entries(1, lane="interactive"), 0.0)
    assert [entry.num_tokens for entry in first] == [6, 7]
    assert steps(policy) == [[8, 9], [1]]
