"""Laws of a run under every policy; a queue with known waits; bei's policy against the batch manager and FIFO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.cli.simulate.devices import CostTable, SimulatedDevices, read_table
from bei.cli.simulate.http_time import HttpTime
from bei.cli.simulate.policies import POLICIES, Policy
from bei.cli.simulate.result import SimulatedStep, SimulationResult
from bei.cli.simulate.simulator import SimulationRun, simulate
from bei.cli.simulate.trace import Trace, TraceRequest
from bei.cli.simulate.workloads import WORKLOADS, TrafficMix
from bei.core import Encoding, Limits
from bei.port import Lane
from bei.scheduler.cost_model import Coefficients, CostModel, Curve
from bei.scheduler.queue import Entry
from bei.scheduler.scheduler import SchedulingRules
from tests.bei.scheduler.front import LIMITS
from tests.bei.scheduler.front import Front as ServerFront
from tests.support.engines import GatedEngine

PER_TOKEN_S = 1e-3


def table(limits: Limits, *, per_step_s: float = 5e-3, per_slot_s: float = 0.0, num_streams: int = 1) -> CostTable:
    coefficients = Coefficients(per_step_s, 0.0, Curve((0,), (PER_TOKEN_S,)), Curve((0,), (per_slot_s,)))
    return CostTable("test", "a test", True, num_streams, CostModel(limits, coefficients).to_json())


def policy_of(name: str, fleet: SimulatedDevices) -> Policy:
    return POLICIES[name](fleet.table.model(), SchedulingRules())


class Watched:
    """A policy, and what went in and came out of it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.came_s: list[float] = []
        self.taken: list[tuple[float, list[Entry]]] = []

    def add(self, entries: Sequence[Entry], now_s: float) -> None:
        self.came_s += [now_s] * len(entries)
        self._policy.add(entries, now_s)

    def cut(self, now_s: float) -> list[Entry]:
        entries = self._policy.cut(now_s)
        if entries:
            self.taken.append((now_s, entries))
        return entries

    def ran(self, entries: Sequence[Entry], seconds: float, now_s: float) -> None:
        self._policy.ran(entries, seconds, now_s)


@dataclass(frozen=True)
class Case:
    trace: Trace
    fleet: SimulatedDevices
    policy: str
    front: HttpTime

    def run(self) -> tuple[SimulationRun, Watched]:
        watched = Watched(policy_of(self.policy, self.fleet))
        run = SimulationRun(self.trace, self.fleet, watched, self.front)
        run.play()
        return run, watched


@st.composite
def cases(draw: st.DrawFn) -> Case:
    limits = Limits(draw(st.integers(40, 200)), draw(st.integers(1, 40)), 40)
    texts = st.lists(st.integers(1, 40), min_size=1, max_size=40).map(tuple)
    lanes = st.sampled_from(["interactive", "bulk"])
    arrivals = draw(st.lists(st.builds(TraceRequest, lanes, texts, st.floats(0, 0.5)), max_size=8))
    backfill = draw(st.lists(st.builds(TraceRequest, lanes, texts), min_size=not arrivals, max_size=5))
    trace = Trace(sorted(arrivals, key=lambda request: request.at_s or 0.0), backfill, draw(st.integers(1, 3)))
    costs = table(limits, per_slot_s=draw(st.sampled_from([0.0, 1e-4])), num_streams=draw(st.integers(1, 2)))
    front = HttpTime(*draw(st.sampled_from([(0.0, 0.0, 0), (0.01, 1e-3, 0), (0.01, 1e-3, 2)])))
    return Case(trace, SimulatedDevices(costs, draw(st.integers(1, 3))), draw(st.sampled_from([*POLICIES])), front)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_every_text_runs_once_in_a_step_within_the_limits_and_every_request_is_answered(case: Case) -> None:
    run, watched = case.run()
    requests = (*case.trace.arrivals, *case.trace.backfill)
    ran = Counter((entry.waiters[0].request_id, entry.waiters[0].place) for _, step in watched.taken for entry in step)
    assert set(ran.values()) == {1}
    assert len(ran) == case.trace.num_texts
    assert sorted(answered.num_tokens for answered in run.answered) == sorted(sum(each.tokens) for each in requests)
    for _, step in watched.taken:
        assert len(step) <= case.fleet.limits.max_batch_size
        assert sum(entry.num_tokens for entry in step) <= case.fleet.limits.max_num_tokens


