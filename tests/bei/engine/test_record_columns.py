"""What is read of candidates and labels in the rows of tokens."""

from __future__ import annotations

import numpy as np

from bei.artifact.label_layouts import Records
from bei.engine.record_columns import candidate_rows, label_rows
from bei.engine.words import LABEL, OTHER, WORD

RECORDS = Records(width=3, num_queries=2)


def test_a_candidate_is_the_sum_of_its_start_and_its_end() -> None:
    width = RECORDS.candidate_columns
    rows = np.zeros((5, RECORDS.columns), np.float32)
    rows[:, :width] = np.arange(width)
    rows[3, width : 2 * width] = 100
    found = candidate_rows(rows, np.array([[0, 3], [1, 4]]), RECORDS)
    assert [part.shape for part in found] == [(2, 3)] * 3 + [(2, 2)] * 2 + [(2,)] * 4
    whole = np.concatenate([part.reshape(2, -1) for part in found], axis=1)
    np.testing.assert_array_equal(whole, np.arange(width) + np.array([[100], [0]]))


def test_labels_are_read_in_the_rows_of_their_tokens() -> None:
    types = np.array([OTHER, LABEL, OTHER, LABEL, LABEL, WORD], np.int32)
    rows = np.repeat(np.arange(6, dtype=np.float32)[:, None], RECORDS.columns, axis=1)
    found = label_rows(rows, types, slice(1, 3), RECORDS)
    assert [part.shape for part in found] == [(2, 3), (2, 2), (2,), (2,)]
    assert found.fields[:, 0].tolist() == found.learned_nothing[:, 1].tolist() == found.nothing.tolist() == [3, 4]
