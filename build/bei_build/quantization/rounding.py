"""Rounding to a format in numpy, as engines compute it, for the choice of scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from bei_build.spec.quantization import LARGEST, LARGEST_UNSIGNED, Format, LayerQuantization, scales_of_rows

FloatArray = npt.NDArray[np.float32]

LEAST_SIZE = 1e-5  # lower bound of the size of an input, or of a token's


def round_to(values: FloatArray, scale: npt.ArrayLike, number_format: Format) -> FloatArray:
    """``values`` rounded to numbers of the format times ``scale``; larger ones become the largest number."""
    largest = LARGEST[number_format]
    wide = np.asarray(scale, np.float32)
    codes = np.clip(values / wide, -largest, largest)
    if number_format == "int8":
        codes = np.rint(codes, out=codes)
    else:
        codes = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    rounded: FloatArray = codes * wide
    return rounded


def round_rows(matrix: FloatArray, number_format: Format, bits: int = 8) -> FloatArray:
    """``matrix`` [out, in] rounded with a scale per row. ``bits`` as in ``LayerQuantization``."""
    return round_to(matrix, scales_of_rows(matrix, number_format, bits)[:, None], number_format)


def rounded_product(
    rows: FloatArray, matrix: FloatArray, layer: LayerQuantization, number_format: Format
) -> FloatArray:
    """``rows @ matrix.T`` as a quantized layer computes it; ``rows`` [n, in], ``matrix`` [out, in]."""
    of_least = 0.0 if layer.least is None else np.float32(layer.least) * matrix.sum(axis=1)
    if layer.least is not None:
        rows = np.maximum(rows - np.float32(layer.least), 0.0)
    if layer.smoothing is not None:
        factors = np.array(layer.smoothing, np.float32)
        rows, matrix = rows / factors, matrix * factors
    if layer.row_scales:
        matrix = round_to(matrix, np.concatenate(list(layer.row_scales.values()))[:, None], number_format)
    else:
        matrix = round_rows(matrix, number_format, layer.matrix_bits)
    sizes = np.maximum(np.abs(rows).max(axis=1, keepdims=True), LEAST_SIZE) if layer.per_token else 1.0
    amax = layer.input_amax * np.asarray(sizes, np.float32)
    if layer.least is None:
        rows = round_to(rows, amax / LARGEST[number_format], number_format)
    else:
        scales = amax / LARGEST_UNSIGNED
        rows = np.rint(np.minimum(rows, amax) / scales) * scales
    product: FloatArray = rows @ matrix.T + of_least
    return product
