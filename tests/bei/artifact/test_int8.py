from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.int8 import int8_of, largest_of, scaled
from bei.core import Float32Array
from bei.engine.postprocess import unit_length


def vectors_of(seed: int, count: int = 50, width: int = 96, outlier: float = 1.0) -> Float32Array:
    """Unit vectors; the first component of each is ``outlier`` times as large as the others."""
    drawn = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    drawn[:, 0] *= outlier
    return unit_length(drawn)


def mean_cosine(rounded: npt.NDArray[np.int8], vectors: Float32Array) -> float:
    return float(np.einsum("ij,ij->i", unit_length(rounded.astype(np.float32)), vectors).mean())


@given(seed=st.integers(0, 99), largest=st.floats(0.01, 1.0))
def test_a_component_is_its_nearest_step_and_signs_are_alike(seed: int, largest: float) -> None:
    vectors = vectors_of(seed)
    found = int8_of(vectors, largest)
    step = largest / 127
    kept = np.abs(vectors) <= largest
    assert np.abs(found * step - vectors)[kept].max(initial=0) <= step * 0.501
    assert set(np.abs(found[~kept]).tolist()) <= {127}
    assert np.array_equal(int8_of(-vectors, largest), -found)


@pytest.mark.parametrize("outlier", [1.0, 10.0])
def test_the_chosen_step_keeps_cosines_and_beats_the_whole_range(outlier: float) -> None:
    vectors = vectors_of(0, outlier=outlier)
    largest = largest_of(vectors)
    assert largest is not None
    chosen = mean_cosine(int8_of(vectors, largest), vectors)
    assert chosen >= mean_cosine(int8_of(vectors, 1.0), vectors)
    assert chosen > (0.9999 if outlier == 1.0 else 0.9997)
    assert float(f"{largest:.1e}") == largest


def test_dot_products_of_bytes_rank_as_those_of_vectors() -> None:
    queries, documents = vectors_of(1, count=20), vectors_of(2, count=200)
    largest = largest_of(documents)
    assert largest is not None
    exact = queries @ documents.T
    rounded = int8_of(queries, largest).astype(int) @ int8_of(documents, largest).astype(int).T
    best = exact.argmax(axis=1)
    assert (rounded[np.arange(20), best] >= rounded.max(axis=1) * 0.98).all()


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_vectors_without_a_size_have_no_step(value: float) -> None:
    assert largest_of(np.full((2, 4), value, np.float32)) is None


def test_vectors_that_are_cut_get_larger_components_but_never_above_one() -> None:
    assert scaled(0.2, 64, 16) == pytest.approx(0.4)
    assert scaled(0.2, 64, 1) == 1.0
