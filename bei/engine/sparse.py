"""Sparse vectors: SPLADE's rows over the vocabulary, BGE-M3's token weights, and weights looked up in a table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

import numpy as np

from bei.core import Encoding, Float32Array, Int32Array, Row

# Ascending indices into the vocabulary, and their weights.
SparseVector: TypeAlias = tuple[Int32Array, Float32Array]


def sparse_vectors(
    rows: Seq[Row],
    encodings: Seq[Encoding],
    special: frozenset[int],
    top_k: int | None,
    table: Float32Array | None = None,
) -> list[SparseVector]:
    """One sparse vector for each row: a row reduced by ``nonzero``; else the weights of its text's tokens except
    ``special`` ones; else, with a ``table`` float32 [vocabulary], the table's weights. ``top_k``: keep the largest
    only."""
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
    """The weights in ``table`` of the distinct tokens of a text, special tokens included (as in sentence-transformers'
    SparseStaticEmbedding)."""
    indices = np.unique(ids)
    indices = indices[table[indices] != 0]
    return indices, table[indices]


def nonzero(row: Row, _: Encoding) -> dict[str, Any]:
    """Indices and values of the positive weights of a row: some hundred of a vocabulary."""
    indices = np.flatnonzero(row["sparse"] > 0).astype(np.int32)
    return {"indices": indices, "weights": row["sparse"][indices]}


def _largest(vector: SparseVector, top_k: int) -> SparseVector:
    """The ``top_k`` weights of largest absolute value; of equal ones the first."""
    indices, weights = vector
    kept = np.sort(np.argsort(-np.abs(weights), kind="stable")[:top_k])
    return indices[kept], weights[kept]


def _lexical(weights: Float32Array, ids: Int32Array, special: frozenset[int]) -> SparseVector:
    """The largest weight of each of the text's distinct tokens, special tokens left out."""
    kept = (weights > 0) & ~np.isin(ids, list(special))
    indices, where = np.unique(ids[kept], return_inverse=True)
    largest = np.zeros(len(indices), np.float32)
    np.maximum.at(largest, where, weights[kept])
    return indices.astype(np.int32), largest
