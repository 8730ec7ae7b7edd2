"""int8 vectors: one scale for all components and all texts of a model, without offset.

Cosines and dot products of the bytes therefore equal those of the vectors up to rounding, and an index needs no special
arithmetic. (A range for each component, as in sentence-transformers, has finer steps, but needs rescaling first.)
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array

_MOST = 127  # symmetric range of a signed byte
_SHARES = np.linspace(0.3, 1.0, 29)  # candidates for the clipping bound, relative to the largest component


def int8_of(vectors: Float32Array, largest: float) -> npt.NDArray[np.int8]:
    """``vectors`` [n, width] in steps of ``largest`` / 127; components beyond ``largest`` are clipped."""
    steps: npt.NDArray[np.int8] = np.clip(np.rint(vectors * np.float32(_MOST / largest)), -_MOST, _MOST).astype(np.int8)
    return steps


def largest_of(vectors: Float32Array) -> float | None:
    """The clipping bound ``largest`` that maximizes the mean cosine between ``vectors`` [n, width], unit length, and
    their int8 form.

    Two digits, so that equal builds agree. None if all components are zero.
    """
    most = float(np.abs(vectors).max(initial=0.0))
    if not 0 < most < math.inf:
        return None
    return max((_two_digits(most * share) for share in _SHARES), key=lambda largest: _mean_cosine(vectors, largest))


def scaled(largest: float, width: int, dimensions: int) -> float:
    """``largest`` for vectors of ``width`` that are cut to ``dimensions`` and normalized again, which enlarges
    components by this factor if all contribute equally to the length."""
    return min(1.0, largest * math.sqrt(width / dimensions))


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def _mean_cosine(vectors: Float32Array, largest: float) -> float:
    rounded = int8_of(vectors, largest).astype(np.float64)
    lengths = np.maximum(np.linalg.norm(rounded, axis=1), 1e-12) * np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)
    return float((np.einsum("ij,ij->i", rounded, vectors.astype(np.float64)) / lengths).mean())
