"""The comparison of the simulator with a server: what it reads, how much it sends, and what it calls a figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bei.cli.simulate.devices import CostTable, SimulatedDevices
from bei.cli.simulate.result import SimulatedAnswer
from bei.core import Limits
from bei.scheduler.cost_model import CostModel, Sample
from benchmarks.recorded import read_steps
from benchmarks.simulated import _pooled, _slowdown, _trace

TUNED = SimulatedDevices(CostTable("assumed", "a test", True, 1, CostModel.assumed(Limits(2048, 64, 256)).to_json()))


def test_steps_are_read_once_each_and_a_line_that_is_not_whole_waits(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    lines = [json.dumps([20 * n, n, 20, 0.5]) + "\n" for n in (1, 2, 3)]
    path.write_text(lines[0] + lines[1][:-4])
    samples, end = read_steps(path, 0)
    assert samples == [Sample(20, 1, 20, 0.5)]
    path.write_text("".join(lines))
    assert [sample.batch_size for sample in read_steps(path, end)[0]] == [2, 3]


def test_arrivals_are_a_share_of_what_the_server_can_do() -> None:
    trace = _trace(0.7, TUNED, tokens_per_s=5_000.0, seconds=200.0, seed=3)
    offered = sum(min(length, 256) for request in trace.arrivals for length in request.tokens) / 200.0
    assert offered == pytest.approx(0.7 * 5_000.0, rel=0.05)


def test_the_slowdown_is_of_the_time_that_all_steps_took_together() -> None:
    costs = TUNED.table.model()
    took = [Sample(*shape, seconds=2.0 * costs.seconds(*shape)) for shape in ((20, 1, 20), (900, 30, 60))]
    assert _slowdown(took, replace(TUNED, ratios=(1.0, 1.5))) == pytest.approx(2.0 / 1.25)


def test_figures_are_of_the_requests_of_all_repetitions_behind_their_warm_up() -> None:
    def run(latency_s: float) -> list[SimulatedAnswer]:
        return [SimulatedAnswer("bulk", at_s, at_s + latency_s, 1, 90) for at_s in (0.5, 2.0, 3.0)] + [
            SimulatedAnswer("interactive", 4.0, 4.0 + latency_s, 1, 9)
        ]

    sides = {"measured": 0.2, "as tuned": 0.1, "as calibrated": 0.2, "at its own speed": 0.2}
    runs = [{side: run(latency_s) for side, latency_s in sides.items()} for _ in range(2)]
    found = _pooled(runs, seconds=10.0)["bulk"]
    assert found["measured"] == {
        **{"count": 4, "p50": 200.0, "p90": 200.0, "p99": 200.0, "max": 200.0},
        "tokens_per_s": pytest.approx(2 * 90 / 9.0),
    }
    assert found["predicted / measured"]["as tuned"]["p50"] == 0.5
    with pytest.raises(SystemExit, match="interactive"):
        _pooled([{name: answered[:3] for name, answered in each.items()} for each in runs], seconds=10.0)
