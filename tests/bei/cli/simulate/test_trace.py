"""Traces: their files, and the synthetic ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.cli.simulate.devices import SimulatedDevices, read_table
from bei.cli.simulate.trace import Trace, TraceRequest, read_trace, write_trace
from bei.cli.simulate.workloads import PASSAGES, WORKLOADS, TrafficMix
from bei.errors import ConfigError

FLEET = SimulatedDevices(read_table("l4-bge-large"), 2)

requests = st.builds(
    TraceRequest,
    st.sampled_from(["interactive", "bulk"]),
    st.lists(st.integers(1, 600), min_size=1, max_size=5).map(tuple),
    st.floats(0, 100),
)


@given(st.lists(requests, min_size=1, max_size=10), st.booleans())
def test_a_trace_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, few: list[TraceRequest], has_backfill: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    arrivals = sorted(few, key=lambda request: request.at_s or 0.0)
    trace = Trace(arrivals, [TraceRequest("bulk", (7, 8))] if has_backfill else [])
    write_trace(path, trace)
    found = read_trace(path)
    assert (list(found.arrivals), list(found.backfill)) == (arrivals, list(trace.backfill))


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"lane": "urgent", "tokens": [1]}',
        b'{"lane": "bulk", "tokens": []}',
        b'{"lane": "bulk", "tokens": [0]}',
        b'{"lane": "bulk", "tokens": [1], "at_s": -1}',
        b'{"lane": "bulk", "tokens": [1], "deadline_s": 1}',
        b'{"lane": "bulk", "tokens": [1], "at_s": 1e999}',
        b"\xff\n",
        b'{"lane": "\xff", "tokens": [1]}',
        b'{"lane": ' + b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"lane": "bulk", "tokens": [1], "at_s": 0.5}\n\n' + line)
    with pytest.raises(ConfigError, match="line 3"):
        read_trace(path)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(b"\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "trace.jsonl")


def test_what_is_no_trace_is_refused() -> None:
    late, early = TraceRequest("bulk", (1,), 2.0), TraceRequest("bulk", (1,), 1.0)
    for arrivals, backfill in (((late, early), ()), ((), (early,)), ((TraceRequest("bulk", (1,)),), ()), ((), ())):
        with pytest.raises(ValueError, match=r"times|needs requests"):
            Trace(arrivals, backfill)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_one_trace_and_another_seed_another(name: str) -> None:
    first, again, other = (WORKLOADS[name](FLEET, TrafficMix(seconds=3, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", ["poisson", "bursts", "diurnal"])
def test_work_comes_at_the_load_that_was_asked_for(name: str) -> None:
    mix = TrafficMix(seconds=150, load=0.6, interactive_share=0.2, bulk_texts=16)
    trace = WORKLOADS[name](FLEET, mix)
    costs = FLEET.table.model()
    work_s = {
        lane: sum(costs.sequence_seconds(n) for each in trace.arrivals if each.lane == lane for n in each.tokens)
        for lane in ("interactive", "bulk")
    }
    assert work_s["interactive"] == pytest.approx(0.12 * 2 * 150, rel=0.1)
    assert work_s["bulk"] == pytest.approx(0.48 * 2 * 150, rel=0.1)


def test_bursts_and_days_have_their_shapes() -> None:
    mix = TrafficMix(seconds=20, bulk_texts=1, interactive_share=0.5)
    bulk = np.array([r.at_s for r in WORKLOADS["bursts"](FLEET, mix).arrivals if r.lane == "bulk"])
    assert np.mean(bulk % 5 < 0.5) == pytest.approx(0.5, abs=0.05)
    queries = np.array([r.at_s for r in WORKLOADS["diurnal"](FLEET, mix).arrivals if r.lane == "interactive"])
    assert np.mean((queries > 5) & (queries < 15)) == pytest.approx(0.5 + 0.8 / np.pi, abs=0.05)


def test_a_backfill_is_more_than_the_fleet_can_do_in_its_time() -> None:
    trace = WORKLOADS["backfill"](FLEET, TrafficMix(seconds=2, concurrency=3))
    costs = FLEET.table.model()
    assert sum(costs.sequence_seconds(n) for request in trace.backfill for n in request.tokens) > 2 * 2
    assert {len(request.tokens) for request in trace.backfill} == {256}
    assert (trace.concurrency, trace.seconds) == (3, 2)


def test_lengths_have_the_mean_and_the_bounds_that_they_say() -> None:
    drawn = PASSAGES.draw(np.random.default_rng(0), 20_000)
    assert np.mean(drawn) == pytest.approx(PASSAGES.mean, rel=0.05)
    assert min(drawn) >= PASSAGES.least
    assert max(drawn) == PASSAGES.most
