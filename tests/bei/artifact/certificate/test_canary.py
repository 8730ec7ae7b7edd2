"""The stored form of the canary's answer, and the tolerance for other machines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bei.artifact.certificate.canary import BY_COLUMN, canary_row, deviation
from bei.core import Float32Array

_values = st.floats(-1000, 1000, width=32).map(lambda value: 0.0 if abs(value) < 1e-3 else value)
_answers = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=2, max_side=6), elements=_values)
_outputs = st.sampled_from(["embedding", "sparse", "token_embedding", *BY_COLUMN])


@given(answer=_answers, output=_outputs)
def test_a_canary_never_deviates_from_itself(answer: Float32Array, output: str) -> None:
    row = canary_row(answer, output)
    assert row.dtype == np.float64
    assert row.shape == answer.shape[-1:]
    assert deviation(row, row, output) is None


@given(answer=_answers, factor=st.floats(0.01, 100))
def test_of_a_vector_the_direction_counts(answer: Float32Array, factor: float) -> None:
    row, scaled = (canary_row(rows.astype(np.float32), "embedding") for rows in (answer, answer * factor))
    if row.any():  # zeros have none
        assert np.linalg.norm(row) == pytest.approx(1.0)
        np.testing.assert_allclose(scaled, row, atol=1e-5)


def test_of_an_output_per_token_the_first_token_is_kept() -> None:
    answer = np.array([[3, 4], [5, 6]], np.float32)
    np.testing.assert_allclose(canary_row(answer, "token_embedding"), [0.6, 0.8])
    np.testing.assert_array_equal(canary_row(answer, "token_logits"), [3, 4])


@pytest.mark.parametrize(
    ("actual", "expected", "output", "found"),
    [
        ([1, 0], [0, 1], "embedding", "cosine 0.0000"),
        ([-1, 0], [1, 0], "embedding", "cosine -1.0000"),
        ([0, 0], [1, 0], "sparse", "cosine 0.0000"),
        ([1, 0], [0, 0], "sparse", "cosine 0.0000"),
        ([0, 0], [0, 0], "sparse", None),
        ([0.5, 2.0], [0.5, 2.09], "logits", None),
        ([0.5, 2.0], [0.5, 2.11], "logits", "difference of 0.1100"),
        ([0.5, -10.0], [0.9, -10.0], "logits", None),  # a twentieth of the largest
        ([0.5, -10.0], [1.1, -10.0], "logits", "difference of 0.6000"),
        ([2.0], [-2.0], "logits", "difference of 4.0000"),  # one column has a cosine of one with any of its sign
    ],
)
def test_deviations_are_named(actual: list[float], expected: list[float], output: str, found: str | None) -> None:
    answer = deviation(np.array(actual, np.float64), np.array(expected, np.float64), output)
    assert answer is None if found is None else answer is not None and found in answer


@pytest.mark.parametrize("output", ["embedding", "logits"])
def test_a_canary_of_nan_deviates_from_a_good_one(output: str) -> None:
    good = canary_row(np.array([3, -4], np.float32), output)
    bad = canary_row(np.array([np.nan, np.inf], np.float32), output)
    assert np.isfinite(bad).all()
    assert deviation(bad, good, output) is not None


def test_another_width_is_a_deviation_and_no_crash() -> None:
    for output in ("embedding", "logits"):
        assert deviation(np.ones(3), np.ones(2), output) is not None
