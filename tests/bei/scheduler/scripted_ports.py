"""Two engine ports under a ``TowerPort`` that answer when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf
from typing import Any

import numpy as np

from bei.artifact.image_sequence import MOST_IMAGES
from bei.core import Encoding, ImagePatches, Limits, PlacedImage, Row
from bei.metrics.registry import ModelMetrics
from bei.port import LANES, STATES, Answer, Item, Lane, LaneStats, OnAnswers, PortStats, Submission
from bei.scheduler.cost_model import CostModel
from bei.scheduler.image_bounds import ImageReading
from bei.scheduler.tower_port import TowerPort

WIDTH = 3
OUTPUTS = frozenset({"token_embedding"})


def assumed_costs() -> CostModel:
    """For one port: its steps change them."""
    return CostModel.assumed(Limits(64, 8, 16))


def image(digest: bytes = b"a", *, before: int = 1, states: int = 2, after: int = 2) -> Encoding:
    """An image of so many states among tokens."""
    levels = np.zeros((states, 12), np.uint8)
    places = np.arange(before, before + states, dtype=np.int32)
    tokens = np.array([5] * before + [9] * states + [6] * after, np.int32)
    return Encoding(tokens, images=(PlacedImage(ImagePatches(levels, digest, (1, states)), places),))


def several(*digests: bytes) -> Encoding:
    """Images of two states each, a token before, between and behind."""
    placed = []
    for index, digest in enumerate(digests):
        places = np.arange(1 + 3 * index, 3 + 3 * index, dtype=np.int32)
        placed.append(PlacedImage(ImagePatches(np.zeros((2, 12), np.uint8), digest, (1, 2)), places))
    return Encoding(np.array([5, *[9, 9, 6] * len(digests)], np.int32), images=(*placed,))


def states(start: float, count: int = 2) -> Any:
    return np.arange(start, start + count * WIDTH, dtype=np.float32).reshape(count, WIDTH)


class ScriptedPort:
    """Answers when the test says so. ``on_submit`` is called after each submission."""

    def __init__(self, on_answers: OnAnswers, log: list[str], name: str) -> None:
        self.on_answers = on_answers
        self.submitted: list[Submission] = []
        self.cancelled: list[int] = []
        self.known: dict[bytes, Row] = {}  # by the images' digests
        self.num_probes = 0
        self.on_submit: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None
        self._log, self._name = log, name

    def submit(self, submission: Submission) -> None:
        self.on_submit()
        if submission.is_probe:
            self.num_probes += len(submission.items)
            asked = [(item.place, item.encoding.features) for item in submission.items]
            rows = {place: self.known.get(b"".join(one.digest for one in own), {}) for place, own in asked if own}
            self.on_answers([Answer(submission.request_id, place, row) for place, row in rows.items()])
        else:
            self.submitted.append(submission)

    def stats(self) -> PortStats:
        """Of an idle engine."""
        nothing = dict.fromkeys(LANES, LaneStats(0, 0, 0.0))
        return PortStats(nothing, 0, 0.0, 1.0, 0.0, True, False, False, -inf, 0.0, 1.0, "none", 1, None)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None:
        self.on_close()
        self._log.append(self._name)


class Ports:
    """A tower port, its two, and what it has answered."""

    def __init__(self, metrics: ModelMetrics | None = None) -> None:
        self.answers: list[Answer] = []
        self.closed: list[str] = []
        reading = ImageReading(WIDTH, assumed_costs(), assumed_costs())
        self.port = TowerPort(self._opening("texts"), self._opening("tower"), self.answers.extend, reading, metrics)

    def _opening(self, name: str) -> Any:
        def opened(on_answers: OnAnswers) -> ScriptedPort:
            made = ScriptedPort(on_answers, self.closed, name)
            setattr(self, name, made)
            return made

        return opened

    texts: ScriptedPort
    tower: ScriptedPort

    def submit(self, *places: int, request_id: int = 1, lane: Lane = "bulk", flow: int = 3) -> None:
        items = [Item(place, image(bytes([place]))) for place in places]
        self.port.submit(Submission(request_id, lane, OUTPUTS, items, deadline_s=7.0, flow=flow, is_fresh=True))

    @property
    def asked(self) -> list[tuple[int, int]]:
        """The requests and places of inputs whose images the tower was asked for."""
        return [(one.request_id, item.place // MOST_IMAGES) for one in self.tower.submitted for item in one.items]

    def compute(self, places: Seq[int], request_id: int = 1) -> None:
        """The tower answers."""
        answers = [Answer(request_id, place * MOST_IMAGES, {STATES: states(place)}) for place in places]
        self.tower.on_answers(answers)

    def read(self, places: Seq[int], request_id: int = 1) -> None:
        """The decoder answers."""
        self.texts.on_answers([Answer(request_id, place, {"token_embedding": states(0, 5)}) for place in places])
