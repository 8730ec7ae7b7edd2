"""The canary: one text whose answer is kept in the certificate and computed again where the artifact is served."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array

# Outputs whose columns mean something each; the others are vectors, of which the direction counts.
BY_COLUMN = ("logits", "token_logits", "token_weights")

_MIN_COSINE = 0.99
_MAX_DIFFERENCE = 0.1  # of a column, beside one twentieth of the largest: BF16 kernels of two machines differ


def canary_row(answer: Float32Array, output: str) -> npt.NDArray[np.float64]:
    """What is kept of an engine's ``answer``: of tokens the first, and of vectors the unit vector; float64 [width]."""
    row = np.nan_to_num(answer.astype(np.float64), posinf=0.0, neginf=0.0)
    row = row[0] if row.ndim == 2 else row
    return row if output in BY_COLUMN else row / max(float(np.linalg.norm(row)), 1e-12)


def deviation(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], output: str) -> str | None:
    """How ``actual`` differs from ``expected`` by more than another machine's rounding; None where it does not."""
    if actual.shape != expected.shape:
        return f"a width of {actual.size} instead of the {expected.size}"
    if output in BY_COLUMN:
        difference = float(np.abs(actual - expected).max())
        allowed = max(_MAX_DIFFERENCE, float(np.abs(expected).max()) / 20)
        return f"a difference of {difference:.4f} to the scores" if difference > allowed else None
    if not expected.any() and not actual.any():  # an empty sparse vector
        return None
    cosine = float(actual @ expected)
    return f"cosine {cosine:.4f} to the vector" if cosine < _MIN_COSINE else None
