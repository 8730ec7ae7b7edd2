"""Boundaries between words of a batch, and the pairs that a graph gives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bei.core import EXTRAS, PackedBatch
from bei.engine.boundaries import DIGIT, NAMES, NOWHERE, boundary_columns, pairs_of
from bei.engine.packing import graph_inputs
from bei.engine.words import LABEL, OTHER, WORD, with_absent

MOST = 4
# Of each token behind the two of a label what it is, and the words without tokens behind it.
_TOKENS = st.lists(st.tuples(st.sampled_from([OTHER, WORD]), st.sampled_from([0, 0, 0, 2])), min_size=1, max_size=9)


@given(sequences=st.lists(_TOKENS, min_size=1, max_size=4))
def test_each_boundary_lies_between_two_words_of_its_sequence(sequences: list[list[tuple[int, int]]]) -> None:
    types, starts, words = list[int](), [0], list[list[int]]()
    for tokens in sequences:
        start, own = starts[-1], list[int]()
        kinds, absent = [LABEL, OTHER, *(kind for kind, _ in tokens)], [0, 0, *(count for _, count in tokens)]
        types += with_absent(np.array(kinds), np.array(absent)).tolist()
        starts.append(len(types))
        for place, (kind, count) in enumerate(zip(kinds, absent, strict=True), start):
            own += [place] * (kind == WORD)
            own += [min(place + 1, len(types) - 1)] * count  # the next token's state
        words.append(own or [start])
    batch = PackedBatch(np.ones(len(types), np.int32), np.array(starts, np.int32), np.array(types, np.int32))
    columns = boundary_columns(MOST)
    found = graph_inputs(batch, [*sorted(NAMES), columns, "input_ids"])
    num_tokens, width = len(found["input_ids"]), found["boundary_left"].shape[1]
    for row, own in enumerate(words):
        count = int(found["boundary_counts"][row])
        assert count == len(own) + 1 <= width
        assert found["boundary_left"][row, :count].tolist() == [num_tokens, *own]
        assert found["boundary_right"][row, :count].tolist() == [*own, num_tokens + 1]
        assert found["boundary_rows"][row] == row * width
    last = min(MOST, width) - 1
    assert found[columns].tolist() == [min(place, last) for place in range(MOST)]
    for row, (start, stop) in enumerate(pairwise(starts)):
        wanted = [row * (last + 1) + min(place, last) for place in range(stop - start)]
        assert found["boundary_tokens"][start:stop].tolist() == wanted


def test_a_batch_without_types_has_a_word_at_every_token() -> None:
    batch = PackedBatch(np.ones(5, np.int32), np.array([0, 2, 5], np.int32))
    found = graph_inputs(batch, [*sorted(NAMES), boundary_columns(MOST)])
    assert found["boundary_counts"][:2].tolist() == [3, 4]
    assert found["boundary_left"][1, 1:4].tolist() == [2, 3, 4]


def test_pairs_are_read_from_the_rows_of_the_first_tokens() -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(5, 3, MOST + EXTRAS)).astype(np.float32)
    starts, ends = np.array([0, 300, NOWHERE]), np.array([2, 301, NOWHERE])
    for place, numbers in enumerate((starts, ends)):
        rows[:3, 0, MOST + 2 * place] = numbers // DIGIT
        rows[:3, 0, MOST + 2 * place + 1] = numbers % DIGIT
    types = with_absent(np.array([LABEL, OTHER, WORD, WORD, OTHER]), np.array([0, 0, 1, 0, 0]))  # three words
    pairs = pairs_of(rows.reshape(5, -1), types, MOST, 2)
    assert pairs.starts.tolist() == starts.tolist()
    assert pairs.ends.tolist() == ends.tolist()
    assert pairs.is_span.tolist() == [[True, True, False], [False, True, False], [False] * 3]
    np.testing.assert_array_equal(pairs.compat, rows[:3, 0, :3])
    np.testing.assert_array_equal(pairs.scores[1], rows[:3, 2, :3])
    np.testing.assert_array_equal(pairs.start_scores[0], rows[:3, 1, MOST])
    np.testing.assert_array_equal(pairs.end_scores[1], rows[:3, 2, MOST + 1])
    np.testing.assert_array_equal(pairs.absent, rows[0, 1:, MOST + 2])
