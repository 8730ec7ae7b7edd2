"""Submissions and steps arrive as they were sent, whatever fields they have."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.core import Encoding, ImagePatches, LabelVectors, PackedBatch, TokenSpans
from bei.multiprocess.remote.engine_port_client import without_spans
from bei.multiprocess.transport.channel import Channel
from bei.multiprocess.transport.messages import Run, Submit
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
        adapter=draw(st.integers(0, 3)),
    )


def sent(message: Submit | Run) -> Any:
    """As it arrives."""
    one, other = (Channel[Any](sock, Submit | Run) for sock in socket.socketpair())
    one.send(message)
    frame = other.receive()
    one.end()
    other.end()
    assert frame is not None
    return frame.message


def same(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    return one is other if one is None or other is None else one.tolist() == other.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(encodings(), max_size=6), st.sampled_from(LANES), st.none() | st.floats(0, 1e9), st.integers(0, 99))
def test_a_submission_arrives(given_encodings: list[Encoding], lane: str, deadline_s: float | None, first: int) -> None:
    items = [Item(first + index, encoding) for index, encoding in enumerate(given_encodings)]
    submission = Submission(7, lane, frozenset({"a", "b"}), items, deadline_s, 2**63 - 1)  # type: ignore[arg-type]
    message = sent(Submit(3, without_spans(submission)))
    found = message.submission
    assert (message.number, found.request_id, found.flow) == (3, 7, 2**63 - 1)
    assert (found.lane, found.outputs, found.deadline_s) == (lane, submission.outputs, deadline_s)
    for item, expected in zip(found.items, items, strict=True):
        assert item.place == expected.place
        assert same(item.encoding.input_ids, expected.encoding.input_ids)
        assert same(item.encoding.token_type_ids, expected.encoding.token_type_ids)
        for field in ("truncated", "num_keys", "num_unpooled", "adapter"):
            assert getattr(item.encoding, field) == getattr(expected.encoding, field)
        assert item.encoding.spans is None


@settings(max_examples=60, deadline=None)
@given(st.lists(encodings(), min_size=1, max_size=6), st.none() | st.frozensets(st.sampled_from("ab")))
def test_a_step_arrives(given_encodings: list[Encoding], outputs: frozenset[str] | None) -> None:
    batch = PackedBatch.from_encodings(given_encodings)
    message = sent(Run(batch, outputs))
    assert message.outputs == outputs
    found = message.batch
    for field in ("input_ids", "cu_seqlens", "token_type_ids", "key_lens", "unpooled_lens", "adapters"):
        assert same(getattr(found, field), getattr(batch, field)), field


def test_labels_of_many_texts_arrive_once() -> None:
    labels = LabelVectors(np.arange(4096, dtype=np.float32).reshape(16, 256), b"labels")
    texts = [Encoding(np.full(3, number, np.int32), label_vectors=labels) for number in range(9)]
    submission = Submission(7, "bulk", frozenset({"a"}), [Item(place, text) for place, text in enumerate(texts)])
    found = [item.encoding.label_vectors for item in sent(Submit(1, submission)).submission.items]
    assert len({id(one.rows) for one in found}) == 1
    for one in found:
        assert one.digest == labels.digest
        assert same(one.rows, labels.rows)
    batch = PackedBatch.from_encodings(texts)
    table = sent(Run(batch, None)).batch.labels
    assert batch.labels is not None
    for field in ("rows", "starts", "counts"):
        assert same(getattr(table, field), getattr(batch.labels, field)), field


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_labels_to_be_computed_and_images_arrive(dtype: Any) -> None:
    images = [
        ImagePatches(np.full((6, 12), number + 0.5, dtype), bytes([number]), grid)
        for number, grid in enumerate([(2, 3), (6, 1)])
    ]
    given = [
        Encoding(np.ones(2, np.int32), is_label=True),
        *(Encoding(np.zeros(6, np.int32), image=image) for image in images),
    ]
    submission = Submission(7, "bulk", frozenset({"a"}), [Item(place, one) for place, one in enumerate(given)])
    label, *found = (item.encoding for item in sent(Submit(1, submission)).submission.items)
    assert (label.is_label, label.image) == (True, None)
    for one, image in zip(found, images, strict=True):
        assert (one.image.digest, one.image.grid) == (image.digest, image.grid)
        assert same(one.image.levels, image.levels)
    batch = PackedBatch.from_encodings(given[1:])
    step = sent(Run(batch, None)).batch
    assert step.digests == batch.digests
    assert same(step.grids, batch.grids)
    assert same(step.levels, batch.levels)
