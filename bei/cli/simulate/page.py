"""A comparison of policies as a self-contained HTML page: the result in a sentence, a picture of each lane, figures."""

from __future__ import annotations

from collections.abc import Iterator

from bei.cli.simulate.report import PolicyComparison, described, figures_of, finding
from bei.cli.simulate.result import LaneFigures
from bei.port import LANES, Lane
from bei.utils.html.document import document, facts_table, safe, table
from bei.utils.html.line_chart import NUM_COLORS, STYLE, Line, line_chart, log_axis, percentile_axis, tail


def simulation_page(comparison: PolicyComparison) -> str:
    """The comparison as an HTML page."""
    title = f"Schedulers on {comparison.devices} simulated device{'s' if comparison.devices > 1 else ''}"
    names = list(comparison.policies)
    rows = [
        [(name, False), *((value, True) for value in values)]
        for name, values in figures_of(comparison.policies).items()
    ]
    parts = [
        f"<h1>{safe(title)}</h1>",
        f'<p class="verdict pass">{safe(finding(comparison))}</p>',
        *(_lane(comparison, lane) for lane in LANES),
        "<h2>Figures</h2>",
        table("Latencies from a request's arrival to its last text's answer", ["figure", *names], rows),
        "<h2>What was simulated</h2>",
        facts_table(described(comparison)),
    ]
    return document(title, parts, STYLE)


def _lane(comparison: PolicyComparison, lane: Lane) -> str:
    lines = [
        Line(name, list(_curve(result.lanes[lane])), number % NUM_COLORS + 1)
        for number, (name, result) in enumerate(comparison.policies.items())
    ]
    y = log_axis("milliseconds", [value for line in lines for _, value in line.shown])
    return line_chart(f"latency-{lane}", f"Latency of {lane} requests", lines, percentile_axis(99.0), y)


def _curve(figures: LaneFigures) -> Iterator[tuple[float, float | None]]:
    for percentile, value in ((50.0, figures.p50_ms), (90.0, figures.p90_ms), (99.0, figures.p99_ms)):
        yield tail(percentile), value
