"""Images that a decoder reads: the tower's states go to the decoder's engine, and nothing of a request is left over."""

from __future__ import annotations

import numpy as np
import pytest

from bei.artifact.image_sequence import MOST_IMAGES
from bei.core import Encoding, LabelVectors, PackedBatch
from bei.engine.cuda.batch_split import halves
from bei.engine.packing import FEATURE_SLOTS, graph_inputs, image_features
from bei.errors import EngineError, ShuttingDownError
from bei.port import STATES, Answer, Item, Submission
from bei.scheduler.queue import Entry, Waiter
from tests.bei.scheduler.scripted_ports import OUTPUTS, WIDTH, Ports, image, several, states
from tests.support.engines import ids


def test_the_tower_reads_the_pixels_alone() -> None:
    (own,) = image().of_tower
    assert own.input_ids.tolist() == [0, 0]
    assert own.image is not None
    assert not own.images
    assert PackedBatch.from_encodings([own]).levels is not None


def test_rows_stand_at_their_tokens_and_equal_images_share_them() -> None:
    first, second, other = (image(digest) for digest in (b"a", b"a", b"b"))
    text = Encoding(ids(1, 2))
    read = [
        first.with_features([states(1)]),
        text,
        second.with_features([states(1)]),
        other.with_features([states(50)]),
    ]
    batch = PackedBatch.from_encodings(read)
    assert batch.levels is None
    assert batch.features is not None
    assert batch.features.slots.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 3, 4, 0, 0]
    np.testing.assert_array_equal(batch.features.rows, [*states(1), *states(50)])
    tokens = first.input_ids.tobytes()
    assert batch.digests == [tokens + b"a", text.input_ids.tobytes(), tokens + b"a", tokens + b"b"]
    inputs = graph_inputs(batch, ["input_ids", FEATURE_SLOTS, image_features(WIDTH)])
    rows, slots = inputs[image_features(WIDTH)], inputs[FEATURE_SLOTS]
    assert len(slots) == len(inputs["input_ids"])
    np.testing.assert_array_equal(rows[0], np.zeros(WIDTH))
    np.testing.assert_array_equal(rows[slots[13]], states(50)[0])
    assert slots[17:].tolist() == [0] * (len(slots) - 17)
    _, end = halves(batch)
    assert end.features is not None
    assert end.features.slots.tolist() == batch.features.slots[-end.num_tokens :].tolist()


def test_texts_beside_an_image_keep_all_that_they_have() -> None:
    text = Encoding(ids(1, 2, 3), ids(0, 1, 1), num_keys=2, num_unpooled=1, adapter=2)
    labelled = Encoding(ids(4), label_vectors=LabelVectors(states(7), b"labels"))
    batch = PackedBatch.from_encodings([text, image().with_features([states(1)]), labelled])
    assert batch.adapters is not None
    assert batch.key_lens is not None
    assert batch.unpooled_lens is not None
    assert batch.token_type_ids is not None
    assert batch.labels is not None
    assert batch.features is not None
    assert batch.adapters.tolist() == [2, 0, 0]
    assert batch.key_lens.tolist() == [2, 5, 1]
    assert batch.unpooled_lens.tolist() == [1, 0, 0]
    assert batch.token_type_ids.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert batch.labels.counts.tolist() == [1, 1, 2]
    assert batch.features.slots.tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0]


def test_a_step_without_images_has_rows_of_zeros() -> None:
    """More than one: PyTorch's export takes a dimension of one for a constant."""
    batch = PackedBatch.from_encodings([Encoding(ids(1, 2, 3))])
    inputs = graph_inputs(batch, [FEATURE_SLOTS, image_features(WIDTH)])
    rows = inputs[image_features(WIDTH)]
    assert len(rows) > 1
    assert not rows.any()
    assert not inputs[FEATURE_SLOTS].any()


def test_sequences_of_the_same_tokens_are_known_by_their_images() -> None:
    waiter = Waiter(0, 0, 1.0, frozenset())

    def entry(digest: bytes) -> Entry:
        return Entry(image(digest).with_features([states(1)]), waiter, "bulk", 0.0, 0.0)

    assert entry(b"a").identity == entry(b"a").identity != entry(b"b").identity
    text = Entry(Encoding(image().input_ids), waiter, "bulk", 0.0, 0.0)
    assert text.identity != entry(b"a").identity
    assert text.text is not None
    assert entry(b"a").text is None  # its tokens do not say what it begins with


@pytest.fixture
def ports() -> Ports:
    return Ports()


def test_states_of_the_tower_are_read_by_the_decoder(ports: Ports) -> None:
    ports.submit(0, 1)
    (asked,) = ports.tower.submitted
    assert asked.outputs == {STATES}
    assert all(item.encoding.input_ids.tolist() == [0, 0] for item in asked.items)
    assert not ports.texts.submitted
    ports.compute([1])
    (read,) = ports.texts.submitted
    assert (read.outputs, read.deadline_s, read.flow, read.is_fresh) == (OUTPUTS, 7.0, 3, True)
    assert [item.place for item in read.items] == [1]
    (features,) = read.items[0].encoding.features
    np.testing.assert_array_equal(features.rows, states(1))
    assert not read.items[0].encoding.images
    assert not ports.answers
    answer = Answer(1, 1, {"token_embedding": states(0, 5)})
    ports.texts.on_answers([answer])
    assert ports.answers == [answer]
    ports.compute([0])
    assert [item.place for item in ports.texts.submitted[1].items] == [0]
    ports.read([0])
    assert not ports.port._inputs


