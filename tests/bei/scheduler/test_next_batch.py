"""The laws of ``next_batch``, and which lane leads. The threads that use them are in test_manager.py."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import e, inf

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bei.core import Encoding, Limits
from bei.port import LANES, Lane
from bei.scheduler.cost_model import CostModel
from bei.scheduler.lane_shares import ServedShares, capped_step_s, overtaking
from bei.scheduler.next_batch import LaneView, QueueKey, StepBounds, leading_lane, next_batch, step_bounds
from bei.scheduler.queue import Entry, LaneQueues, Waiter

NOTHING = LaneView([], 0)
ONE = LaneView([QueueKey(1, 0)], 0)


@dataclass(frozen=True)
class LinearCosts:
    """Milliseconds a step, a token, a padded slot and a tile of so many tokens, as seconds."""

    per_step: float = 2.0
    per_token: float = 0.025
    per_slot: float = 0.002
    efficient: int = 512
    tile: int = 1
    per_tile: float = 0.0

    def seconds(self, num_tokens: int, batch_size: int, longest: int) -> float:
        tokens = self.per_token * num_tokens + self.per_tile * -(-num_tokens // self.tile)
        return (self.per_step + tokens + self.per_slot * batch_size * longest) / 1000

    def efficient_tokens(self, length: int) -> int:
        return max(length, self.efficient)

    def largest_efficient_tokens(self, length: int) -> int:
        return 2 * self.efficient_tokens(length)


PACKED = LinearCosts(per_slot=0.0)  # an engine that does not pad


@dataclass(frozen=True)
class Case:
    lanes: dict[Lane, LaneView]
    limits: Limits
    costs: LinearCosts
    bounds: StepBounds

    def cut(self) -> dict[Lane, list[QueueKey]]:
        step = next_batch(self.lanes, self.limits, self.costs, self.bounds)
        return {
            lane: sorted(key for part in parts for key in self.lanes[lane].queued[part]) for lane, parts in step.items()
        }

    @property
    def urgent(self) -> QueueKey:
        view = self.lanes[self.bounds.lead]
        return view.queued[view.urgent]


@st.composite
def views(draw: st.DrawFn, max_seq_len: int, min_size: int = 0) -> LaneView:
    lengths = draw(st.lists(st.integers(1, max_seq_len), min_size=min_size, max_size=40))
    queued = sorted(QueueKey(length, arrival) for arrival, length in enumerate(lengths))
    return LaneView(queued, bisect_left(queued, QueueKey(lengths[0], 0)) if lengths else 0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sorted queues as the manager keeps them, with limits, costs and bounds that they may have."""
    max_seq_len = draw(st.integers(1, 64))
    limits = Limits(draw(st.integers(max_seq_len, 4 * max_seq_len)), draw(st.integers(1, 12)), max_seq_len)
    lead: Lane = draw(st.sampled_from(LANES))
    lanes = {lane: draw(views(max_seq_len, min_size=int(lane == lead))) for lane in LANES}
    numbers = st.floats(0, 10, allow_nan=False)
    tile = draw(st.sampled_from([1, 8, 16]))
    costs = LinearCosts(draw(numbers), draw(numbers), draw(numbers), tile=tile, per_tile=draw(numbers))
    max_s = draw(st.one_of(st.just(inf), st.floats(0, 1)))
    rider_s = draw(st.one_of(st.none(), st.floats(0, 1)))
    return Case(lanes, limits, costs, StepBounds(lead, draw(st.integers(1, 300)), max_s, rider_s))


def members_of(step: dict[Lane, list[QueueKey]]) -> list[QueueKey]:
    return [key for keys in step.values() for key in keys]


def predicted_s(case: Case, members: list[QueueKey]) -> float:
    lengths = [key.num_tokens for key in members]
    return case.costs.seconds(sum(lengths), len(lengths), max(lengths))


@given(cases())
def test_a_step_never_exceeds_the_engine_s_limits(case: Case) -> None:
    members = members_of(case.cut())
    assert sum(key.num_tokens for key in members) <= case.limits.max_num_tokens
    assert len(members) <= case.limits.max_batch_size


