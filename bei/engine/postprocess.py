"""Engine rows to vectors and scores, in pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array, ScoreFunction


def unit_length(rows: Float32Array) -> Float32Array:
    """``rows`` float32 [n, E] divided by their L2 norms, computed in float64; a row of zeros is unchanged.

    A vector cut to its first components (Matryoshka, arXiv:2205.13147) is normalized again here, since clients compute
    dot products. NaN and Inf become NaN; numpy warns of Inf.
    """
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    unit: Float32Array = rows / np.maximum(norms, 1e-12).astype(np.float32)[:, None]
    return unit


def cut(vectors: Float32Array, dimensions: int, normalize: bool) -> Float32Array:
    """The first ``dimensions`` components of ``vectors`` float32 [n, E]; ``normalize``: at unit length again."""
    return unit_length(vectors[:, :dimensions]) if normalize else vectors[:, :dimensions]


def means_of_chunks(states: Float32Array, owner: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]) -> Float32Array:
    """The mean of each chunk's ``states``. ``owner``: the chunk of each state, -1: none; ``counts``: states of each
    chunk."""
    order = np.argsort(owner, kind="stable")[len(owner) - counts.sum() :]
    parts = np.split(states[order], np.cumsum(counts)[:-1])  # each state is read once: np.add.reduceat is slower
    return np.stack([part.mean(axis=0) for part in parts])


def apply_function(logits: Float32Array, function: ScoreFunction) -> Float32Array:
    """Scores of ``logits`` float32 [..., labels], computed in float64; stable for logits of any size."""
    if function == "none":
        return logits
    wide = logits.astype(np.float64)
    if function == "softmax":
        powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
        scores = powers / powers.sum(axis=-1, keepdims=True)
    elif function == "tanh":
        scores = np.tanh(wide)
    elif function == "relu":
        scores = np.maximum(wide, 0.0)
    elif function == "softplus":
        scores = np.logaddexp(0.0, wide)
    else:
        powers = np.exp(-np.abs(wide))
        scores = np.where(wide >= 0, 1.0, powers) / (1.0 + powers)
    narrow: Float32Array = scores.astype(np.float32)
    return narrow


def descending(values: Float32Array) -> list[int]:
    """Indices of ``values`` float32 [n] by descending value; equal values keep their order."""
    order: list[int] = np.argsort(-values, kind="stable").tolist()
    return order
