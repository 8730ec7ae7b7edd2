"""Pairs of two sides are compared by their boundaries."""

from __future__ import annotations

import numpy as np

from bei.core import EXTRAS, Encoding, Float32Array
from bei.engine.boundaries import DIGIT, NOWHERE
from bei.verification.pair_agreement import of_pairs

MOST = 3


def rows_of(starts: list[int], ends: list[int], scores: dict[tuple[int, int], float]) -> Float32Array:
    rows = np.zeros((MOST, 2, MOST + EXTRAS), np.float32)
    for place, numbers in enumerate((starts, ends)):
        rows[:, 0, MOST + 2 * place], rows[:, 0, MOST + 2 * place + 1] = np.divmod(numbers, DIGIT)
    for row, start in enumerate(starts):
        for column, end in enumerate(ends):
            rows[row, 1, column] = scores.get((start, end), -1.0)
    return rows.reshape(MOST, -1)


def test_pairs_of_other_places_are_equal_and_missing_ones_count_where_they_would_be_found() -> None:
    ours = rows_of([0, 1, 2], [1, 2, 3], {(0, 1): 0.5, (0, 3): 2.0, (2, 3): -2.0})
    theirs = rows_of([0, 1, 3], [1, 2, 4], {(0, 1): 0.25, (3, 4): 3.0})
    encoding = Encoding(np.zeros(MOST, np.int32))
    (actual,), (expected,) = of_pairs([ours], [theirs], [encoding], MOST)
    found = sorted(zip(actual[:, 0].tolist(), expected[:, 0].tolist(), strict=True))
    # Both have (0, 1), (0, 2) and (1, 2); one alone would find (0, 3), the other (3, 4).
    assert found == [(-10.0, 3.0), (-1.0, -1.0), (-1.0, -1.0), (0.5, 0.25), (2.0, -10.0)]


def test_a_text_without_spans_has_no_scores() -> None:
    rows = rows_of([NOWHERE, NOWHERE, NOWHERE], [NOWHERE, NOWHERE, NOWHERE], {})
    (actual,), (expected,) = of_pairs([rows], [rows], [Encoding(np.zeros(MOST, np.int32))], MOST)
    assert actual.shape == expected.shape == (0, 1)