@given(cases())
def test_a_step_holds_the_urgent_sequence_of_the_leading_lane(case: Case) -> None:
    assert case.urgent in case.cut()[case.bounds.lead]


@given(cases())
def test_only_the_urgent_sequence_may_exceed_the_bounds(case: Case) -> None:
    step = case.cut()
    members = members_of(step)
    if len(members) > 1:
        assert sum(key.num_tokens for key in members) <= case.bounds.max_tokens
    if len(step[case.bounds.lead]) > 1:
        assert predicted_s(case, step[case.bounds.lead]) <= case.bounds.max_s
    if len(step) > 1:
        assert case.bounds.rider_s is not None
        assert predicted_s(case, members) <= case.bounds.rider_s


@given(cases())
def test_the_other_lane_rides_along_only_where_the_bounds_say_so(case: Case) -> None:
    if case.bounds.rider_s is None:
        assert set(case.cut()) == {case.bounds.lead}


@given(cases())
@example(
    Case(
        {"interactive": NOTHING, "bulk": LaneView([QueueKey(1, 0)], 0)}, Limits(1, 1, 1), PACKED, StepBounds("bulk", 1)
    )
)
def test_without_padding_costs_a_step_is_maximal(case: Case) -> None:
    case = Case(case.lanes, case.limits, PACKED, StepBounds(case.bounds.lead, case.bounds.max_tokens))
    view = case.lanes[case.bounds.lead]
    (window,) = next_batch(case.lanes, case.limits, case.costs, case.bounds)[case.bounds.lead]
    tokens = sum(key.num_tokens for key in view.queued[window])
    for neighbour in (window.start - 1, window.stop):
        if 0 <= neighbour < len(view.queued) and window.stop - window.start < case.limits.max_batch_size:
            joint = tokens + view.queued[neighbour].num_tokens
            assert joint > min(case.limits.max_num_tokens, case.bounds.max_tokens)


@given(cases())
def test_cutting_again_and_again_takes_every_sequence_once(case: Case) -> None:
    waiting = {lane: list(view.queued) for lane, view in case.lanes.items()}
    taken: dict[Lane, list[QueueKey]] = {lane: [] for lane in LANES}
    while any(waiting.values()):
        lead: Lane = "interactive" if waiting["interactive"] else "bulk"
        lanes = {
            lane: LaneView(keys, min(range(len(keys)), key=lambda i: keys[i].arrival) if keys else 0)
            for lane, keys in waiting.items()
        }
        bounds = StepBounds(lead, case.bounds.max_tokens, case.bounds.max_s, case.bounds.rider_s)
        for lane, parts in next_batch(lanes, case.limits, case.costs, bounds).items():
            for part in parts:
                taken[lane] += waiting[lane][part]
                del waiting[lane][part]
    assert {lane: sorted(keys) for lane, keys in taken.items()} == {
        lane: list(view.queued) for lane, view in case.lanes.items()
    }


def bulk_only(lengths: list[int], urgent: int, costs: LinearCosts = LinearCosts()) -> list[int]:
    """The lengths that are cut from a queue of bulk work; ``urgent`` is the index of the urgent one."""
    queued = sorted(QueueKey(length, arrival) for arrival, length in enumerate(lengths))
    view = LaneView(queued, bisect_left(queued, QueueKey(lengths[urgent], urgent)))
    case = Case({"interactive": NOTHING, "bulk": view}, Limits(4096, 128, 512), costs, StepBounds("bulk", 4096))
    return [key.num_tokens for key in case.cut()["bulk"]]


def test_one_long_text_does_not_pad_many_short_ones_where_padding_costs() -> None:
    lengths = [512, *[2] * 50]
    assert bulk_only(lengths, 0) == [512]
    assert bulk_only(lengths, 0, PACKED) == sorted(lengths)


def test_a_few_texts_share_a_step_although_they_are_padded_because_a_step_of_their_own_costs_more() -> None:
    assert bulk_only([5, 9, 14, 30], 3) == [5, 9, 14, 30]


