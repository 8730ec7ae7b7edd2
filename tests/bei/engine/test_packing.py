"""Laws of an engine's input tensors: every real token is there once, and filler has no effect."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from bei.core import Encoding, Int32Array, PackedBatch
from bei.engine.packing import Sizes, bucket, filled, graph_inputs, position_ids_but

NAMES = (
    "input_ids",
    "token_type_ids",
    "position_ids",
    "unpad_index",
    "pad_index",
    "slot_mask",
    "seq_lens",
    "first_index",
    "last_index",
)
# No time limits: the machine may be busy.
law = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# From 33 sequences on, buckets have filler rows; lists of that length must be asked for.
few, many = (st.lists(st.integers(1, 70), min_size=low, max_size=high) for low, high in ((1, 12), (33, 75)))
batches_of_lengths = few | many


def batch_of(lengths: list[int], *, with_types: bool = False) -> PackedBatch:
    """Token i of the batch has id i + 1, so that filler (id 0) can be told apart."""
    ids = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    encodings, start = [], 0
    for length in lengths:
        types = (np.arange(length) % 2).astype(np.int32) if with_types else None
        encodings.append(Encoding(ids[start : start + length], types))
        start += length
    return PackedBatch.from_encodings(encodings)


def int32(tensors: object, name: str) -> Int32Array:
    tensor = tensors[name]  # type: ignore[index]
    assert isinstance(tensor, np.ndarray)
    assert tensor.dtype == np.int32
    return tensor


# Buckets.


@law
@given(size=st.integers(1, 10**7), min_step=st.sampled_from([1, 8]))
@example(size=1, min_step=8)
@example(size=255, min_step=1)
@example(size=256, min_step=8)
@example(size=257, min_step=8)
def test_a_bucket_holds_its_size_with_little_filler(size: int, min_step: int) -> None:
    assert size <= bucket(size, min_step) <= size * (1 + 1 / 16) + min_step
    assert bucket(bucket(size, min_step), min_step) == bucket(size, min_step)


@law
@given(size=st.integers(1, 10**7), more=st.integers(0, 1000), min_step=st.sampled_from([1, 8]))
def test_buckets_grow_with_the_size(size: int, more: int, min_step: int) -> None:
    assert bucket(size, min_step) <= bucket(size + more, min_step)


def test_buckets_are_few() -> None:
    assert len({bucket(size) for size in range(1, 16385)}) <= 32 + 16 * 7  # steps of 8 to 256, then 16 an octave
    assert len({bucket(size, min_step=1) for size in range(1, 129)}) <= 32 + 16 * 2


# Tensors.


@law
@given(lengths=batches_of_lengths)
@example(lengths=[1])
@example(lengths=[8, 8])
@example(lengths=[1] * 40)
def test_unpadding_undoes_padding_for_every_real_token(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    tensors = graph_inputs(batch, NAMES)
    pad, unpad = int32(tensors, "pad_index"), int32(tensors, "unpad_index")
    states = int32(tensors, "input_ids")
    padded = states[pad].reshape(-1)
    np.testing.assert_array_equal(padded[unpad[: batch.num_tokens]], batch.input_ids)
    slots = unpad[: batch.num_tokens]
    assert len(set(slots.tolist())) == batch.num_tokens  # no two tokens share a slot


@law
@given(lengths=batches_of_lengths)
def test_every_index_is_within_its_tensor(lengths: list[int]) -> None:
    tensors = graph_inputs(batch_of(lengths), NAMES)
    num_tokens, slots = len(tensors["input_ids"]), tensors["pad_index"].size
    for name, bound in (("pad_index", num_tokens), ("first_index", num_tokens), ("last_index", num_tokens)):
        assert 0 <= int32(tensors, name).min() <= int32(tensors, name).max() < bound
    assert 0 <= int32(tensors, "unpad_index").min() <= int32(tensors, "unpad_index").max() < slots
    assert 0 <= int32(tensors, "position_ids").min() <= int32(tensors, "position_ids").max() < max(lengths)


@law
@given(lengths=batches_of_lengths)
def test_the_mask_counts_the_tokens_of_each_sequence(lengths: list[int]) -> None:
    tensors = graph_inputs(batch_of(lengths), NAMES)
    mask = tensors["slot_mask"]
    assert mask.dtype == np.float32
    assert set(np.unique(mask)) <= {0.0, 1.0}
    assert mask.sum(axis=1).astype(int).tolist() == int32(tensors, "seq_lens").tolist()
    assert (np.diff(mask, axis=1) <= 0).all()  # ones, then zeros


@law
@given(lengths=batches_of_lengths)
def test_shapes_are_buckets_and_filler_rows_have_one_token(lengths: list[int]) -> None:
    tensors = graph_inputs(batch_of(lengths), NAMES)
    num_tokens, num_rows, width = bucket(sum(lengths)), bucket(len(lengths), min_step=1), bucket(max(lengths))
    for name in ("input_ids", "token_type_ids", "position_ids", "unpad_index"):
        assert tensors[name].shape == (num_tokens,)
    for name in ("seq_lens", "first_index", "last_index"):
        assert tensors[name].shape == (num_rows,)
    assert tensors["pad_index"].shape == tensors["slot_mask"].shape == (num_rows, width)
    assert int32(tensors, "seq_lens").tolist() == lengths + [1] * (num_rows - len(lengths))
    assert not int32(tensors, "input_ids")[sum(lengths) :].any()


@law
@given(lengths=batches_of_lengths)
def test_first_last_and_positions_are_those_of_each_sequence(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    tensors = graph_inputs(batch, NAMES)
    ends = np.cumsum(lengths)
    assert int32(tensors, "first_index")[: len(lengths)].tolist() == (ends - lengths).tolist()
    assert int32(tensors, "last_index")[: len(lengths)].tolist() == (ends - 1).tolist()
    expected = np.concatenate([np.arange(length) for length in lengths])
    np.testing.assert_array_equal(int32(tensors, "position_ids")[: batch.num_tokens], expected)


@law
@given(lengths=batches_of_lengths, with_types=st.booleans())
def test_ids_and_types_are_passed_on(lengths: list[int], with_types: bool) -> None:
    batch = batch_of(lengths, with_types=with_types)
    tensors = graph_inputs(batch, NAMES)
    types = int32(tensors, "token_type_ids")
    np.testing.assert_array_equal(int32(tensors, "input_ids")[: batch.num_tokens], batch.input_ids)
    if batch.token_type_ids is None:
        assert not types.any()
    else:
        np.testing.assert_array_equal(types[: batch.num_tokens], batch.token_type_ids)


KEYS = ("key_lens", "key_mask", "token_key_lens")


@law
@given(lengths=batches_of_lengths, data=st.data())
def test_keys_are_the_first_tokens_of_each_sequence(lengths: list[int], data: st.DataObject) -> None:
    keys = [data.draw(st.none() | st.integers(1, length)) for length in lengths]
    ids = np.zeros(1, np.int32)
    batch = PackedBatch.from_encodings(
        [Encoding(np.repeat(ids, length), num_keys=count) for length, count in zip(lengths, keys, strict=True)]
    )
    assert (batch.key_lens is None) == all(count is None for count in keys)
    tensors = graph_inputs(batch, (*NAMES, *KEYS))
    counts = [length if count is None else count for length, count in zip(lengths, keys, strict=True)]
    filler = len(int32(tensors, "seq_lens")) - len(lengths)
    assert int32(tensors, "key_lens").tolist() == counts + [1] * filler
    assert tensors["key_mask"].dtype == np.float32
    assert tensors["key_mask"].sum(axis=1).astype(int).tolist() == counts + [1] * filler
    assert (np.diff(tensors["key_mask"], axis=1) <= 0).all()
    per_token = int32(tensors, "token_key_lens")
    assert per_token[: sum(lengths)].tolist() == np.repeat(counts, lengths).tolist()
    assert not per_token[sum(lengths) :].any()
    assert len(per_token) == len(int32(tensors, "input_ids"))


@law
@given(lengths=batches_of_lengths)
def test_all_tokens_are_keys_where_nothing_else_is_said(lengths: list[int]) -> None:
    tensors = graph_inputs(batch_of(lengths), (*NAMES, *KEYS))
    np.testing.assert_array_equal(tensors["key_lens"], tensors["seq_lens"])
    np.testing.assert_array_equal(tensors["key_mask"], tensors["slot_mask"])


@law
@given(lengths=batches_of_lengths, data=st.data())
def test_means_leave_out_the_first_tokens_that_a_sequence_says(lengths: list[int], data: st.DataObject) -> None:
    unpooled = [data.draw(st.integers(0, length - 1)) for length in lengths]
    encodings = [Encoding(np.ones(n, np.int32), num_unpooled=few) for n, few in zip(lengths, unpooled, strict=True)]
    tensors = graph_inputs(PackedBatch.from_encodings(encodings), ("slot_mask", "pool_mask"))
    mask = tensors["pool_mask"]
    assert mask.dtype == np.float32
    for row, (length, few) in enumerate(zip(lengths, unpooled, strict=True)):
        assert np.flatnonzero(mask[row]).tolist() == list(range(few, length))
    np.testing.assert_array_equal(mask[len(lengths) :], tensors["slot_mask"][len(lengths) :])


@pytest.mark.parametrize("names", [["input_ids"], ["slot_mask", "seq_lens"], ["key_mask"], []])
def test_only_what_is_asked_for_is_given(names: list[str]) -> None:
    assert list(graph_inputs(batch_of([3, 5]), names)) == names


@law
@given(sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=8))
@example(sequences=[[1]])
@example(sequences=[[1, 1, 2], [0, 2], [1, 0]])
def test_positions_but_an_id_count_the_others_and_are_0_for_it_and_for_filler(sequences: list[list[int]]) -> None:
    batch = PackedBatch.from_encodings([Encoding(np.array(ids, np.int32)) for ids in sequences])
    name = position_ids_but(1)
    expected = [0 if ids[at] == 1 else at + 1 - ids[:at].count(1) for ids in sequences for at in range(len(ids))]
    for sizes in (None, Sizes(300, 10, 24)):
        positions = int32(graph_inputs(batch, ["input_ids", name], sizes), name)
        assert positions[: batch.num_tokens].tolist() == expected
        assert not positions[batch.num_tokens :].any()
        assert len(positions) == len(graph_inputs(batch, ["input_ids"], sizes)["input_ids"])


@pytest.mark.parametrize("name", ["position_ids_but_", "position_ids_but_x", "position_ids_but_-1", "states"])
def test_an_unknown_name_is_a_key_error(name: str) -> None:
    """By which engines know that a graph was built for a newer bei."""
    with pytest.raises(KeyError, match=name):
        graph_inputs(batch_of([3]), ["input_ids", name])


def test_filler_slots_repeat_the_last_token_of_their_sequence() -> None:
    tensors = graph_inputs(batch_of([3, 10]), ["pad_index"])
    assert int32(tensors, "pad_index")[0].tolist() == [0, 1, 2] + [2] * 13


@law
@given(lengths=batches_of_lengths)
@example(lengths=[1] * 33)  # buckets of 33 sequences have a filler row
def test_cumulative_lengths_give_each_filler_sequence_a_filler_token(lengths: list[int]) -> None:
    """An empty sequence is not defined; for PyTorch's kernels, tokens behind the last one are."""
    tensors = graph_inputs(batch_of(lengths), (*NAMES, "cu_query_lens"))
    starts = int32(tensors, "cu_query_lens")
    assert starts.dtype == np.int32
    assert starts[: len(lengths) + 1].tolist() == [0, *np.cumsum(lengths)]
    assert len(starts) == len(int32(tensors, "seq_lens")) + 1
    assert set(np.diff(starts[len(lengths) :])) <= {1}
    assert starts[-1] <= len(int32(tensors, "input_ids"))
    assert not int32(tensors, "input_ids")[sum(lengths) :].any()


