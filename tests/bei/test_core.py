"""The nouns: what PackedBatch and Limits promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Encoding, Limits, PackedBatch

_pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=6)


def _encoding(pairs: list[tuple[int, int]], with_types: bool) -> Encoding:
    ids, types = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    return Encoding(ids, types if with_types else None)


_encodings = st.builds(_encoding, _pairs, st.booleans())


@given(st.lists(_encodings, min_size=1, max_size=8))
def test_a_packed_batch_holds_every_sequence_end_to_end(encodings: list[Encoding]) -> None:
    batch = PackedBatch.from_encodings(encodings)
    assert batch.cu_seqlens.dtype == batch.input_ids.dtype == np.int32
    assert batch.cu_seqlens[0] == 0
    assert (np.diff(batch.cu_seqlens) > 0).all()
    assert batch.batch_size == len(encodings)
    assert batch.num_tokens == len(batch.input_ids) == sum(encoding.num_tokens for encoding in encodings)
    for encoding, start, end in zip(encodings, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        np.testing.assert_array_equal(batch.input_ids[start:end], encoding.input_ids)
        if batch.token_type_ids is None:
            assert encoding.token_type_ids is None
        else:
            expected = 0 if encoding.token_type_ids is None else encoding.token_type_ids
            np.testing.assert_array_equal(batch.token_type_ids[start:end], expected)


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_limits_must_be_positive(values: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Limits(*values)


def test_a_batch_must_hold_the_longest_sequence() -> None:
    with pytest.raises(ValueError, match="max_num_tokens 15 cannot hold max_seq_len 16"):
        Limits(max_num_tokens=15, max_batch_size=1, max_seq_len=16)
