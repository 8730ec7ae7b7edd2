"""Scores of pairs of boundaries (``bei.engine.boundaries``), as two sides that may choose different boundaries compare:
by the pairs, not by their places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bei.core import Encoding, Float32Array
from bei.engine.boundaries import NOWHERE, Pairs, pairs_of

# The score of a span that a side has not chosen: its probability is 0.
_NOT_THERE = -10.0


def of_pairs(
    actual: Sequence[Float32Array], expected: Sequence[Float32Array], encodings: Sequence[Encoding], most: int
) -> tuple[list[Float32Array], list[Float32Array]]:
    """Of each text's rows the scores of its spans for its first label, [spans, 1], of both sides: spans that both have,
    and those that one would find and the other does not have."""
    kept: tuple[list[Float32Array], list[Float32Array]] = ([], [])
    for rows, other_rows, encoding in zip(actual, expected, encodings, strict=True):
        sides = [pairs_of(one, encoding.token_type_ids, most, 1) for one in (rows, other_rows)]
        tables = [dict(zip(_keys(pairs), pairs.scores[0][pairs.is_span].tolist(), strict=True)) for pairs in sides]
        every = sorted({*tables[0], *tables[1]})
        scores = np.array([[table.get(key, _NOT_THERE) for table in tables] for key in every], np.float32).reshape(
            -1, 2
        )
        in_both = np.array([all(key in table for table in tables) for key in every], np.bool_)
        wanted = scores[in_both | (scores > 0).any(axis=1)]
        for side, column in zip(kept, wanted.T, strict=True):
            side.append(column[:, None])
    return kept


def _keys(pairs: Pairs) -> list[int]:
    starts, ends = np.nonzero(pairs.is_span)
    keys: list[int] = (pairs.starts[starts] * NOWHERE + pairs.ends[ends]).tolist()
    return keys