def test_a_step_grows_towards_the_nearer_length() -> None:
    queued = [QueueKey(5, 3), QueueKey(8, 0), QueueKey(9, 2), QueueKey(20, 1)]
    lanes: dict[Lane, LaneView] = {"interactive": NOTHING, "bulk": LaneView(queued, 1)}
    assert next_batch(lanes, Limits(1000, 2, 100), PACKED, StepBounds("bulk", 1000)) == {"bulk": [slice(1, 3)]}


TILED = LinearCosts(per_token=0.01, per_slot=0.0, tile=64, per_tile=1.0)


@pytest.mark.parametrize(
    ("lengths", "costs", "expected"),
    [
        ([100, 100, 20, 40, 50, 60], TILED, [50, 100, 100]),  # 60 tokens would begin another tile
        ([100, 100, 9, 10, 30, 60], TILED, [9, 10, 30, 100, 100]),
        ([100, 92, 20, 70], TILED, [92, 100]),  # three whole tiles
        ([100, 100, 60], TILED, [100, 100]),  # nothing fits
        ([100, 100, 36], LinearCosts(per_token=0.01, per_slot=0.1, tile=64, per_tile=1.0), [100, 100]),  # padding
        ([100, 100, 20, 40, 50, 60], PACKED, [100, 100]),
    ],
)
def test_the_last_tile_of_a_step_is_filled_up_with_the_longest_shorter_sequences_that_fit_and_pay(
    lengths: list[int], costs: LinearCosts, expected: list[int]
) -> None:
    """The next neighbour in length would be more than 256 tokens."""
    queued = sorted(QueueKey(length, arrival) for arrival, length in enumerate(lengths))
    view = LaneView(queued, bisect_left(queued, QueueKey(100, 0)))
    case = Case({"interactive": NOTHING, "bulk": view}, Limits(4096, 128, 512), costs, StepBounds("bulk", 256))
    assert [key.num_tokens for key in case.cut()["bulk"]] == expected


def tiled_step(interactive: list[int], bulk: list[int], max_tokens: int, rider_s: float) -> dict[Lane, list[int]]:
    """The lengths of a step that the first of ``interactive`` leads."""

    def view(lengths: list[int]) -> LaneView:
        queued = sorted(QueueKey(length, arrival) for arrival, length in enumerate(lengths))
        return LaneView(queued, bisect_left(queued, QueueKey(lengths[0], 0)))

    lanes: dict[Lane, LaneView] = {"interactive": view(interactive), "bulk": view(bulk)}
    bounds = StepBounds("interactive", max_tokens, rider_s=rider_s)
    step = Case(lanes, Limits(4096, 128, 512), TILED, bounds).cut()
    return {lane: [key.num_tokens for key in keys] for lane, keys in step.items()}


def test_a_step_that_is_longer_than_riders_may_make_it_is_filled_from_its_own_lane() -> None:
    assert tiled_step([100, 100, 20, 40, 50, 60], [30], 256, rider_s=0.0) == {"interactive": [50, 100, 100]}


def test_short_sequences_of_the_other_lane_fill_a_step_that_has_no_room_for_its_neighbours() -> None:
    assert tiled_step([440], [300, 5, 2], 448, rider_s=1.0) == {"interactive": [440], "bulk": [2, 5]}


# The bounds


def views_of(interactive: int, bulk: int) -> dict[Lane, LaneView]:
    return {
        "interactive": LaneView([QueueKey(10, i) for i in range(interactive)], 0),
        "bulk": LaneView([QueueKey(60, i) for i in range(bulk)], 0),
    }


def test_bulk_work_alone_runs_in_the_largest_efficient_steps() -> None:
    bounds = step_bounds(views_of(0, 9), "bulk", LinearCosts(), 0.01, interactive_expected=False)
    assert bounds == StepBounds("bulk", 1024)


@pytest.mark.parametrize(("waiting", "expected"), [(0, True), (3, False), (3, True)])
def test_a_bulk_step_is_capped_while_interactive_work_waits_or_is_expected(waiting: int, expected: bool) -> None:
    bounds = step_bounds(views_of(waiting, 9), "bulk", LinearCosts(), 0.01, interactive_expected=expected)
    assert bounds == StepBounds("bulk", 512, 0.01)