@given(cases())
@settings(max_examples=40, deadline=None)
def test_a_stream_runs_one_step_at_a_time_and_none_idles_while_a_text_waits(case: Case) -> None:
    run, watched = case.run()
    by_stream: dict[int, list[SimulatedStep]] = {stream: [] for stream in range(case.fleet.num_streams)}
    for step in run.steps:
        by_stream[step.stream].append(step)
    came, left = sorted(watched.came_s), sorted(when for when, step in watched.taken for _ in step)
    for steps in by_stream.values():
        steps.sort(key=lambda step: step.started_s)
        ends = [0.0, *(step.ended_s for step in steps)]
        for idle_s, busy_s in zip(ends, [*(step.started_s for step in steps), np.inf], strict=True):
            assert idle_s <= busy_s
            for now_s in {when for when in (*came, *left) if idle_s <= when < busy_s}:
                assert np.searchsorted(came, now_s, "right") == np.searchsorted(left, now_s, "right")


@given(cases())
@settings(max_examples=25, deadline=None)
def test_the_same_trace_gives_the_same_run_and_no_more_tokens_than_the_devices_can_do(case: Case) -> None:
    run, _ = case.run()
    again, _ = case.run()
    assert (run.steps, run.answered) == (again.steps, again.answered)
    elapsed_s = max(step.ended_s for step in run.steps)
    assert sum(step.num_tokens for step in run.steps) * PER_TOKEN_S <= case.fleet.num_streams * elapsed_s + 1e-9


@given(cases())
@settings(max_examples=25, deadline=None)
def test_of_a_backfill_no_more_requests_are_on_their_way_than_it_says(case: Case) -> None:
    trace = Trace((), [TraceRequest("bulk", each.tokens) for each in (*case.trace.arrivals, *case.trace.backfill)], 2)
    run, _ = Case(trace, case.fleet, case.policy, case.front).run()
    began, ended = (sorted(times) for times in zip(*((a.arrived_s, a.done_s) for a in run.answered), strict=True))
    for now_s in began:
        assert np.searchsorted(began, now_s, "right") - np.searchsorted(ended, now_s, "right") <= 2


def test_waits_of_one_text_at_a_time_are_those_of_an_m_d_1_queue() -> None:
    """Pollaczek and Khinchine: the mean wait for service of D seconds at utilization u is u D / (2 (1 - u))."""
    tokens, use = 16, 0.6
    fleet = SimulatedDevices(table(Limits(64, 1, 64)))
    service_s = fleet.table.model().seconds(tokens, 1, tokens)
    times = np.cumsum(np.random.default_rng(0).exponential(service_s / use, 30_000))
    trace = Trace([TraceRequest("bulk", (tokens,), float(time)) for time in times])
    run = SimulationRun(trace, fleet, policy_of("fifo", fleet), HttpTime())
    run.play()
    wait_s = float(np.mean([each.done_s - each.arrived_s for each in run.answered])) - service_s
    assert wait_s == pytest.approx(use * service_s / (2 * (1 - use)), rel=0.04)


def test_bei_s_policy_cuts_the_steps_that_the_manager_runs() -> None:
    """Two requests come while the engine is busy; then the manager and the simulation cut the same batches of them."""
    rng = np.random.default_rng(3)
    lengths = [[int(length) for length in rng.integers(1, LIMITS.max_seq_len + 1, 30)] for _ in range(2)]
    engine = GatedEngine(LIMITS)
    front = ServerFront(engine)
    requests = [front.submit([1])]
    engine.wait_entered()
    for each in lengths:
        requests.append(front.submit_encodings([Encoding(rng.integers(0, 1000, n).astype(np.int32)) for n in each]))
    engine.open()
    front.wait(*requests)
    front.close()
    ran = [sorted(np.diff(batch.cu_seqlens).tolist()) for batch in engine.batches]

    fleet = SimulatedDevices(CostTable("assumed", "a test", True, 1, CostModel.assumed(LIMITS).to_json()))
    trace = Trace([TraceRequest("bulk", tuple(each), 1e-6 * at) for at, each in enumerate([[1], *lengths])])
    watched = Watched(policy_of("bei", fleet))
    SimulationRun(trace, fleet, watched, HttpTime()).play()
    assert [sorted(entry.num_tokens for entry in step) for _, step in watched.taken] == ran


# Figures


