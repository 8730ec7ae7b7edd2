"""Scheduler on a simulated clock: how the lanes share an engine over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Encoding, Limits
from bei.port import LANES, Lane
from bei.scheduler.lane_shares import ServedShares
from bei.scheduler.next_batch import next_batch, step_bounds
from bei.scheduler.queue import Entry, LaneQueues, Waiter
from bei.scheduler.scheduler import Cut, Scheduler, SchedulingRules
from tests.support.engines import ids

LIMITS = Limits(max_num_tokens=8192, max_batch_size=128, max_seq_len=512)
CAP_S = 0.065
BULK_SHARE = 0.2


class Costs:
    """Two milliseconds a step and 25 microseconds a token. An efficient step is as long as a capped one."""

    tile = 1

    def seconds(self, num_tokens: int, batch_size: int, longest: int) -> float:
        return 0.002 + 25e-6 * num_tokens

    def efficient_tokens(self, length: int) -> int:
        return 2520

    def largest_efficient_tokens(self, length: int) -> int:
        return 2520


@dataclass
class Step:
    started_s: float
    ended_s: float
    entries: list[Entry]

    @property
    def is_led_by_bulk(self) -> bool:
        """Interactive work does not ride along with bulk work."""
        return all(entry.lane == "bulk" for entry in self.entries)

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


_numbers = count()


def entry(lane: Lane, num_tokens: int, now_s: float) -> Entry:
    """One that no other is equal to."""
    encoding = Encoding(ids(next(_numbers), *[0] * (num_tokens - 1)))
    return Entry(encoding, Waiter(0, 0, inf, frozenset()), lane, now_s, 0.0)


def play(
    arrivals: Sequence[tuple[float, Lane, int]],
    until_s: float,
    num_streams: int = 1,
    after: Callable[[Step], list[Entry]] = lambda step: [],
) -> tuple[list[Step], Scheduler]:
    """The steps of a scheduler on which texts arrive: (when, lane, tokens). ``after`` a step, more may come."""
    scheduler = Scheduler(LIMITS, Costs(), SchedulingRules(step_cap_s=CAP_S, bulk_share=BULK_SHARE))
    coming = sorted(arrivals, reverse=True)
    free_s = [0.0] * num_streams
    steps: list[Step] = []
    running: list[Step] = []
    while (now_s := min(free_s)) < until_s:
        for step in [step for step in running if step.ended_s <= now_s]:
            running.remove(step)
            scheduler.served.add(step.ended_s, step.seconds, step.entries)
            steps.append(step)
        while coming and coming[-1][0] <= now_s:
            at_s, lane, num_tokens = coming.pop()
            scheduler.queues.add([entry(lane, num_tokens, at_s)])
        cut = scheduler.cut(now_s, lambda: True)
        stream = free_s.index(now_s)
        if cut.entries:
            free_s[stream] = now_s + cut.predicted_s
            running.append(Step(now_s, free_s[stream], cut.entries))
            # Whoever is answered sends more while the next step runs.
            scheduler.queues.add(after(steps[-1]) if steps else [])
        else:
            free_s[stream] = min([coming[-1][0] if coming else inf, *(time for time in free_s if time > now_s)])
    return steps, scheduler


def stream_of(lane: Lane, num_tokens: int, every_s: float, until_s: float) -> list[tuple[float, Lane, int]]:
    return [(index * every_s, lane, num_tokens) for index in range(int(until_s / every_s))]


def test_bulk_work_that_begins_does_not_get_the_time_back_in_which_there_was_none() -> None:
    """Interactive work alone keeps the engine half busy for long. Then bulk work comes."""
    interactive = stream_of("interactive", 160, 0.012, 14.0)  # 6 ms each
    bulk: list[tuple[float, Lane, int]] = [(10.003, "bulk", 64)] * 4000
    steps, _ = play(interactive + bulk, 14.0)
    onset = [step for step in steps if step.ended_s > 10.003]
    assert any(step.is_led_by_bulk for step in onset)
    assert not any(first.is_led_by_bulk and second.is_led_by_bulk for first, second in pairwise(onset))
    waits_s = [step.ended_s - text.arrived_s for step in onset for text in step.entries if text.lane == "interactive"]
    assert max(waits_s) <= 2 * CAP_S + 0.006


@pytest.mark.parametrize("size", [10, 39])
def test_bulk_work_in_small_requests_one_after_the_other_gets_its_share_beside_endless_interactive_work(
    size: int,
) -> None:
    """Each request begins to wait anew, a step after the one before was answered. Interactive work alone would fill
    the engine twice."""
    interactive = stream_of("interactive", 480, 0.006, 20.0)

    def after(step: Step) -> list[Entry]:
        answered = any(text.lane == "bulk" for text in step.entries)
        return [entry("bulk", 64, step.ended_s) for _ in range(size)] if answered else []

    first: list[tuple[float, Lane, int]] = [(5.0, "bulk", 64)] * size
    steps, _ = play(interactive + first, 20.0, after=after)
    late = [step for step in steps if step.started_s > 8.0]
    bulk_s = sum(
        step.seconds
        * sum(text.num_tokens for text in step.entries if text.lane == "bulk")
        / sum(text.num_tokens for text in step.entries)
        for step in late
    )
    assert bulk_s >= 0.95 * BULK_SHARE * sum(step.seconds for step in late)


@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_interactive_share_is_that_of_the_recent_time_of_all_streams(load: float, num_streams: int) -> None:
    interactive = stream_of("interactive", 160, 0.006 / load / num_streams, 20.0)
    _, scheduler = play(interactive, 20.0, num_streams)
    assert scheduler.served.interactive_share(20.0, num_streams) == pytest.approx(load, abs=0.03)


def test_the_interactive_share_is_at_most_all_and_stands_still_on_an_idle_engine() -> None:
    served = ServedShares()
    served.add(0.0, 100.0, [entry("interactive", 8, 0.0)])
    assert served.interactive_share(0.0, 1) == 1.0
    assert served.interactive_share(60.0, 1) == served.interactive_share(61.0, 1) == 0.0


@given(st.sampled_from(LANES), st.integers(1, LIMITS.max_seq_len), st.booleans())
def test_a_single_sequence_is_cut_as_the_policy_would(lane: Lane, num_tokens: int, expected: bool) -> None:
    scheduler = Scheduler(LIMITS, Costs(), SchedulingRules(step_cap_s=CAP_S, bulk_share=BULK_SHARE))
    scheduler.served.add(0.0, 1.0, [entry("interactive", 8, 0.0)])
    only = entry(lane, num_tokens, 0.0)
    scheduler.queues.add([only])
    lanes = scheduler.queues.views()
    bounds = step_bounds(lanes, lane, Costs(), CAP_S, interactive_expected=expected)
    assert next_batch(lanes, LIMITS, Costs(), bounds) == {lane: [slice(0, 1)]}
    assert scheduler.cut(0.5, lambda: expected) == Cut([only], Costs().seconds(num_tokens, 1, num_tokens), [])
    assert not len(scheduler.queues)
    assert scheduler.queues.stats() == LaneQueues().stats()
    # Bulk work of which none waited counts as having had its share.
    assert (scheduler.served.recent_s(0.5)["bulk"] > 0) == (lane == "interactive")


def test_a_single_sequence_that_has_expired_is_in_no_step() -> None:
    scheduler = Scheduler(LIMITS, Costs(), SchedulingRules())
    late = Entry(Encoding(ids(1)), Waiter(0, 0, 1.0, frozenset()), "interactive", 0.0, 0.0)
    scheduler.queues.add([late])
    assert scheduler.cut(1.0, lambda: True) == Cut([], 0.0, [late])
    assert not len(scheduler.queues)