@pytest.mark.parametrize(("waiting", "max_tokens"), [(204, 512), (205, 1024)])
def test_interactive_work_runs_in_the_largest_efficient_steps_where_two_of_them_wait(
    waiting: int, max_tokens: int
) -> None:
    bounds = step_bounds(views_of(waiting, 9), "interactive", LinearCosts(), 0.01, interactive_expected=True)
    assert bounds.max_tokens == max_tokens


@pytest.mark.parametrize(("waited_s", "rider_s"), [(0.0, 0.01), (0.00475, 0.00525), (0.008, 0.002), (0.5, 0.0)])
def test_bulk_work_rides_along_up_to_a_capped_step_less_what_interactive_work_waited(
    waited_s: float, rider_s: float
) -> None:
    bounds = step_bounds(
        views_of(1, 9), "interactive", LinearCosts(), 0.01, waited_s=waited_s, interactive_expected=True
    )
    assert (bounds.lead, bounds.max_tokens) == ("interactive", 512)
    assert bounds.rider_s == pytest.approx(rider_s)
    step = next_batch(views_of(1, 9), Limits(1024, 128, 512), LinearCosts(), bounds)
    assert step["interactive"] == [slice(0, 1)]
    (riders,) = step.get("bulk", [slice(0, 0)])
    assert (riders.stop - riders.start > 0) == (rider_s > 0.005)
    assert riders.stop - riders.start < 9


@pytest.mark.parametrize(("length", "num_riders"), [(40, 9), (100, 0)])
def test_riders_are_taken_where_steps_of_their_own_would_take_longer(length: int, num_riders: int) -> None:
    lanes: dict[Lane, LaneView] = {
        "interactive": LaneView([QueueKey(10, arrival) for arrival in range(2)], 0),
        "bulk": LaneView([QueueKey(length, arrival) for arrival in range(9)], 0),
    }
    # Riders of 40 tokens pad the two by 60 slots: 1.8 ms, and save the 2 ms of a step. A ninth of those alone would
    # not be worth it. Riders of 100 tokens pad them by 180.
    step = next_batch(
        lanes, Limits(1024, 128, 512), LinearCosts(per_slot=0.03), StepBounds("interactive", 512, rider_s=1.0)
    )
    assert step.get("bulk", [slice(0, 0)]) == [slice(0, num_riders)]


def test_few_long_riders_are_left_to_full_steps_of_their_own() -> None:
    """Two steps would take longer than one with both, but in a full step each of the long ones takes less."""
    costs = LinearCosts(per_step=5.0, per_token=0.03, per_slot=0.02, efficient=1024)
    lanes: dict[Lane, LaneView] = {
        "interactive": LaneView([QueueKey(29, 0)], 0),
        "bulk": LaneView([QueueKey(256, arrival) for arrival in range(9)], 0),
    }
    limits, rider_s = Limits(1024, 128, 512), costs.seconds(3 * 256, 3, 256)
    one_step, two_steps = costs.seconds(256 * 2 + 29, 3, 256), costs.seconds(29, 1, 29) + costs.seconds(512, 2, 256)
    assert one_step < two_steps
    step = next_batch(lanes, limits, costs, StepBounds("interactive", 1024, rider_s=rider_s))
    assert step == {"interactive": [slice(0, 1)]}
    roomy = next_batch(lanes, limits, LinearCosts(per_slot=0.0), StepBounds("interactive", 1024, rider_s=1.0))
    assert roomy["bulk"] == [slice(0, 3)]


# Who leads


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 0.99))
def test_interactive_work_leads_unless_bulk_work_had_less_than_its_share(i_s: float, b_s: float, share: float) -> None:
    served: dict[Lane, float] = {"interactive": i_s, "bulk": b_s}
    lead = leading_lane({"interactive": True, "bulk": True}, served, share)
    assert (lead == "bulk") == (b_s < share * (i_s + b_s))
    assert leading_lane({"interactive": False, "bulk": True}, served, share) == "bulk"
    assert leading_lane({"interactive": True, "bulk": False}, served, share) == "interactive"


