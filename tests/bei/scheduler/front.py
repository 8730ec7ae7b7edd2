"""A front for managers under test: it stands where the service stands, and counts the answers it gets."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

from bei.core import Encoding, Engine, Limits, Row
from bei.engine.fake import fake_row
from bei.errors import BeiError
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import Answer, Item, Lane, Submission
from bei.scheduler.batch_manager import BatchManager
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.scheduler.scheduler import SchedulingRules
from tests.support.engines import DEADLINE_S, ids

LIMITS = Limits(max_num_tokens=64, max_batch_size=4, max_seq_len=16)


class Request:
    """What a front has heard of one request."""

    def __init__(self, request_id: int, num_sequences: int) -> None:
        self.id = request_id
        self.rows: list[Row | None] = [None] * num_sequences
        self.error: BeiError | None = None
        self.num_answers = 0
        self.is_answered = threading.Event()


class Front:
    """Stands where the service stands: submits requests, waits for their answers, counts them."""

    def __init__(self, engine: Engine, *, gate: DeviceGate | None = None, **options: Any) -> None:
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}
        self._answered: set[tuple[int, int]] = set()  # requests and places
        self.problems: list[str] = []  # the manager catches what its callback raises
        self._outputs = frozenset(engine.info.outputs)
        costs = CostModel.assumed(engine.info.limits)
        reload: Callable[[], Engine] | None = options.pop("reload", None)
        rules = SchedulingRules(**options)
        self.metrics = Metrics()
        metrics = ModelMetrics(self.metrics, "tiny")
        self.manager = BatchManager(engine, self._on_answers, costs, metrics, rules=rules, gate=gate, reload=reload)

    def submit(
        self, *inputs: Sequence[int], lane: Lane = "bulk", in_s: float | None = None, outputs: Set[str] = frozenset()
    ) -> Request:
        """One request of token id lists, with a deadline ``in_s`` seconds."""
        return self.submit_encodings([Encoding(ids(*values)) for values in inputs], lane, in_s, outputs)

    def submit_encodings(
        self,
        encodings: Sequence[Encoding],
        lane: Lane = "bulk",
        in_s: float | None = None,
        outputs: Set[str] = frozenset(),
    ) -> Request:
        """One request."""
        request = Request(next(self._ids), len(encodings))
        self._requests[request.id] = request
        items = [Item(place, encoding) for place, encoding in enumerate(encodings)]
        deadline_s = None if in_s is None else time.monotonic() + in_s
        wanted = frozenset(outputs) or self._outputs
        self.manager.submit(Submission(request.id, lane, wanted, items, deadline_s))
        return request

    def _on_answers(self, answers: Sequence[Answer]) -> None:
        for request_id, place, result, _ in answers:
            request = self._requests[request_id]
            request.num_answers += 1
            if (request_id, place) in self._answered:
                self.problems.append(f"place {place} of request {request_id} was answered twice")
            self._answered.add((request_id, place))
            if isinstance(result, BeiError):
                request.error = result
            else:
                request.rows[place] = result
            if request.num_answers == len(request.rows):
                request.is_answered.set()

    def cancel(self, request: Request) -> None:
        """Take it back."""
        self.manager.cancel(request.id)

    def wait(self, *requests: Request) -> None:
        """Return when each is answered."""
        for request in requests:
            assert request.is_answered.wait(DEADLINE_S), "a request got no answer"

    def num_waiting(self, lane: Lane = "bulk") -> int:
        """Sequences in the queue."""
        return self.manager.stats().lanes[lane].num_sequences

    def close(self) -> int:
        """Close the manager; how many requests were answered in all. Fails if the manager did anything wrong."""
        self.manager.close()
        assert self.problems == []
        return sum(request.is_answered.is_set() for request in self._requests.values())


def rows_of(request: Request) -> list[list[float]]:
    """The answer; fails if a row is missing."""
    assert request.error is None
    return [row["embedding"].tolist() for row in request.rows if row is not None]


def fake_rows(inputs: Sequence[Sequence[int]]) -> list[list[float]]:
    return [fake_row(ids(*values)).tolist() for values in inputs]


def metric(front: Front, name: str, **labels: str) -> float:
    """A sample's value; 0 if there is none yet."""
    return front.metrics.registry.get_sample_value(name, {"model": "tiny", **labels}) or 0.0


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Poll until ``is_true()``; fails after the deadline."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < give_up_s, f"waited too long: {what}"
        threading.Event().wait(0.001)
