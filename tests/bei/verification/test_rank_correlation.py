"""Rank statistics against values computed by hand, and their properties with ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.verification.rank_correlation import average_ranks, kendall_tau, spearman

series = st.lists(st.integers(0, 6), min_size=2, max_size=12)


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    np.testing.assert_array_equal(average_ranks(np.array([3.0, 1.0, 3.0, 3.0, 0.0])), [4, 2, 4, 4, 1])
    np.testing.assert_array_equal(average_ranks(np.array([7, 7])), [1.5, 1.5])


# x and y, rho, tau-b. The first: d = (1, -1, 1, -1, 0), so rho = 1 - 6 * 4 / 120; two of ten pairs are ordered
# otherwise. The second: ranks (1, 2.5, 2.5, 4) and (1, 3, 2, 4): rho = 4.5 / sqrt(4.5 * 5); five pairs ordered alike,
# none otherwise, five of six ordered at all on the left, six on the right.
CASES = [
    ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8, 0.6),
    ([1, 2, 2, 3], [1, 3, 2, 4], 4.5 / math.sqrt(22.5), 5 / math.sqrt(30)),
    ([1, 2, 3], [3, 2, 1], -1.0, -1.0),
    ([1, 1, 2], [1, 2, 2], 0.5, 0.5),
]


@pytest.mark.parametrize(("first", "second", "rho", "tau"), CASES)
def test_known_values(first: list[int], second: list[int], rho: float, tau: float) -> None:
    assert spearman(np.array(first), np.array(second)) == pytest.approx(rho)
    assert kendall_tau(np.array(first), np.array(second)) == pytest.approx(tau)


@given(first=series, data=st.data())
def test_tau_is_what_counting_pairs_gives(first: list[int], data: st.DataObject) -> None:
    second = data.draw(st.lists(st.integers(0, 6), min_size=len(first), max_size=len(first)))
    pairs = [(i, j) for i in range(len(first)) for j in range(i)]
    signs = [(np.sign(first[i] - first[j]), np.sign(second[i] - second[j])) for i, j in pairs]
    left, right = (sum(one[side] != 0 for one in signs) for side in (0, 1))
    if left and right:
        expected = float(sum(a * b for a, b in signs)) / math.sqrt(left * right)
        assert kendall_tau(np.array(first), np.array(second)) == pytest.approx(expected)


@given(values=series)
def test_a_series_agrees_with_itself_exactly_and_with_any_growing_function_of_it(values: list[int]) -> None:
    numbers = np.array(values, np.float64)
    for statistic in (spearman, kendall_tau):
        assert statistic(numbers, numbers) == 1.0
        assert statistic(numbers, np.exp(numbers)) == 1.0


@pytest.mark.parametrize("statistic", [spearman, kendall_tau])
def test_what_has_no_order_agrees_with_what_has_none(statistic: object) -> None:
    flat, rising = np.zeros(4), np.arange(4.0)
    assert statistic(flat, flat + 1) == 1.0  # type: ignore[operator]
    assert statistic(flat, rising) == 0.0  # type: ignore[operator]
    assert statistic(rising, flat) == 0.0  # type: ignore[operator]
