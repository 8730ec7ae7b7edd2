"""Rounding to a format, against the format's definition."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bei_build.onnx_graph.writer import GraphTypes, GraphWriter
from bei_build.quantization.emulation import session_of
from bei_build.quantization.rounding import round_rows, round_to, rounded_product
from bei_build.spec.dtypes import DType
from bei_build.spec.quantization import LARGEST, Format, LayerQuantization, Quantization, rounded, scales_of_rows

FORMATS: tuple[Format, ...] = ("fp8", "int8")
VALUES = arrays(np.float32, (3, 5), elements=st.floats(-1000, 1000, width=32))


@pytest.mark.parametrize("number_format", FORMATS)
@given(values=VALUES, scale=st.floats(2**-6, 2**6, width=32))
def test_what_is_rounded_stays_as_it_is(number_format: Format, values: np.ndarray, scale: float) -> None:
    once = round_to(values, scale, number_format)
    np.testing.assert_allclose(round_to(once, scale, number_format), once, rtol=1e-6)


@given(values=VALUES, scale=st.floats(2**-6, 2**6, width=32))
def test_int8_is_off_by_half_a_step_within_its_range(values: np.ndarray, scale: float) -> None:
    inside = np.abs(values) <= 127 * scale
    error = np.abs(round_to(values, scale, "int8") - values)
    assert (error[inside] <= 0.5001 * scale).all()


@given(values=VALUES)
def test_fp8_is_off_by_a_sixteenth_of_the_value_or_half_of_its_smallest_step(values: np.ndarray) -> None:
    """Three bits after the leading one; below 2^-6 the steps are 2^-9."""
    inside = np.abs(values) <= 448
    error = np.abs(round_to(values, 1.0, "fp8") - values)
    assert (error[inside] <= np.maximum(np.abs(values[inside]) / 16, 2.0**-10)).all()


@pytest.mark.parametrize("number_format", FORMATS)
def test_what_is_too_large_becomes_the_largest_number_and_never_nan(number_format: Format) -> None:
    values = np.array([1e9, -1e9, 449.0, 500.0], np.float32)
    rounded_values = round_to(values, 1.0, number_format)
    assert np.abs(rounded_values).tolist() == [LARGEST[number_format]] * 4


def test_the_largest_numbers_are_the_formats() -> None:
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.nanmax(numbers) == LARGEST["fp8"]
    assert LARGEST["int8"] == np.iinfo(np.int8).max


@pytest.mark.parametrize("number_format", FORMATS)
def test_rows_have_scales_of_their_own_and_rows_of_zeros_stay_zeros(number_format: Format) -> None:
    matrix = np.array([[1e-4, -2e-4], [1e4, 3e3], [0, 0]], np.float32)
    found = round_rows(matrix, number_format)
    np.testing.assert_allclose(found[:2], matrix[:2], rtol=0.07)
    assert not found[2].any()
    assert np.isfinite(scales_of_rows(matrix, "int8")).all()


def test_a_matrix_of_7_bits_has_numbers_of_which_two_products_fit_in_16() -> None:
    matrix = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    codes = np.rint(round_rows(matrix, "int8", bits=7) / scales_of_rows(matrix, "int8", bits=7)[:, None])
    assert np.abs(codes).max(axis=1).tolist() == [63.0] * 16
    assert 2 * 255 * 63 <= np.iinfo(np.int16).max < 2 * 255 * 65
    np.testing.assert_allclose(round_rows(matrix, "int8", bits=7), matrix, atol=np.abs(matrix).max() / 126)


def test_scales_keep_four_digits() -> None:
    assert rounded(1.23456789) == 1.235
    assert rounded(0.000123449) == 0.0001234


@pytest.mark.parametrize("per_token", [False, True])
def test_unsigned_numbers_begin_at_the_least_value(per_token: bool, tmp_path: Path) -> None:
    """The graph, and the product in numpy that chooses scales, against loops of this test's own."""
    random = np.random.default_rng(0)
    rows, matrix = random.uniform(-0.25, 4, (6, 12)).astype(np.float32), random.normal(size=(5, 12)).astype(np.float32)
    bias, factors, least, amax = random.normal(size=5).astype(np.float32), np.linspace(0.5, 2, 12), -0.17, 6.0
    layer = LayerQuantization(1.0 if per_token else amax, tuple(factors.tolist()), per_token=per_token, least=least)
    expected = np.zeros((6, 5))
    for row, found in zip(rows.astype(np.float64), expected, strict=True):
        above = np.maximum(row - least, 0) / factors
        step = (above.max() if per_token else amax) / 255
        codes = np.minimum(np.rint(above / step), 255)
        for index, weights in enumerate(matrix.astype(np.float64)):
            wide = weights * factors
            step_of_row = np.abs(wide).max() / 127
            found[index] = (codes * step) @ (np.rint(wide / step_of_row) * step_of_row) + least * weights.sum()
    np.testing.assert_allclose(rounded_product(rows, matrix, layer, "int8"), expected, atol=1e-3)
    graph = GraphWriter(tmp_path, GraphTypes(DType.FP32, DType.FP32, Quantization("int8", {"layer": layer})))
    product = graph.linear("layer", graph.input("rows", DType.FP32, ["T", 12]), matrix, bias)
    graph.output("product", product, DType.FP32, ["T", 5])
    (found,) = session_of(graph.finish()).run(["product"], {"rows": rows})
    np.testing.assert_allclose(found, expected + bias, atol=1e-3)
    sites = [(site.value, site.least) for site in graph.roundings]
    assert sites == ([("rows", least)] if per_token else [])
