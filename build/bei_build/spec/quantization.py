"""Quantized layers and their scales, as data. Calibration makes it, the graph writer reads it.

Values are symmetric: a number x is stored as round(x / scale), without a zero point. Matrices have one scale per output
channel (a row of [out, in]); inputs of linear layers have one scale for all tokens and channels, or one per token.
Inputs with a lower bound near zero, as GELU gives, may be stored as unsigned numbers from that bound on.
Rounding is to the nearest number of the format: int8, or float8_e4m3fn (arXiv:2209.05433).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from bei_build.spec.dtypes import FloatArray

Format: TypeAlias = Literal["fp8", "int8"]
# Ways in which calibration chooses the range of an input.
Method: TypeAlias = Literal["max", "percentile", "mse"]

LARGEST: Mapping[Format, float] = {"fp8": 448.0, "int8": 127.0}
LARGEST_UNSIGNED = 255.0  # of 8-bit integers from zero on

# Lower bound of a row's largest value, which may be all zeros.
LEAST_OF_A_ROW = float(np.finfo(np.float32).tiny) * 1024

# Significant digits of scales and factors. Measurements differ in their last bits between machines and numbers of
# threads; equal builds must give equal bytes.
_DIGITS = 4


@dataclass(frozen=True)
class LayerQuantization:
    """Quantization of one linear layer.

    ``smoothing`` [in_features]: the input is divided by it, and the matrix's columns are multiplied (SmoothQuant,
    arXiv:2211.10438); None: no smoothing. Then the input is clipped to ± ``input_amax``, which is the format's largest
    number times the scale. ``per_token``: each token's smoothed input is divided by its largest absolute value, and the
    product multiplied by it; ``input_amax`` is 1. ``least``: the input's lower bound, in int8 only: it is subtracted
    before the smoothing, and the rest is stored in unsigned numbers up to ``input_amax``. ``output_amax``: the product
    is quantized too, for the layer that reads it; None: it is not. ``matrix_bits``: 8, or in int8 fewer: numbers of the
    matrix are at most 2^(bits - 1) - 1. ``row_scales``: scales [out] of matrices that the checkpoint stores in the
    format already, by their names in the layer; other matrices have scales by their largest values.
    """

    input_amax: float
    smoothing: tuple[float, ...] | None = None
    output_amax: float | None = None
    per_token: bool = False
    matrix_bits: int = 8
    row_scales: Mapping[str, FloatArray] = field(default_factory=dict, compare=False)
    least: float | None = None


@dataclass(frozen=True)
class Quantization:
    """``layers`` by the names of linear layers in the graph (``linear_layers``); others are not quantized."""

    format: Format
    layers: Mapping[str, LayerQuantization] = field(default_factory=dict)

    def without(self, names: frozenset[str]) -> Quantization:
        """A copy that leaves layers ``names`` unquantized."""
        return Quantization(self.format, {name: it for name, it in self.layers.items() if name not in names})


def rounded(value: float) -> float:
    """``value`` rounded to the digits that scales keep."""
    return float(f"{value:.{_DIGITS - 1}e}")


def scales_of_rows(matrix: FloatArray, number_format: Format, bits: int = 8) -> FloatArray:
    """Scales by the largest value of each row of ``matrix`` [out, in], float32 [out]; rows of zeros get a tiny one.
    ``bits`` as in ``LayerQuantization``."""
    largest = np.maximum(np.abs(matrix).max(axis=1), np.float32(LEAST_OF_A_ROW))
    scales: FloatArray = largest / np.float32(LARGEST[number_format] if bits == 8 else 2 ** (bits - 1) - 1)
    return scales
