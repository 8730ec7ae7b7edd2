"""From engine rows to the vectors a client gets: pure numpy."""

from __future__ import annotations

import numpy as np

from bei.core import Float32Array


def finish_embeddings(rows: Float32Array, dimensions: int | None, normalize: bool) -> Float32Array:
    """Keep the first ``dimensions`` components (Matryoshka, arXiv:2205.13147), then restore unit length.

    ``rows`` is float32 [n, E], the result float32 [n, dimensions or E], contiguous. A truncated vector of a model that
    normalizes is normalized again: clients compute dot products with it.
    """
    if dimensions is not None:
        rows = rows[:, :dimensions]
    if normalize:
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
        rows = rows / np.maximum(norms, 1e-12)[:, None].astype(np.float32)
    return np.ascontiguousarray(rows, dtype=np.float32)