@given(st.lists(st.floats(0.001, 0.1), min_size=50, max_size=200), st.floats(0.05, 0.5))
def test_bulk_work_gets_its_share_however_much_interactive_work_waits(steps_s: list[float], share: float) -> None:
    now_s, total, bulk = 0.0, 0.0, 0.0
    served: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
    for seconds in steps_s:
        lead = leading_lane({"interactive": True, "bulk": True}, served, share)
        served[lead] += seconds
        now_s, total, bulk = now_s + seconds, total + seconds, bulk + seconds * (lead == "bulk")
    assert bulk >= share * (total - max(steps_s)) - 1e-9


def entry(lane: Lane, num_tokens: int) -> Entry:
    encoding = Encoding(np.zeros(num_tokens, np.int32))
    return Entry(encoding, Waiter(0, 0, inf, frozenset()), lane, 0.0, 0.0)


def test_a_step_s_time_is_shared_by_tokens_and_counts_less_the_longer_ago_it_was() -> None:
    shares = ServedShares()
    shares.add(10.0, 0.4, [entry("interactive", 10), entry("bulk", 30)])
    assert dict(shares.recent_s(10.0)) == {"interactive": pytest.approx(0.1), "bulk": pytest.approx(0.3)}
    later = dict(shares.recent_s(12.0))
    assert later == {"interactive": pytest.approx(0.1 / e), "bulk": pytest.approx(0.3 / e)}


@pytest.mark.parametrize("tile", [8, 64, 192])
@pytest.mark.parametrize("per_step", [0.5, 2.0, 8.0])
def test_a_capped_step_costs_bulk_work_and_those_who_wait_the_least_together(tile: int, per_step: float) -> None:
    """A step of T tokens takes c + aT: its rate is 1 - c / (c + aT) of the best. The sum with 0.003 (c + aT) / short is
    least where c + aT is the root of c short / 0.003."""
    costs = LinearCosts(per_step, 0.02, 0.0, efficient=4096, tile=tile, per_tile=0.005 * tile)
    cap_ms = 1000 * capped_step_s(costs, Limits(8192, 128, 512)) / 1.15
    short_ms = 1000 * costs.seconds(32, 1, 32)
    tokens = round((cap_ms - per_step) / 0.025)
    assert tokens % tile == 0
    assert cap_ms == pytest.approx((per_step * short_ms / 0.003) ** 0.5, rel=0.03, abs=0.025 * max(tile, 64))


@pytest.mark.parametrize("limits", [Limits(1, 1, 1), Limits(8, 1, 8), Limits(512, 8, 512), Limits(4096, 8, 512)])
def test_small_limits_have_a_cap_of_a_step_that_they_allow(limits: Limits) -> None:
    costs = CostModel.assumed(limits)
    length = min(64, limits.max_seq_len)
    most = min(limits.max_num_tokens, limits.max_batch_size * length)
    assert 0.004 <= capped_step_s(costs, limits) <= max(0.004, 1.15 * costs.seconds(most, -(-most // length), length))


@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize("step_size", [4, 10, 32])
def test_nobody_waits_longer_than_overtaking_says_and_some_longer_than_in_order(step_size: int, tile: int) -> None:
    """Work comes as fast as it goes, in random lengths: simulated with the queue and the policy."""
    costs = LinearCosts(0.0, 1.0, 0.0, efficient=64 * step_size, tile=tile, per_tile=64.0)
    limits = Limits(64 * step_size, 4 * step_size, 128)
    num_waiting, rng = 40 * step_size, np.random.default_rng(0)
    queues, waits = LaneQueues(), []
    for step in range(400):
        missing = num_waiting - len(queues)
        queues.add(Entry(encoding_of(rng), Waiter(0, 0, inf, frozenset()), "bulk", step, 0.0) for _ in range(missing))
        bounds = step_bounds(queues.views(), "bulk", costs, inf, interactive_expected=False)
        entries = queues.cut(next_batch(queues.views(), limits, costs, bounds))
        waits += [step - entry.arrived_s for entry in entries if step > 200]
    in_order = num_waiting / step_size
    assert 1.2 * in_order < max(waits) <= overtaking(costs, limits) * in_order


def encoding_of(rng: np.random.Generator) -> Encoding:
    """A sequence that no other is equal to, of 48 to 80 tokens."""
    return Encoding(rng.integers(0, 2**31, rng.integers(48, 81), np.int32))