def test_latencies_and_rates_are_those_of_the_window() -> None:
    fleet = SimulatedDevices(table(Limits(64, 1, 64), per_step_s=1.0))
    lanes: tuple[Lane, ...] = ("bulk", "interactive", "bulk")
    trace = Trace(
        [TraceRequest(lane, (8,), at_s) for lane, at_s in zip(lanes, (0.0, 2.0, 4.0), strict=True)], seconds=5.0
    )
    step_s = fleet.table.model().seconds(8, 1, 8)
    result = simulate(trace, fleet, policy_of("fifo", fleet), warm_s=1.5)
    assert result.window_s == (1.5, 5.0)
    assert result.lanes["interactive"].p99_ms == pytest.approx(1e3 * step_s)
    assert result.lanes["interactive"].tokens_per_s == pytest.approx(8 / 3.5)
    bulk = result.lanes["bulk"]  # the first one came before the window, and its step too; the last one's ended after it
    assert bulk.requests == 1
    assert bulk.tokens_per_s == pytest.approx(8 / step_s / 3.5)
    assert (result.steps.steps, result.steps.fill) == (1, 1.0)
    assert result.steps.device_use == pytest.approx((step_s + 1.0) / 3.5)
    with pytest.raises(ValueError, match="there is no time between"):
        simulate(trace, fleet, policy_of("fifo", fleet), warm_s=5.0)


def test_texts_that_are_too_long_are_cut_and_counted() -> None:
    fleet = SimulatedDevices(table(Limits(64, 4, 10)))
    result = simulate(Trace([TraceRequest("bulk", (9, 10, 11, 500), 0.0)], seconds=9.0), fleet, policy_of("bei", fleet))
    assert result.cut_texts == 2
    assert result.lanes["bulk"].tokens_per_s == pytest.approx(39 / 9)


def test_a_front_delays_texts_by_chunks_and_shares_cores_with_the_engine() -> None:
    front = HttpTime(request_s=1.0, text_s=0.1, shared_cores=2)
    assert [(round(after_s, 9), texts) for after_s, texts in front.chunks(40)] == [
        (4.2, slice(0, 32)),
        (5.0, slice(32, 40)),
    ]
    fleet = SimulatedDevices(table(Limits(64, 64, 64)))
    trace = Trace([TraceRequest("bulk", (8,), 0.0)], seconds=9.0)
    alone, beside = (
        simulate(trace, fleet, policy_of("bei", fleet), http_time=each).lanes["bulk"].max_ms or 0.0
        for each in (HttpTime(), HttpTime(0.3, 0.1, 2))
    )
    assert beside - alone == pytest.approx(400 + 200)


def test_devices_that_are_slower_than_their_table_are_observed() -> None:
    fleet = SimulatedDevices(table(Limits(64, 4, 64)), ratios=(1.5, 2.0, 4.0))
    costs = fleet.table.model()
    trace = Trace((), [TraceRequest("bulk", (16,))] * 60)
    run = SimulationRun(trace, fleet, POLICIES["bei"](costs, SchedulingRules()), HttpTime())
    run.play()
    as_tuned_s = fleet.table.model().seconds(16, 1, 16)
    took_s = [step.ended_s - step.started_s for step in run.steps]
    assert took_s == pytest.approx([as_tuned_s * ratio for ratio in (1.5, 2.0, 4.0)] * 20)
    assert costs.speed == pytest.approx(2.0)


# The simulator's purpose.


def compared(name: str, mix: TrafficMix) -> dict[str, SimulationResult]:
    fleet = SimulatedDevices(read_table("l4-bge-large"), 8)
    trace = WORKLOADS[name](fleet, mix)
    return {each: simulate(trace, fleet, policy_of(each, fleet), warm_s=0.5) for each in ("bei", "fifo")}


@pytest.mark.parametrize(("name", "least_bulk"), [("poisson", 0.98), ("backfill", 0.9)])
def test_on_eight_gpus_interactive_p99_is_at_most_half_of_fifo_s_at_equal_bulk_throughput(
    name: str, least_bulk: float
) -> None:
    """Of a backfill, whose requests come as fast as they are answered, capped steps cost bulk work a little."""
    results = compared(name, TrafficMix(seconds=3, concurrency=32))
    p99_ms = {each: result.lanes["interactive"].p99_ms or 0.0 for each, result in results.items()}
    bulk = {each: result.lanes["bulk"].tokens_per_s for each, result in results.items()}
    assert p99_ms["bei"] <= 0.5 * p99_ms["fifo"]
    assert bulk["bei"] >= least_bulk * bulk["fifo"]
