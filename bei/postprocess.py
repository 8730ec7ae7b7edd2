"""From engine rows to the vectors and scores a client gets: pure numpy."""

from __future__ import annotations

from typing import Literal

import numpy as np

from bei.core import Float32Array


def unit_length(rows: Float32Array) -> Float32Array:
    """``rows`` float32 [n, E], each divided by its L2 norm, which is computed in float64; a row of zeros stays.

    A vector that is cut to its first components (Matryoshka, arXiv:2205.13147) goes through here again: clients
    compute dot products with it. NaN and Inf become NaN; of Inf numpy warns.
    """
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    unit: Float32Array = rows / np.maximum(norms, 1e-12).astype(np.float32)[:, None]
    return unit


def apply_function(logits: Float32Array, function: Literal["sigmoid", "softmax", "none"]) -> Float32Array:
    """Scores of ``logits`` float32 [..., labels], computed in float64; stable for logits of any size."""
    if function == "none":
        return logits
    wide = logits.astype(np.float64)
    if function == "softmax":
        powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
        scores = powers / powers.sum(axis=-1, keepdims=True)
    else:
        powers = np.exp(-np.abs(wide))
        scores = np.where(wide >= 0, 1.0, powers) / (1.0 + powers)
    narrow: Float32Array = scores.astype(np.float32)
    return narrow


def descending(values: Float32Array) -> list[int]:
    """Indices of ``values`` float32 [n] by descending value; equal ones stay in order."""
    order: list[int] = np.argsort(-values, kind="stable").tolist()
    return order
