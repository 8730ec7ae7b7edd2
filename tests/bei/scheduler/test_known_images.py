"""Images whose answer is cached, or computed for others, need no states: with batch managers of both engines."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set

import numpy as np
import pytest

from bei.core import EngineInfo, Limits, Outputs, PackedBatch
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import STATES, Answer, EnginePort, Item, OnAnswers, Submission
from bei.scheduler.batch_manager import BatchManager
from bei.scheduler.device_gate import DeviceGate
from bei.scheduler.image_bounds import ImageReading
from bei.scheduler.scheduler import SchedulingRules
from bei.scheduler.tower_port import TowerPort
from tests.bei.scheduler.scripted_ports import OUTPUTS, WIDTH, assumed_costs, image
from tests.support.engines import DEADLINE_S

LIMITS = Limits(max_num_tokens=16, max_batch_size=4, max_seq_len=16)


class CountingEngine:
    """Ones for each token; counts sequences."""

    def __init__(self, output: str) -> None:
        self.info = EngineInfo("fake", "fp32", "none", LIMITS, {output: WIDTH}, frozenset((output,)))
        self.num_run = 0

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        self.num_run += batch.batch_size
        return {name: np.ones((batch.num_tokens, WIDTH), np.float32) for name in self.info.outputs}

    def warmup(self) -> None: ...

    def close(self) -> None: ...


class Engines:
    """A tower port over batch managers of two engines. ``cache_bytes``: of the decoder's."""

    def __init__(self, cache_bytes: int) -> None:
        self.metrics = Metrics()
        self.tower, self.decoder = CountingEngine(STATES), CountingEngine("token_embedding")
        self._answers: list[Answer] = []
        self._changed = threading.Condition()
        metrics, gate, costs = ModelMetrics(self.metrics, "pages"), DeviceGate(), assumed_costs()

        def opened(engine: CountingEngine, on_answers: OnAnswers, size: int) -> EnginePort:
            rules = SchedulingRules(cache_bytes=size)
            return BatchManager(engine, on_answers, costs, metrics, rules=rules, gate=gate)

        self.port = TowerPort(
            lambda on_answers: opened(self.decoder, on_answers, cache_bytes),
            lambda on_answers: opened(self.tower, on_answers, 0),
            self._note,
            ImageReading(WIDTH, costs, costs),
        )

    def _note(self, answers: Iterable[Answer]) -> None:
        with self._changed:
            self._answers += answers
            self._changed.notify_all()

    def ask(self, request_id: int, digests: Iterable[int], *, is_fresh: bool = False) -> None:
        """Returns with all answers."""
        items = [Item(place, image(bytes([digest]))) for place, digest in enumerate(digests)]
        self.port.submit(Submission(request_id, "bulk", OUTPUTS, items, is_fresh=is_fresh))
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._of(request_id)) == len(items), DEADLINE_S)
        assert sorted(answer.place for answer in self._of(request_id)) == list(range(len(items)))
        for answer in self._of(request_id):
            assert isinstance(answer.result, dict)
            assert answer.result["token_embedding"].shape == (5, WIDTH)

    def _of(self, request_id: int) -> list[Answer]:
        return [answer for answer in self._answers if answer.request_id == request_id]


@pytest.fixture
def engines() -> Iterable[Engines]:
    opened = Engines(1_000_000)
    yield opened
    opened.port.close()


def shared(engines: Engines, way: str) -> float:
    lines = engines.metrics.render().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("bei_sequences_shared_total{") and f'"{way}"' in line]
    return float(line.split()[-1])


def test_the_tower_does_not_run_for_what_is_cached_and_a_hit_counts_once(engines: Engines) -> None:
    engines.ask(1, range(10))
    assert (engines.tower.num_run, engines.decoder.num_run) == (10, 10)
    engines.ask(2, range(12))
    assert (engines.tower.num_run, engines.decoder.num_run) == (12, 12)
    assert shared(engines, "cache") == 10


def test_a_fresh_answer_is_computed(engines: Engines) -> None:
    engines.ask(1, [0])
    engines.ask(2, [0], is_fresh=True)
    assert (engines.tower.num_run, engines.decoder.num_run) == (2, 2)


def test_equal_images_of_a_request_are_computed_once(engines: Engines) -> None:
    engines.ask(1, [0] * 30)
    assert (engines.tower.num_run, engines.decoder.num_run) == (1, 1)


def test_a_probe_is_answered_at_once_and_leaves_nothing_behind(engines: Engines) -> None:
    answers: list[Answer] = []
    metrics = ModelMetrics(Metrics(), "pages")
    engine, gate = CountingEngine("token_embedding"), DeviceGate()
    manager = BatchManager(engine, answers.extend, assumed_costs(), metrics, gate=gate)
    read = image().with_features([np.zeros((0, WIDTH), np.float32)])
    manager.submit(Submission(1, "bulk", OUTPUTS, [Item(0, read), Item(1, read)], is_probe=True))
    assert not manager._entries_of
    manager.close()
    assert answers == [Answer(1, 0, {}), Answer(1, 1, {})]
