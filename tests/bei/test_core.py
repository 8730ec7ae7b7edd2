"""The nouns: what PackedBatch and Limits promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Encoding, Limits, PackedBatch, finite_sequences, rows_of_sequences

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


_CUT_OR_PLACED: dict[str, Any] = {"truncated": True, "spans": object()}  # of no meaning to an engine
_BESIDE_IDS: dict[str, Any] = dict.fromkeys(set(Encoding._fields) - {"input_ids", *_CUT_OR_PLACED}, (object(),))


def test_an_encoding_has_ids_only_until_it_says_anything_else_to_an_engine() -> None:
    text = Encoding(np.array([1, 2], np.int32))
    assert text._replace(**_CUT_OR_PLACED).has_ids_only
    assert not any(text._replace(**{name: value}).has_ids_only for name, value in _BESIDE_IDS.items())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_outputs_are_cut_into_the_part_of_each_sequence(lengths: list[int]) -> None:
    batch = PackedBatch.from_encodings([Encoding(np.full(n, i, np.int32)) for i, n in enumerate(lengths)])
    per_token = np.stack([batch.input_ids, np.arange(batch.num_tokens)], axis=1).astype(np.float32)
    parts = rows_of_sequences(per_token, batch, per_token=True)
    assert [len(part) for part in parts] == lengths
    np.testing.assert_array_equal(np.concatenate(parts), per_token)
    assert all((part[:, 0] == index).all() for index, part in enumerate(parts))
    rows = np.arange(3 * len(lengths), dtype=np.float32).reshape(-1, 3)
    np.testing.assert_array_equal(rows_of_sequences(rows, batch, per_token=False), rows)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_a_sequence_is_finite_if_all_its_rows_of_all_outputs_are(lengths: list[int], data: st.DataObject) -> None:
    batch = PackedBatch.from_encodings([Encoding(np.zeros(n, np.int32)) for n in lengths])
    outputs = {
        "embedding": np.zeros((batch.batch_size, 2), np.float32),
        "token_logits": np.zeros((batch.num_tokens, 3), np.float32),
        "token_weights": np.zeros((batch.num_tokens, 1), np.float32),
    }
    sequence_of_token = np.repeat(np.arange(len(lengths)), lengths)
    spoiled = set()
    for name in data.draw(st.lists(st.sampled_from(list(outputs)), max_size=4)):
        rows = outputs[name]
        row, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, rows.shape[1] - 1))
        rows[row, column] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        spoiled.add(row if name == "embedding" else int(sequence_of_token[row]))
    finite = finite_sequences(outputs, batch, frozenset({"token_logits", "token_weights"}))
    assert np.flatnonzero(~finite).tolist() == sorted(spoiled)


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_limits_must_be_positive(values: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Limits(*values)


def test_a_batch_must_hold_the_longest_sequence() -> None:
    with pytest.raises(ValueError, match="max_num_tokens 15 cannot hold max_seq_len 16"):
        Limits(max_num_tokens=15, max_batch_size=1, max_seq_len=16)
