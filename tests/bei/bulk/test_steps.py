"""The steps of a shard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bei.bulk.steps import plan_steps
from bei.core import Limits

_LIMITS = st.builds(
    lambda seq_len, more, size: Limits(seq_len + more, size, seq_len),
    st.integers(1, 64),
    st.integers(0, 200),
    st.integers(1, 40),
)


@given(limits=_LIMITS, data=st.data())
def test_every_sequence_is_in_one_step_within_the_limits(limits: Limits, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, limits.max_seq_len), max_size=200))
    steps = plan_steps(lengths, limits)
    assert sorted(place for step in steps for place in step) == [*range(len(lengths))]
    assert all(0 < len(step) <= limits.max_batch_size for step in steps)
    assert all(sum(lengths[place] for place in step) <= limits.max_num_tokens for step in steps)


@given(limits=_LIMITS, data=st.data())
def test_sequences_of_a_step_are_neighbours_in_length(limits: Limits, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, limits.max_seq_len), max_size=200))
    flat = [lengths[place] for step in plan_steps(lengths, limits) for place in step]
    assert flat == sorted(flat)
