"""Pairs of spans of a batch, as inputs of graphs that score them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bei.core import Encoding, LabelVectors, PackedBatch
from bei.engine.packing import graph_inputs
from bei.engine.span_pairs import NAMES, pair_rows, pair_slots
from bei.engine.words import LABEL, OTHER, WORD, with_absent

MOST = 3
# A text of four words, of which the third has no token, behind three labels; and one of two words behind one label.
LONG = with_absent(np.array([LABEL, OTHER, LABEL, LABEL, WORD, OTHER, WORD, WORD]), np.array([0, 0, 0, 0, 0, 0, 1, 0]))
SHORT = with_absent(np.array([OTHER, LABEL, WORD, WORD]), np.zeros(4, np.int32))


def inputs(*pairs: LabelVectors | None) -> dict[str, Any]:
    encodings = [
        Encoding(np.ones(len(types), np.int32), types, label_vectors=own)
        for types, own in zip((LONG, SHORT), pairs, strict=True)
    ]
    return graph_inputs(PackedBatch.from_encodings(encodings), [*sorted(NAMES), pair_slots(MOST), "input_ids"])


def rows(labels: list[int], spans: list[list[int]]) -> LabelVectors:
    return pair_rows(np.array(labels), np.array(spans))


def test_a_batch_without_pairs_has_one_of_each_sequence() -> None:
    found = inputs(None, None)
    assert found["pair_words"][:6].tolist() == [4, 6, 7, 7, 10, 11]  # the third word has the next token's state
    assert found["pair_firsts"][:, :2].tolist() == [[0, 4], [3, 5]]
    assert found["pair_stops"][:, :2].tolist() == [[1, 5], [4, 6]]
    assert found["pair_labels"][:, :2].tolist() == [[0, 9], [2, 9]]  # the second sequence has one label
    np.testing.assert_allclose(found["pair_features"][:2], [[1.0, 3 / 4], [1.0, 1 / 2]])
    slots = found[pair_slots(MOST)]
    assert slots.shape == (len(found["input_ids"]), MOST)
    assert slots[:8].max() == 0
    assert slots[8:12].min() == slots[8:12].max() == 1


def test_pairs_of_a_request_are_scored_one_row_after_the_other() -> None:
    spans = [[0, 2, 2, 4], [3, 4, 0, 1], [1, 2, 1, 3], [2, 3, 0, 4]]
    found = inputs(rows([1, 1, 1, 1], spans), None)
    assert found["pair_firsts"][:, :5].tolist() == [[0, 3, 1, 2, 4], [2, 0, 1, 0, 5]]
    assert found["pair_stops"][:, :5].tolist() == [[2, 4, 2, 3, 5], [4, 1, 3, 4, 6]]
    assert found["pair_labels"][:, :5].tolist() == [[2, 2, 2, 2, 9], [3, 3, 3, 3, 9]]
    np.testing.assert_allclose(
        found["pair_features"][:5], [[1.0, 0.5], [-1.0, 0.75], [0.0, 0.0], [-1.0, 0.5], [1.0, 0.5]]
    )
    slots = found[pair_slots(MOST)]
    assert slots[:3].tolist() == [[0, 1, 2], [3, 3, 3], [3, 3, 3]]
    assert slots[8].tolist() == [4, 4, 4]


@pytest.mark.parametrize("spans", [[[0, 1, 1, 2]], [[0, 1, 1, 2]] * 7])
def test_sequences_with_the_same_pairs_have_rows_of_their_own(spans: list[list[int]]) -> None:
    pairs = rows([0] * len(spans), spans)
    found = inputs(pairs, pairs)
    count = len(spans)
    assert found["pair_firsts"][0, : 2 * count].tolist() == [0] * count + [4] * count
    slots = found[pair_slots(MOST)].reshape(-1)
    assert slots[:count].tolist() == [*range(count)]
    assert slots[8 * MOST : 8 * MOST + count].tolist() == [*range(count, 2 * count)]


def test_a_batch_without_types_reads_its_first_tokens_as_labels() -> None:
    batch = PackedBatch(np.ones(5, np.int32), np.array([0, 2, 5], np.int32))
    found = graph_inputs(batch, [*sorted(NAMES), pair_slots(MOST)])
    assert found["pair_labels"][:, :2].tolist() == [[0, 2], [0, 2]]
    assert found["pair_firsts"][:, :2].tolist() == [[0, 2], [1, 4]]
    assert found["pair_stops"][:, :2].tolist() == [[1, 3], [2, 5]]
