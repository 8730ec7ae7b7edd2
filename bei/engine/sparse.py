"""Sparse vectors: SPLADE's rows over the vocabulary, BGE-M3's weights of a text's own tokens, and those of a table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

import numpy as np

from bei.core import Encoding, Float32Array, Int32Array, Row

# Indices into the vocabulary, ascending, and their weights.
SparseVector: TypeAlias = tuple[Int32Array, Float32Array]


def sparse_vectors(
    rows: Seq[Row],
    encodings: Seq[Encoding],
    special: frozenset[int],
    top_k: int | None,
    table: Float32Array | None = None,
) -> list[SparseVector]:
    """A vector a row: of what ``nonzero`` has left of it, or of the weights of its text's tokens but the ``special``
    ones, or with a ``table``, float32 [vocabulary], of its weights. ``top_k``: only the largest so many."""
    vectors: list[SparseVector] = [
        looked_up(encoding.input_ids, table)
        if table is not None
        else (row["indices"].astype(np.int32, copy=False), row["weights"])
        if "weights" in row
        else _lexical(row["token_weights"][:, 0], encoding.input_ids, special)
        for row, encoding in zip(rows, encodings, strict=True)
    ]
    return vectors if top_k is None else [_largest(vector, top_k) for vector in vectors]


def looked_up(ids: Int32Array, table: Float32Array) -> SparseVector:
    """What ``table`` gives the tokens of a text, however often it has them; special tokens are as others are (as in
    sentence-transformers' SparseStaticEmbedding)."""
    indices = np.unique(ids)
    indices = indices[table[indices] != 0]
    return indices, table[indices]


def nonzero(row: Row) -> dict[str, Any]:
    """The weights of a row that are above zero, and their places: some hundred of a vocabulary."""
    indices = np.flatnonzero(row["sparse"] > 0).astype(np.int32)
    return {"indices": indices, "weights": row["sparse"][indices]}


def _largest(vector: SparseVector, top_k: int) -> SparseVector:
    """The ``top_k`` weights that are farthest from 0; of equal ones those that come first."""
    indices, weights = vector
    kept = np.sort(np.argsort(-np.abs(weights), kind="stable")[:top_k])
    return indices[kept], weights[kept]


def _lexical(weights: Float32Array, ids: Int32Array, special: frozenset[int]) -> SparseVector:
    """The largest weight of each of the text's tokens, special tokens left out."""
    kept = (weights > 0) & ~np.isin(ids, list(special))
    indices, where = np.unique(ids[kept], return_inverse=True)
    largest = np.zeros(len(indices), np.float32)
    np.maximum.at(largest, where, weights[kept])
    return indices.astype(np.int32), largest
