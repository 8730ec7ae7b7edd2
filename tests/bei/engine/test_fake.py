"""The fake engine's law: a row names its input, whatever the batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Encoding, Limits, PackedBatch
from bei.engine.fake import DIMENSION, FakeEngine, fake_row

LIMITS = Limits(max_num_tokens=64, max_batch_size=8, max_seq_len=16)
_ids = st.lists(st.integers(0, 1000), min_size=1, max_size=16)
_encodings = st.builds(
    lambda pairs: Encoding(
        np.array([token for token, _ in pairs], np.int32), np.array([kind for _, kind in pairs], np.int32)
    ),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1)), min_size=1, max_size=16),
)


@given(st.lists(_encodings, min_size=1, max_size=8))
def test_row_i_names_sequence_i_in_any_company(encodings: list[Encoding]) -> None:
    rows = FakeEngine(LIMITS).run(PackedBatch.from_encodings(encodings))["embedding"]
    alone = [fake_row(encoding.input_ids, encoding.token_type_ids) for encoding in encodings]
    np.testing.assert_array_equal(rows, np.stack(alone))
    assert rows.dtype == np.float32


def test_it_states_its_facts_and_remembers_its_batches() -> None:
    engine = FakeEngine(LIMITS, num_streams=2)
    assert engine.info.limits is LIMITS
    assert engine.info.num_streams == 2
    assert engine.info.outputs == {"embedding": DIMENSION}
    batch = PackedBatch.from_encodings([Encoding(np.array([5], np.int32))])
    engine.warmup()
    engine.run(batch)
    engine.close()
    assert engine.batches == [batch]
