"""Sequences that begin alike run together: which join a step, and what its costs and metrics count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.core import Encoding, Limits
from bei.engine.fake import FakeEngine
from bei.engine.shared_prefixes import LEAST_SHARED, common_length, num_shared
from bei.scheduler.alike import WaitingTexts
from bei.scheduler.cost_model import CostModel
from bei.scheduler.queue import Entry, Waiter
from bei.scheduler.scheduler import Cut, Scheduler, SchedulingRules
from tests.bei.scheduler.conftest import MakeFront
from tests.support.engines import DEADLINE_S, ids
from tests.support.prefixes import texts_with_prefixes

LIMITS = Limits(max_num_tokens=256, max_batch_size=32, max_seq_len=64)
law = settings(deadline=None)
TEMPLATE = list(range(100, 140))


def documents(number: int, length: int = 6) -> list[list[int]]:
    return [[*TEMPLATE, *range(1000 * place, 1000 * place + length)] for place in range(1, number + 1)]


def cuts(texts: Sequence[Sequence[int]], *, shares: bool, flows: int = 1) -> list[Cut]:
    scheduler = Scheduler(LIMITS, CostModel.assumed(LIMITS), SchedulingRules(), shares_prefixes=shares)
    entries = {}
    for place, text in enumerate(texts):
        waiter = Waiter(place, 0, float("inf"), frozenset(["embedding"]), place % flows)
        entry = Entry(Encoding(ids(*text)), waiter, "interactive", 0.0, 0.001 * len(text))
        entries[entry.identity] = entry
    scheduler.queues.add(entries.values())
    found = []
    while len(scheduler.queues):
        found.append(scheduler.cut(0.0, lambda: False))
    assert sorted(e.identity for cut in found for e in cut.entries) == sorted(entries)
    return found


def test_documents_behind_one_template_fill_the_room_that_it_leaves() -> None:
    together, apart = (cuts(documents(60), shares=shares) for shares in (True, False))
    assert 2 * len(together) <= len(apart)
    for cut in together:
        assert cut.num_shared == (len(cut.entries) - 1) * len(TEMPLATE)


@law
@given(texts_with_prefixes(), st.integers(1, 3))
def test_every_text_runs_once_and_no_step_computes_more_than_the_limits(texts: list[list[int]], flows: int) -> None:
    for cut in cuts(texts * 2, shares=True, flows=flows):
        num_tokens = sum(entry.num_tokens for entry in cut.entries)
        assert cut.num_shared == num_shared([entry.encoding.input_ids.tobytes() for entry in cut.entries])
        assert num_tokens - cut.num_shared <= LIMITS.max_num_tokens
        assert len(cut.entries) <= LIMITS.max_batch_size
        longest = max(entry.num_tokens for entry in cut.entries)
        costs = CostModel.assumed(LIMITS)
        assert cut.predicted_s == costs.seconds(num_tokens - cut.num_shared, len(cut.entries), longest)


def test_where_nothing_is_shared_steps_are_those_of_an_engine_that_cannot_share() -> None:
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 10_000, length).tolist() for length in generator.integers(1, 60, 100)]
    with_it, without = (cuts(texts, shares=shares, flows=2) for shares in (True, False))
    assert [[e.identity for e in cut.entries] for cut in with_it] == [
        [e.identity for e in cut.entries] for cut in without
    ]


@law
@given(texts_with_prefixes(), st.integers(0, 11))
def test_the_nearest_texts_come_first_and_all_that_begin_alike_come(texts: list[list[int]], chosen: int) -> None:
    waiting, numbers = WaitingTexts(), count()
    arrivals: dict[int, bytes] = {}
    for text in texts:
        arrivals[arrival := next(numbers)] = ids(*text).tobytes()
        waiting.add(arrivals[arrival], arrival)
    asked = arrivals[chosen % len(texts)]
    found = list(waiting.nearest(asked))
    assert [number for _, number in found] == sorted((number for _, number in found), reverse=True)
    expected = {
        arrival: length
        for arrival, other in arrivals.items()
        if (length := common_length(asked, other)) >= LEAST_SHARED
    }
    assert dict(found) == expected
    for arrival, other in arrivals.items():
        waiting.remove(other, arrival)
    assert list(waiting.nearest(asked)) == []


class SharingEngine(FakeEngine):
    """Says that it shares."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.info = replace(self.info, unshared=None)


def test_a_manager_asks_its_engine_to_share_and_counts_the_tokens(make_front: MakeFront) -> None:
    engine = SharingEngine()
    front = make_front(engine)
    texts = documents(20)
    request = front.submit(*texts, lane="interactive")
    assert request.is_answered.wait(DEADLINE_S)
    assert request.error is None
    shared = sum(batch.num_tokens - batch.num_computed for batch in engine.batches)
    sample = front.metrics.registry.get_sample_value
    assert shared >= (len(texts) - len(engine.batches)) * len(TEMPLATE) > 0
    front.manager.close()
    assert sample("bei_tokens_shared_total", {"model": "tiny"}) == shared
    assert sample("bei_tokens_total", {"model": "tiny"}) == sum(map(len, texts))


def test_an_engine_that_cannot_share_is_never_asked_to(make_front: MakeFront) -> None:
    engine = FakeEngine(LIMITS)
    front = make_front(engine)
    request = front.submit(*documents(20))
    assert request.is_answered.wait(DEADLINE_S)
    assert all(batch.shared is None for batch in engine.batches)
