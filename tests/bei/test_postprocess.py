"""finish_embeddings: slice, then unit length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bei.postprocess import finish_embeddings

Rows = npt.NDArray[np.float32]
_values = st.floats(-(2.0**60), 2.0**60, width=32).map(lambda value: 0.0 if abs(value) < 2**-30 else value)
_rows = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=_values)


@given(rows=_rows, data=st.data(), normalize=st.booleans())
def test_the_result_is_contiguous_float32_of_the_asked_width(rows: Rows, data: st.DataObject, normalize: bool) -> None:
    dimensions = data.draw(st.one_of(st.none(), st.integers(1, rows.shape[1])))
    finished = finish_embeddings(rows, dimensions, normalize)
    assert finished.shape == (len(rows), dimensions or rows.shape[1])
    assert finished.dtype == np.float32
    assert finished.flags.c_contiguous
    if not normalize:
        np.testing.assert_array_equal(finished, rows[:, :dimensions])


@given(rows=_rows, data=st.data())
def test_normalized_rows_keep_their_direction_and_have_unit_length(rows: Rows, data: st.DataObject) -> None:
    dimensions = data.draw(st.integers(1, rows.shape[1]))
    exact = rows[:, :dimensions].astype(np.float64)
    for row, kept in zip(finish_embeddings(rows, dimensions, True), exact, strict=True):
        norm = np.linalg.norm(kept)
        np.testing.assert_allclose(row, kept / norm if norm else kept, rtol=1e-6, atol=1e-12)


def test_a_row_of_zeros_stays_zero_and_is_not_nan() -> None:
    np.testing.assert_array_equal(finish_embeddings(np.zeros((2, 3), np.float32), None, True), np.zeros((2, 3)))


@pytest.mark.parametrize("normalize", [True, False])
def test_the_engine_s_rows_are_not_written_to(normalize: bool) -> None:
    rows = np.array([[3.0, 4.0]], np.float32)
    finish_embeddings(rows, 1, normalize)
    np.testing.assert_array_equal(rows, [[3.0, 4.0]])
