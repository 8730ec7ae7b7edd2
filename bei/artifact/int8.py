"""Vectors with a byte a component. One step for all components and all texts of a model, and zero at zero: so cosines
and dot products of the bytes are those of the vectors, but for rounding, and an index needs no other arithmetic.

(A range for each component, as sentence-transformers has it, has finer steps, but its bytes must be scaled back first.)
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array

_MOST = 127  # of a signed byte, the same on both sides of zero
_SHARES = np.linspace(0.3, 1.0, 29)  # of the largest component, which are tried as the largest that is not cut


def int8_of(vectors: Float32Array, largest: float) -> npt.NDArray[np.int8]:
    """``vectors`` [n, width] in steps of ``largest`` / 127; components beyond ``largest`` are cut to it."""
    steps: npt.NDArray[np.int8] = np.clip(np.rint(vectors * np.float32(_MOST / largest)), -_MOST, _MOST).astype(np.int8)
    return steps


def largest_of(vectors: Float32Array) -> float | None:
    """The ``largest`` that keeps ``vectors`` [n, width], of unit length, nearest to what they were, by mean cosine.

    Two digits, so that equal builds agree on it. None where there is nothing but zeros.
    """
    most = float(np.abs(vectors).max(initial=0.0))
    if not 0 < most < math.inf:
        return None
    return max((_two_digits(most * share) for share in _SHARES), key=lambda largest: _mean_cosine(vectors, largest))


def scaled(largest: float, width: int, dimensions: int) -> float:
    """For vectors of ``width`` that are cut to ``dimensions`` and made of unit length again, which makes components
    larger: by this much, where every component has the same part in the length."""
    return min(1.0, largest * math.sqrt(width / dimensions))


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def _mean_cosine(vectors: Float32Array, largest: float) -> float:
    rounded = int8_of(vectors, largest).astype(np.float64)
    lengths = np.maximum(np.linalg.norm(rounded, axis=1), 1e-12) * np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
    return float((np.einsum("ij,ij->i", rounded, vectors.astype(np.float64)) / lengths).mean())
