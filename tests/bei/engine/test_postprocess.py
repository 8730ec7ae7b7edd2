"""unit_length: direction kept, length one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bei.core import ScoreFunction
from bei.engine.postprocess import apply_function, unit_length

Rows = npt.NDArray[np.float32]
_values = st.floats(-(2.0**60), 2.0**60, width=32).map(lambda value: 0.0 if abs(value) < 2**-30 else value)
_rows = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=_values)


@given(rows=_rows)
def test_rows_keep_their_direction_and_have_unit_length(rows: Rows) -> None:
    unit = unit_length(rows)
    assert unit.dtype == np.float32
    assert unit.shape == rows.shape
    for row, exact in zip(unit, rows.astype(np.float64), strict=True):
        norm = np.linalg.norm(exact)
        np.testing.assert_allclose(row, exact / norm if norm else exact, rtol=1e-6, atol=1e-12)


@given(rows=_rows, data=st.data())
def test_a_cut_row_is_the_same_whether_it_had_unit_length_before_or_not(rows: Rows, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, rows.shape[1]))
    kept = np.abs(rows[:, :width]).max(axis=1, initial=0.0) >= 1e-6 * np.abs(rows).max(axis=1)
    once, twice = unit_length(rows[:, :width]), unit_length(unit_length(rows)[:, :width])
    np.testing.assert_allclose(twice[kept], once[kept], rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_stays_zero_and_is_not_nan() -> None:
    np.testing.assert_array_equal(unit_length(np.zeros((2, 3), np.float32)), np.zeros((2, 3)))


def test_nan_and_inf_are_not_hidden() -> None:
    rows = np.array([[np.nan, 1], [np.inf, 1], [3, 4]], np.float32)
    with np.errstate(invalid="ignore"):
        unit = unit_length(rows)
    assert np.isfinite(unit).all(axis=1).tolist() == [False, False, True]


def test_the_engine_s_rows_are_not_written_to() -> None:
    rows = np.array([[3.0, 4.0]], np.float32)
    unit_length(rows)
    np.testing.assert_array_equal(rows, [[3.0, 4.0]])


_logits = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=5),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


@given(logits=_logits)
def test_softmax_gives_probabilities_in_the_logits_order_however_large_they_are(logits: Rows) -> None:
    scores = apply_function(logits, "softmax")
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores.sum(axis=-1), 1.0, rtol=1e-5)
    best = np.take_along_axis(scores, logits.argmax(axis=-1, keepdims=True), axis=-1)
    np.testing.assert_array_equal(best[..., 0], scores.max(axis=-1))


@given(logits=_logits)
def test_sigmoid_gives_each_label_its_own_probability_however_large_the_logit_is(logits: Rows) -> None:
    scores, opposite = apply_function(logits, "sigmoid"), apply_function(-logits, "sigmoid")
    assert scores.dtype == np.float32
    assert ((scores >= 0) & (scores <= 1)).all()
    np.testing.assert_allclose(scores + opposite, 1.0, rtol=1e-6)
    small = np.clip(logits.astype(np.float64), -30, 30)
    np.testing.assert_allclose(apply_function(small.astype(np.float32), "sigmoid"), 1 / (1 + np.exp(-small)), rtol=1e-5)


def test_no_function_leaves_the_logits_alone() -> None:
    logits = np.array([[-5, 7]], np.float32)
    assert apply_function(logits, "none") is logits


@given(logits=_logits)
def test_the_functions_of_cross_encoders_keep_the_order_of_logits_of_any_size(logits: Rows) -> None:
    functions: dict[ScoreFunction, Callable[[float], float]] = {
        "tanh": math.tanh,
        "relu": lambda value: max(value, 0.0),
        "softplus": lambda value: max(value, 0.0) + math.log1p(math.exp(-abs(value))),
    }
    for name, function in functions.items():
        scores = apply_function(logits, name)
        assert scores.dtype == np.float32
        expected = [function(value) for value in logits.ravel().tolist()]
        np.testing.assert_allclose(scores.ravel(), expected, rtol=1e-6, atol=1e-30)
        assert (np.diff(scores.ravel()[np.argsort(logits, axis=None)]) >= 0).all()
