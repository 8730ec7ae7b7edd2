"""Label agreement and KL divergence, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bei.core import ScoreFunction
from bei.verification.label_agreement import kl_divergence, label_agreement


def logits_of(*rows: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.log(np.array(rows, np.float32))


def test_label_agreement_is_the_share_of_rows_with_the_same_highest_label() -> None:
    expected = np.array([[1, 2, 3], [3, 2, 1], [0, 5, 0], [9, 8, 7]], np.float32)
    actual = np.array([[0, 0, 1], [1, 2, 1], [2, 3, 0], [8, 7, 9]], np.float32)
    assert label_agreement(actual, expected) == 0.5
    assert label_agreement(expected, expected) == 1.0


def test_softmax_divergence_is_from_the_reference() -> None:
    expected, actual = logits_of([0.5, 0.5], [0.9, 0.1]), logits_of([0.25, 0.75], [0.9, 0.1])
    by_hand = (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2  # the second row agrees
    assert kl_divergence(actual, expected, "softmax") == pytest.approx(by_hand, rel=1e-5)
    turned = kl_divergence(expected, actual, "softmax")
    assert turned is not None
    assert abs(turned - by_hand) > 0.001


def test_what_all_logits_share_does_not_count_in_a_softmax() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    assert kl_divergence(logits + 1000, logits, "softmax") == pytest.approx(0.0, abs=1e-4)


def test_sigmoid_divergences_of_labels_are_added() -> None:
    """Logit log(3) is a probability of three quarters, 0 is a half."""
    expected, actual = np.array([[math.log(3), 0.0]]), np.array([[0.0, math.log(3)]])
    first = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    second = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl_divergence(actual, expected, "sigmoid") == pytest.approx(first + second)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_large_logits_have_finite_divergences(function: str) -> None:
    expected = np.array([[1000.0, -1000.0]])
    assert kl_divergence(expected, expected, function) == 0.0  # type: ignore[arg-type]
    assert kl_divergence(-expected, expected, function) == pytest.approx(2000.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", ["none", "tanh", "relu", "softplus"])
def test_scores_that_are_no_probabilities_have_no_divergence(function: ScoreFunction) -> None:
    assert kl_divergence(np.ones((2, 3)), np.ones((2, 3)), function) is None
