"""Two engines behind one port: each sequence goes to its own, and the state is that of both."""

from __future__ import annotations

import numpy as np
import pytest

from bei.core import Encoding, ImagePatches, Limits, PackedBatch
from bei.port import Answer, Item, Submission
from bei.scheduler.queue import Entry, Waiter


def test_a_batch_holds_texts_or_images() -> None:
    text = Encoding(np.zeros(3, np.int32))
    image = Encoding(np.zeros(2, np.int32), image=ImagePatches(np.full((2, 12), 7, np.uint8), b"x", (1, 2)))
    batch = PackedBatch.from_encodings([image, image])
    assert batch.levels is not None
    assert batch.levels.shape == (4, 12)
    assert batch.digests == [b"x", b"x"]
    with pytest.raises(ValueError, match="texts or images"):
        PackedBatch.from_encodings([text, image])


def test_images_are_known_by_their_pixels() -> None:
    waiter = Waiter(0, 0, 1.0, frozenset())

    def identity(digest: bytes) -> object:
        encoding = Encoding(np.zeros(2, np.int32), image=ImagePatches(np.zeros((2, 12), np.uint8), digest, (1, 2)))
        return Entry(encoding, waiter, "bulk", 0.0, 0.0).identity

    assert identity(b"a") == identity(b"a") != identity(b"b")


def test_sequences_go_to_their_tower_and_come_back_one_call_at_a_time() -> None:
    from bei.engine.fake import FakeEngine
    from bei.metrics.registry import Metrics, ModelMetrics
    from bei.scheduler.batch_manager import BatchManager
    from bei.scheduler.cost_model import CostModel
    from bei.scheduler.device_gate import DeviceGate
    from bei.scheduler.tower_port import TowerPort

    limits, gate, metrics = Limits(64, 8, 16), DeviceGate(), ModelMetrics(Metrics(), "two towers")
    engines = [FakeEngine(limits), FakeEngine(limits)]
    answers: list[Answer] = []

    def opening(engine: FakeEngine) -> object:
        return lambda on_answers: BatchManager(engine, on_answers, CostModel.assumed(limits), metrics, gate=gate)

    port = TowerPort(opening(engines[0]), opening(engines[1]), answers.extend)  # type: ignore[arg-type]
    text = Encoding(np.ones(3, np.int32))
    image = Encoding(np.zeros(2, np.int32), image=ImagePatches(np.zeros((2, 12), np.uint8), b"x", (1, 2)))
    outputs = frozenset({"embedding"})
    port.submit(Submission(1, "interactive", outputs, [Item(0, text)]))
    port.submit(Submission(1, "interactive", outputs, [Item(1, image)]))
    port.cancel(2)
    stats = port.stats()
    assert stats.is_alive
    assert not stats.is_stalled
    port.close()
    assert sorted(answer.place for answer in answers) == [0, 1]
    assert [batch.levels is None for engine in engines for batch in engine.batches] == [True, False]