def submit_several(ports: Ports) -> None:
    """An input of two images, and one of one, which is in the first too."""
    items = [Item(0, several(b"a", b"b")), Item(1, several(b"b"))]
    ports.port.submit(Submission(1, "bulk", OUTPUTS, items))


def of_tower(number: int, start: float) -> Answer:
    """To the image of this number of the input 0."""
    return Answer(1, number, {STATES: states(start)})


def test_an_input_of_several_images_waits_for_the_states_of_all(ports: Ports) -> None:
    submit_several(ports)
    (asked,) = ports.tower.submitted
    assert [item.place for item in asked.items] == [0, 1, MOST_IMAGES]
    digests = [item.encoding.image.digest for item in asked.items if item.encoding.image is not None]
    assert digests == [b"a", b"b", b"b"]  # of which the tower computes two
    ports.tower.on_answers([of_tower(1, 7.0)])
    assert not ports.texts.submitted
    ports.tower.on_answers([Answer(1, MOST_IMAGES, {STATES: states(7.0)}), of_tower(0, 1.0)])
    (one, other) = [item for submission in ports.texts.submitted for item in submission.items]
    assert (one.place, other.place) == (1, 0)
    batch = PackedBatch.from_encodings([other.encoding, one.encoding])
    assert batch.features is not None
    assert batch.features.slots.tolist() == [0, 1, 2, 0, 3, 4, 0, 0, 3, 4, 0]
    np.testing.assert_array_equal(batch.features.rows, [*states(1.0), *states(7.0)])
    assert batch.features.spans.tolist() == [[1, 1, 2], [4, 1, 2], [8, 1, 2]]
    ports.read([0, 1])
    assert not ports.port._inputs


def test_an_input_has_one_answer_where_several_of_its_images_fail(ports: Ports) -> None:
    submit_several(ports)
    error = EngineError("broken")
    ports.tower.on_answers([Answer(1, 1, error), Answer(1, 0, error), Answer(1, MOST_IMAGES, {STATES: states(7.0)})])
    assert ports.answers == [Answer(1, 0, error)]
    assert [item.place for item in ports.texts.submitted[0].items] == [1]
    ports.read([1])
    assert not ports.port._inputs


def test_inputs_of_the_same_tokens_are_known_by_all_their_images_in_order() -> None:
    given = [several(b"a", b"b"), several(b"b", b"a"), several(b"a", b"a"), several(b"a", b"b")]
    waiter = Waiter(0, 0, 1.0, frozenset())
    for encodings in (given, [one.with_features([states(1)] * 2) for one in given]):
        identities = [Entry(one, waiter, "bulk", 0.0, 0.0).identity for one in encodings]
        assert identities[0] == identities[3]
        assert len({*identities}) == 3


def test_an_error_of_the_tower_is_the_images_answer(ports: Ports) -> None:
    ports.submit(0, 1)
    failed = Answer(1, 0, EngineError("broken"))
    ports.tower.on_answers([failed])  # at place 0 of inputs and of images
    assert ports.answers == [failed]
    ports.compute([1])
    assert [item.place for item in ports.texts.submitted[0].items] == [1]
    ports.read([1])
    assert not ports.port._inputs


def test_images_of_a_cancelled_request_are_not_read(ports: Ports) -> None:
    ports.submit(0)
    ports.submit(0, request_id=2)
    ports.port.cancel(1)
    assert ports.tower.cancelled == ports.texts.cancelled == [1]
    ports.compute([0])
    assert not ports.texts.submitted
    ports.compute([0], request_id=2)
    assert [one.request_id for one in ports.texts.submitted] == [2]


def test_a_request_that_is_cancelled_as_it_is_handed_on_is_cancelled_there_too(ports: Ports) -> None:
    ports.submit(0)
    ports.texts.on_submit = lambda: ports.port.cancel(1)
    ports.compute([0])
    assert ports.texts.cancelled == [1, 1]  # once before it was there
    assert not ports.port._inputs


def test_a_decoder_that_takes_nothing_more_is_an_error_of_each_image(ports: Ports) -> None:
    def refuse() -> None:
        raise ShuttingDownError("ends")

    ports.submit(0, 1)
    ports.texts.on_submit = refuse
    ports.compute([0, 1])
    assert [(answer.place, type(answer.result)) for answer in ports.answers] == [
        (0, ShuttingDownError),
        (1, ShuttingDownError),
    ]
    assert not ports.port._inputs


def test_a_tower_that_takes_nothing_more_is_an_error_of_each_image(ports: Ports) -> None:
    def refuse() -> None:
        raise ShuttingDownError("ends")

    ports.tower.on_submit = refuse
    ports.submit(0, 1)
    assert [(answer.place, type(answer.result)) for answer in ports.answers] == [
        (0, ShuttingDownError),
        (1, ShuttingDownError),
    ]
    assert not ports.port._inputs


def test_a_decoder_that_takes_nothing_raises_and_keeps_nothing(ports: Ports) -> None:
    def refuse() -> None:
        raise ShuttingDownError("ends")

    ports.texts.on_submit = refuse
    with pytest.raises(ShuttingDownError):
        ports.submit(0)
    assert not ports.port._inputs


def test_what_the_tower_answers_as_it_closes_is_read_before_the_decoder_closes(ports: Ports) -> None:
    ports.submit(0)
    ports.tower.on_close = lambda: ports.compute([0])
    ports.texts.on_close = lambda: ports.texts.on_answers([Answer(1, 0, {"token_embedding": states(0, 5)})])
    ports.port.close()
    assert ports.closed == ["tower", "texts"]
    assert [answer.place for answer in ports.answers] == [0]
    assert len(ports.texts.submitted) == 1
