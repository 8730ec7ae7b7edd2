"""The progress display of a point."""

from __future__ import annotations

import io
import re

from rich.console import Console

from bei.cli.bench.recorder import Interval, LatencyHistogram
from bei.cli.bench.terminal import ProgressDisplay
from bei.cli.bench.worker import LoadReport
from bei.cli.bench.workers import LoadRecord, PointRecord
from tests.bei.cli.bench.results import setup_of


def shown(record: PointRecord) -> str:
    """The last that the terminal got, in one line."""
    terminal = io.StringIO()
    with ProgressDisplay(setup_of(), 4, Console(file=terminal, force_terminal=True, width=120)) as live:
        live.begin("bei", 21.5, 2)
        live.show(record)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    return " ".join(text.split())


def test_a_terminal_shows_how_far_a_point_has_come_and_the_figures_of_each_load() -> None:
    latencies = LatencyHistogram()
    for latency_s in (0.01, 0.02, 0.03):
        latencies.record(latency_s)
    interactive = LoadRecord()
    interactive.add(0, LoadReport("interactive", 2, [Interval(0, answers=40, inputs=40)]))
    report = [Interval(1, answers=3, inputs=9, failures={"429": 7}, latency=latencies.packed())]
    interactive.add(0, LoadReport("interactive", 5, report))
    record = PointRecord({"interactive": interactive, "bulk": LoadRecord()}, started_s=0.0, elapsed_s=4.4)
    said = shown(record)
    assert "point 2 of 4: bei at 21.5 requests/s, measuring, 4 of 6.5 s" in said
    assert "interactive 5 3.0 9.0 20.0 ms - 30.0 ms 7" in said  # of the last interval; three answers have no P99
    assert "bulk 0 0.0 0.0 - - - 0" in said


def test_it_says_in_which_part_of_the_point_it_is() -> None:
    record = PointRecord({"interactive": LoadRecord(), "bulk": LoadRecord()}, started_s=0.0)
    for elapsed_s, phase in ((1.0, "warm-up"), (3.0, "measuring"), (6.5, "waiting for the last answers")):
        record.elapsed_s = elapsed_s
        assert f", {phase}, " in shown(record)
    record.is_interrupted = True
    assert ", ending, " in shown(record)
