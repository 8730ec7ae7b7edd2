"""The canary: a text whose answer is stored in the certificate, and recomputed where the artifact is served."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bei.artifact.certificate.record import Certificate, ImageAgreement
from bei.core import Float32Array
from bei.errors import EngineError

# Outputs whose columns have separate meanings; other outputs are vectors, compared by direction.
BY_COLUMN = (
    *("logits", "token_logits", "token_weights"),
    *("span_logits", "token_likelihood", "label_logits", "option_logits", "relation_logits"),
)

_MIN_COSINE = 0.99
_MAX_DIFFERENCE = 0.1  # of a column, beside 1/20 of the largest: BF16 kernels of two machines differ


def canary_row(answer: Float32Array, output: str) -> npt.NDArray[np.float64]:
    """The stored form of ``answer``, float64 [width]: of a token output the first row, of likelihoods the last, as the
    first token has none; vectors at unit length."""
    row = np.nan_to_num(answer.astype(np.float64), posinf=0.0, neginf=0.0)
    row = row[-1 if output == "token_likelihood" else 0] if row.ndim == 2 else row
    return row if output in BY_COLUMN else row / max(float(np.linalg.norm(row)), 1e-12)


def deviation(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], output: str) -> str | None:
    """The difference between ``actual`` and ``expected`` if it exceeds another machine's rounding; else None."""
    if actual.shape != expected.shape:
        return f"a width of {actual.size} instead of the {expected.size}"
    if output in BY_COLUMN:
        difference = float(np.abs(actual - expected).max())
        allowed = max(_MAX_DIFFERENCE, float(np.abs(expected).max()) / 20)
        return f"a difference of {difference:.4f} to the scores" if difference > allowed else None
    if not expected.any() and not actual.any():  # two empty sparse vectors
        return None
    cosine = float(actual @ expected)
    return f"cosine {cosine:.4f} to the vector" if cosine < _MIN_COSINE else None


def canary_levels(height: int, width: int) -> npt.NDArray[np.uint8]:
    """The canary image, uint8 [height, width, 3]: ramps and squares, of the size that the model reads."""
    rows, columns = np.mgrid[0:height, 0:width]
    squares = (rows * 5 // height + columns * 5 // width) % 2 * 255
    return np.stack([rows * 255 // height, columns * 255 // width, squares], axis=2).astype(np.uint8)


def check_image_canary(name: str, agreement: ImageAgreement, answer: Float32Array, *, is_score: bool) -> None:
    """Raise EngineError unless the model ``name`` answers the canary image as it did at build time. ``is_score``: it
    gives scores of pairs."""
    expected = np.array(agreement.canary_row, np.float64)
    # Of vectors of tokens the first, as of an embedding its direction.
    output = "logits" if is_score else "embedding"
    if (found := deviation(canary_row(answer, output), expected, output)) is not None:
        raise EngineError(
            f"{name} answers its canary image with {found} it had at build time: this machine gives other results than "
            "the one of the build. Build the artifact again here."
        )


def check_canary(name: str, certificate: Certificate, answer: Float32Array) -> None:
    """Raise EngineError unless the model ``name`` answers its canary as it did at build time."""
    output = certificate.canary_output
    expected = np.array(certificate.canary_row, np.float64)
    actual = canary_row(answer, output)
    if output == "span_logits":  # behind those of its one label are those of its step's other sequences
        actual = actual[: expected.size]
    if (found := deviation(actual, expected, output)) is not None:
        raise EngineError(
            f"{name} answers its canary with {found} it had at build time: this machine gives other results than the "
            "one of the build. Build the artifact again here."
        )
