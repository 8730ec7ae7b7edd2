"""From workers' reports to the figures of a result."""

from __future__ import annotations

import pytest

from bei.cli.bench.recorder import Interval, LatencyHistogram, PackedHistogram
from bei.cli.bench.run import load_result
from bei.cli.bench.worker import LoadReport
from bei.cli.bench.workers import LoadRecord


def packed(*latencies_s: float) -> PackedHistogram:
    histogram = LatencyHistogram()
    for latency_s in latencies_s:
        histogram.record(latency_s)
    return histogram.packed()


def test_reports_of_all_workers_are_one_load_and_seconds_without_answers_are_there() -> None:
    record = LoadRecord(num_reconnects=3)
    record.add(0, LoadReport("x", 2, [Interval(0, answers=2, inputs=8, latency=packed(0.01, 0.03))]))
    record.add(1, LoadReport("x", 0, [Interval(0, answers=1, inputs=4, latency=packed(0.02))]))
    last = [
        Interval(3, answers=1, inputs=4, failures={"429": 2}, latency=packed(0.5)),
        Interval(5, answers=1, inputs=4),
    ]
    record.add(1, LoadReport("x", 0, last))  # one of them behind the window of four seconds
    load = load_result("x", record, 4.0, 1.0)
    assert (load.requests_per_s, load.inputs_per_s, load.num_due) == (1.0, 4.0, 6)
    assert (load.failures, load.reconnects, load.latency.count) == ({"429": 2}, 3, 4)
    assert [(one.at_s, one.answers, one.failures) for one in load.intervals] == [
        *((0.0, 3, 0), (1.0, 0, 0), (2.0, 0, 0), (3.0, 1, 2), (4.0, 0, 0), (5.0, 1, 0))
    ]
    assert load.intervals[0].p50 == pytest.approx(20, rel=1e-3)
    assert (load.intervals[1].p50, load.intervals[1].max, load.lateness_p99) == (None, None, None)
    assert load.latency.max == pytest.approx(500)


def test_a_load_without_any_answer_has_no_figures() -> None:
    load = load_result("x", LoadRecord(), 2.0, 1.0)
    assert (load.num_due, load.requests_per_s, load.latency.p50, len(load.intervals)) == (0, 0.0, None, 2)