@law
@given(lengths=batches_of_lengths, data=st.data())
@example(lengths=[1] * 33, data=None)
@example(lengths=[50] * 320, data=None)  # more filler than a filler sequence could own
@example(lengths=[9, 9], data=None)  # filler, and no filler sequence
def test_for_tensorrts_packed_attention_every_token_is_a_sequences(
    lengths: list[int], data: st.DataObject | None
) -> None:
    """NVIDIA's contract: the first cumulative length is 0, and the last is the number of tokens."""
    batch, names = batch_of(lengths), (*NAMES, "cu_query_lens", "cu_key_lens", "sequence_ids")
    sizes = None
    if data is not None and data.draw(st.booleans()):
        more = st.integers(0, 40)
        sizes = Sizes(
            batch.num_tokens + data.draw(more), len(lengths) + data.draw(more), max(lengths) + data.draw(more)
        )
        if not sizes.holds(batch, names):
            with pytest.raises(ValueError, match="does not fit"):
                graph_inputs(batch, names, sizes)
            return
    tensors = graph_inputs(batch, names, sizes)
    starts, num_tokens = int32(tensors, "cu_query_lens"), len(int32(tensors, "input_ids"))
    assert (starts[0], starts[-1]) == (0, num_tokens)
    assert starts[: len(lengths) + 1].tolist() == [0, *np.cumsum(lengths)]
    assert 1 <= np.diff(starts).min() <= np.diff(starts).max() <= tensors["pad_index"].shape[1]
    assert num_tokens <= bucket(sum(lengths) + len(starts)) or sizes is not None
    np.testing.assert_array_equal(tensors["sequence_ids"], np.repeat(np.arange(len(starts) - 1), np.diff(starts)))
    np.testing.assert_array_equal(tensors["cu_key_lens"], starts)
    assert not np.shares_memory(tensors["cu_key_lens"], starts)


