"""Padded sizes of steps, and batches split in two: laws over all batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import FeatureTable, Limits, PackedBatch
from bei.engine.cuda.batch_split import halves
from bei.engine.cuda.step_sizes import LEAST_SEQUENCES, eager_sizes, recorded_sizes, smallest_fitting
from bei.engine.grid_windows import Windows
from bei.engine.packing import FEATURE_SLOTS, filled, graph_inputs, image_features
from tests.bei.engine.cuda.simulated import batch_of

PACKED = ["cu_query_lens", "input_ids", "slot_ids"]
PADDED = ["cu_query_lens", "input_ids", "pad_index", "slot_ids"]
FORMS = pytest.mark.parametrize("inputs", [PACKED, PADDED, ["first_index", "input_ids", "pad_index"]], ids=str)

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)
LIMITS = st.tuples(st.integers(1, 4096), st.integers(1, 600), st.integers(1, 4096)).map(
    lambda found: Limits(max(found[0], found[2]), found[1], found[2])
)


@given(lengths=LENGTHS)
def test_an_eager_step_holds_its_batch_in_two_sequences_or_more(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    sizes = eager_sizes(batch)
    graph_inputs(batch, PADDED, sizes)  # raises where it does not
    assert sizes.sequences >= LEAST_SEQUENCES
    assert sizes.tokens <= max(16, batch.num_tokens * 17 // 16 + 8 + sizes.sequences)


@FORMS
@given(limits=LIMITS)
def test_recorded_steps_are_few_different_and_of_use(inputs: list[str], limits: Limits) -> None:
    planned = recorded_sizes(limits, inputs)
    assert len(set(planned)) == len(planned) <= 36
    for sizes in planned:
        assert sizes.sequences >= LEAST_SEQUENCES
        assert sizes.tokens <= limits.max_num_tokens + 8
        batch = filled(sizes, 1, limits.max_seq_len)
        arrays = graph_inputs(batch, [*inputs, "position_ids"], sizes)  # raises where the batch does not fit
        assert np.asarray(arrays["position_ids"]).max() < limits.max_seq_len  # tables of positions end there


@FORMS
@given(lengths=LENGTHS)
def test_the_smallest_recorded_step_that_holds_a_batch_is_taken(inputs: list[str], lengths: list[int]) -> None:
    batch = batch_of(lengths)
    planned = recorded_sizes(Limits(16384, 512, 512), inputs)
    found = smallest_fitting([(sizes, sizes) for sizes in planned], batch, inputs)
    holding = [sizes for sizes in planned if sizes.holds(batch)]
    assert (found is None) == (not holding)
    if found is not None:
        assert found == holding[0]  # they are in the order of their work


@FORMS
@pytest.mark.parametrize("tokens", [16, 32, 64, 128, 256, 512, 1024])
def test_a_text_of_a_power_of_two_is_recorded_with_little_filler(inputs: list[str], tokens: int) -> None:
    planned = recorded_sizes(Limits(16384, 512, 1024), inputs)
    found = smallest_fitting([(sizes, sizes) for sizes in planned], batch_of([tokens]), inputs)
    assert found is not None
    assert found.tokens <= tokens + 8


def test_where_nothing_is_padded_a_long_text_needs_no_step_of_its_own() -> None:
    limits = Limits(16384, 512, 512)
    assert len(recorded_sizes(limits, PACKED)) < len(recorded_sizes(limits, PADDED))
    assert all(sizes.longest == min(sizes.tokens, 512) for sizes in recorded_sizes(limits, PACKED))


@given(lengths=st.lists(st.integers(1, 300), min_size=2, max_size=40), with_all=st.booleans())
def test_two_halves_are_the_batch(lengths: list[int], with_all: bool) -> None:
    batch = batch_of(lengths)
    if with_all:
        count = np.array(lengths, np.int32)
        types = (batch.input_ids % 2).astype(np.int32)
        batch = PackedBatch(batch.input_ids, batch.cu_seqlens, types, count, count // 2)
    parts = halves(batch)
    assert min(part.batch_size for part in parts) >= 1
    for name in ("input_ids", "token_type_ids", "key_lens", "unpooled_lens"):
        whole = getattr(batch, name)
        pieces = [getattr(part, name) for part in parts]
        assert (whole is None) == all(piece is None for piece in pieces)
        if whole is not None:
            np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert np.concatenate([np.diff(part.cu_seqlens) for part in parts]).tolist() == lengths
    larger = max(part.num_tokens for part in parts)
    assert larger <= batch.num_tokens / 2 + max(lengths) / 2


def test_steps_with_rows_of_images_are_not_recorded_ones() -> None:
    """Their number is no size of a recorded step: the rows would be read from where another step's tensors lie."""
    names = [*PADDED, FEATURE_SLOTS, image_features(4)]
    recorded = [(sizes, sizes) for sizes in recorded_sizes(Limits(1024, 32, 64), names)]
    text, image = batch_of([9, 5]), batch_of([9, 5])
    table = FeatureTable(np.ones((3, 4), np.float32), np.zeros(14, np.int32), np.array([[1, 1, 3]], np.int32))
    assert smallest_fitting(recorded, text, names) is not None
    assert smallest_fitting(recorded, image._replace(features=table), names) is None
    assert recorded_sizes(Limits(1024, 32, 64), [*PADDED, Windows(2, 2).pad_index]) == []
