"""Submissions and steps arrive as they were sent, whatever fields they have."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.core import Encoding, PackedBatch, TokenSpans
from bei.multiprocess.transport.messages import Run, Submit
from bei.multiprocess.transport.sequences import batch_of, run_of, submission_of, submitted
from bei.port import LANES, Item, Submission

_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12)


@st.composite
def encodings(draw: st.DrawFn) -> Encoding:
    ids = np.array(draw(_ids), draw(st.sampled_from([np.int32, np.int64])))
    if draw(st.booleans()):
        ids = np.repeat(ids, 2)[::2]  # not one after the other in memory
    types = np.arange(len(ids), dtype=np.int32) % 3 if draw(st.booleans()) else None
    return Encoding(
        ids,
        types,
        truncated=draw(st.booleans()),
        spans=TokenSpans.of_special_tokens(len(ids)) if draw(st.booleans()) else None,
        num_keys=draw(st.none() | st.integers(1, len(ids))),
        num_unpooled=draw(st.integers(0, 3)),
    )


def as_bytes(arrays: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(values.tobytes() for values in arrays), np.uint8)


def same(one: npt.NDArray[np.int32] | None, other: npt.NDArray[np.int32] | None) -> bool:
    return one is other if one is None or other is None else one.dtype == np.int32 and one.tolist() == other.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(encodings(), max_size=6), st.sampled_from(LANES), st.none() | st.floats(0, 1e9), st.integers(0, 99))
def test_a_submission_arrives(given_encodings: list[Encoding], lane: str, deadline_s: float | None, first: int) -> None:
    items = [Item(first + index, encoding) for index, encoding in enumerate(given_encodings)]
    sent = Submission(7, lane, frozenset({"a", "b"}), items, deadline_s)  # type: ignore[arg-type]
    message, arrays = submitted(sent, 3)
    found = submission_of(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit), as_bytes(arrays), 9)
    assert (found.request_id, found.lane, found.outputs, found.deadline_s) == (9, lane, sent.outputs, deadline_s)
    for item, expected in zip(found.items, items, strict=True):
        assert item.place == expected.place
        assert same(item.encoding.input_ids, expected.encoding.input_ids)
        assert same(item.encoding.token_type_ids, expected.encoding.token_type_ids)
        for field in ("truncated", "num_keys", "num_unpooled"):
            assert getattr(item.encoding, field) == getattr(expected.encoding, field)
        assert item.encoding.spans is None


@settings(max_examples=60, deadline=None)
@given(st.lists(encodings(), min_size=1, max_size=6), st.none() | st.frozensets(st.sampled_from("ab")))
def test_a_step_arrives(given_encodings: list[Encoding], outputs: frozenset[str] | None) -> None:
    batch = PackedBatch.from_encodings(given_encodings)
    message, arrays = run_of(batch, outputs, 5)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Run)
    assert message.number == 5
    assert (None if message.outputs is None else frozenset(message.outputs)) == outputs
    found = batch_of(message, as_bytes(list(arrays)))
    for field in ("input_ids", "cu_seqlens", "token_type_ids", "key_lens", "unpooled_lens"):
        assert same(getattr(found, field), getattr(batch, field)), field