@law
@given(tokens=st.integers(1, 600), sequences=st.integers(1, 40), longest=st.integers(1, 600), most=st.integers(1, 600))
def test_a_full_batch_has_all_of_its_sizes_and_no_sequence_that_the_model_cannot_read(
    tokens: int, sequences: int, longest: int, most: int
) -> None:
    assume(sequences * min(longest, most) >= tokens >= max(sequences, longest))
    sizes = Sizes(tokens, sequences, longest)
    batch = filled(sizes, 7, most)
    assert (batch.num_tokens, batch.batch_size) == (tokens, sequences)
    assert 1 <= np.diff(batch.cu_seqlens).min() <= np.diff(batch.cu_seqlens).max() <= min(longest, most)
    assert sizes.holds(batch, ["cu_key_lens"])


def test_room_for_filler_tokens_is_made_for_packed_attention_alone() -> None:
    lengths = [8] * 65  # 68 sequences with filler, 520 tokens: both buckets are full
    without, with_room = (
        len(int32(graph_inputs(batch_of(lengths), ["input_ids", *names]), "input_ids"))
        for names in ([], ["cu_query_lens"])
    )
    assert with_room >= 520 + bucket(65, min_step=1) - 65
    assert without <= with_room


@law
@given(lengths=batches_of_lengths, data=st.data())
def test_every_token_knows_its_sequence_and_whether_it_counts(lengths: list[int], data: st.DataObject) -> None:
    left_out = np.array([data.draw(st.integers(0, length)) for length in lengths], np.int32)
    batch = batch_of(lengths)._replace(unpooled_lens=left_out)
    tensors = graph_inputs(batch, ["sequence_ids", "token_pool_mask", "cu_query_lens", "pool_mask", "unpad_index"])
    sequence, starts = int32(tensors, "sequence_ids"), int32(tensors, "cu_query_lens")
    num_owned = starts[-1]  # with a token of each filler sequence
    np.testing.assert_array_equal(sequence[:num_owned], np.repeat(np.arange(len(starts) - 1), np.diff(starts)))
    by_slot = tensors["pool_mask"].reshape(-1)[int32(tensors, "unpad_index")[: batch.num_tokens]]
    np.testing.assert_array_equal(tensors["token_pool_mask"][: batch.num_tokens], by_slot)
    assert tensors["token_pool_mask"][batch.num_tokens :].all()
