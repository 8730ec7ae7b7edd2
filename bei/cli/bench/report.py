"""A result as a self-contained HTML page: light, dark and print styles, no script; equal input gives equal bytes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bei.cli.bench.findings import findings
from bei.cli.bench.recorder import curve
from bei.cli.bench.result import (
    MOST_CPU_SHARE,
    BenchResult,
    IntervalResult,
    LoadResult,
    PointResult,
    ServerFacts,
    ServerSample,
)
from bei.cli.bench.terminal import HEADER, ms, row_of
from bei.utils.html.document import Cell, document, facts_table, safe, table
from bei.utils.html.line_chart import (
    NUM_COLORS,
    STYLE,
    Axis,
    Line,
    line_chart,
    linear_axis,
    log_axis,
    percentile_axis,
    tail,
)

_STYLE = f"""{STYLE}
details {{ margin: .75rem 0; }} summary {{ cursor: pointer; color: var(--quiet); }}
.finding {{ font-size: 1.1rem; margin: .35rem 0; }}
.verdict ul {{ margin: .25rem 0 0; padding-left: 1.2rem; font-size: 1rem; }}
"""


def report_page(result: BenchResult) -> str:
    """The result as an HTML page."""
    names = " and ".join(server.name if len(result.servers) > 1 else server.url for server in result.servers)
    parts = [
        f"<h1>Load on <bdi>{safe(names)}</bdi></h1>",
        *(f'<p class="finding"><bdi>{safe(sentence)}</bdi></p>' for sentence in findings(result)),
        f'<p class="quiet">{safe(result.started)}, bei bench {safe(result.bei)}</p>',
        *_verdict(result),
        *_results(result),
        *(_sweep(result) if result.setup.rates else _curves(result)),
        *_points(result),
        *_generator(result),
        *_setup(result),
        *_legend(result),
        *_all_figures(result),
    ]
    return document(f"Load on {names}", parts, _STYLE)


def _verdict(result: BenchResult) -> Iterator[str]:
    if not result.warnings:
        yield (
            '<p class="verdict pass"><strong>No warnings</strong> Every request was answered as the dialect asks, '
            "requests were sent in time, and the generator was not the bottleneck.</p>"
        )
        return
    kind = "fail" if result.interrupted or result.num_failed else "open"
    count = "One warning" if len(result.warnings) == 1 else f"{len(result.warnings)} warnings"
    items = "".join(f"<li>{safe(warning)}</li>" for warning in result.warnings)
    yield f'<div class="verdict {kind}"><strong>{count}</strong><ul>{items}</ul></div>'


def _results(result: BenchResult) -> Iterator[str]:
    yield "<h2>Results</h2>"
    header = [name[0].upper() + name[1:] for name in HEADER]
    rows = [
        [(cell, column > 1) for column, cell in enumerate(row_of(result, point, load))]
        for point in result.points
        for load in point.loads
    ]
    caption = (
        "Latencies in milliseconds, of good answers, from when a request was due (of a closed loop: sent). CPU: the "
        "busiest generator's share of a core"
    )
    yield table(caption, header, rows)
    if errors := result.errors:
        yield "<h3>What failed answers said</h3>"
        yield "<ul>" + "".join(f"<li><bdi>{safe(error)}</bdi></li>" for error in errors) + "</ul>"


def _sweep(result: BenchResult) -> Iterator[str]:
    yield "<h2>Against the rate</h2>"
    yield from sweep_charts(result)


def _curves(result: BenchResult) -> Iterator[str]:
    yield "<h2>Percentiles</h2>"
    yield percentile_chart(result, result.points, "percentiles")


def _points(result: BenchResult) -> Iterator[str]:
    yield "<h2>Over time</h2>"
    for number, point in enumerate(result.points):
        if len(result.points) > 1:
            yield f"<h3>{safe(result.label(point))}</h3>"
        yield latency_chart(point, f"latency-{number}")
        yield throughput_chart(result, point, f"throughput-{number}")
        if result.setup.rates:
            yield percentile_chart(result, [point], f"percentiles-{number}")
        if point.samples:
            level = 4 if len(result.points) > 1 else 3
            yield f"<h{level}>What the server says</h{level}>"
            yield from server_charts(point, point.samples, f"server-{number}")


def _generator(result: BenchResult) -> Iterator[str]:
    yield "<h2>The generator</h2>"
    yield (
        f'<p class="quiet">A process that makes load and uses more than {MOST_CPU_SHARE:.0%} of a core, or sends late, '
        "is part of what it measures.</p>"
    )
    rows: list[list[Cell]] = [
        [
            (f"{result.label(point)}: {load.name}", False),
            (", ".join(f"{share:.1%}" for share in point.cpu_shares), True),
            (f"{point.coordinator_share:.1%}", True),
            *((ms(value), True) for value in (load.lateness_p50, load.lateness_p99, load.lateness_max)),
            (str(load.reconnects), True),
        ]
        for point in result.points
        for load in point.loads
    ]
    header = ["Point", "Workers", "Coordinator", "Late P50", "Late P99", "Late max", "Reconnects"]
    yield table("Shares of a core; lateness in milliseconds from due until the generator came to it", header, rows)


def _setup(result: BenchResult) -> Iterator[str]:
    setup, machine = result.setup, result.machine
    yield "<h2>What was measured</h2>"
    rows = [("Command", shlex.join(result.command)), ("Dialect", setup.dialect)]
    rows += [(f"Load {load.name}", load.shape) for load in setup.loads]
    if setup.rates:
        rows.append(("Rates", ", ".join(f"{rate:g}" for rate in setup.rates) + " requests/s"))
    rows.append(("Texts", _texts(result)))
    rows.append(("Time", f"{setup.duration_s:g} s a point behind {setup.warmup_s:g} s of warm-up"))
    rows.append(("Time for an answer", f"{setup.timeout_s:g} s, from when it was due"))
    if setup.obeys_retry_after:
        rows.append(("429 and 503", "sent again when Retry-After said"))
    if setup.header_names:
        rows.append(("Headers", ", ".join(setup.header_names)))
    rows += [(f"Server {server.name}", _server(server)) for server in result.servers]
    rows.append(("Load made on", f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}"))
    yield facts_table(rows)
    if any(server.is_local for server in result.servers):
        yield '<p class="quiet">The server shared its machine with the generator, which took its time from it.</p>'


def _texts(result: BenchResult) -> str:
    texts = result.setup.texts
    if texts.file is not None:
        source = f"{texts.num_lines} lines of {texts.file} (SHA-256 {texts.sha256})"
    else:
        source = f"random English words, seed {texts.seed}"
    if texts.repeated is not None:
        return f"{source}; {texts.repeated} texts again and again"
    return f"{source}; no two alike"


def _server(server: ServerFacts) -> str:
    model = f", model {server.model}" if server.model else ""
    return f"{server.url}{model}{', ' + server.software if server.software else ''}"


def _legend(result: BenchResult) -> Iterator[str]:
    yield "<h2>How to read it</h2>"
    yield (
        '<p class="quiet">An open loop sends at its rate whatever becomes of the requests, as users who know '
        "nothing of each other do, and a latency counts from when the request was due: a server that stalls for a "
        "second delays all that were due in it, and the percentiles show them. A closed loop sends the next "
        "request when an answer has come: it shows how much a server does at a concurrency, but when the server "
        "stalls nobody asks, and one long answer is all that is seen of it. Answers a second count those that "
        "came within the window; latencies count requests that were due in it, however late their answers. A "
        "percentile that so few answers cannot give is a dash.</p>"
    )
    if any(point.samples for point in result.points):
        yield (
            '<p class="quiet">Steps, lanes and waits are means over an interval, from the server\'s /metrics. A step '
            "is one run of the engine.</p>"
        )


# All figures of the JSON.


def _all_figures(result: BenchResult) -> Iterator[str]:
    yield "<h2>All figures</h2>"
    content = msgspec.to_builtins(result)
    about = {key: value for key, value in content.items() if key != "points"}
    yield _details("Setup, machine and servers", facts_table(_flat(about)))
    for number, point in enumerate(result.points):
        shown = content["points"][number]
        totals = {key: value for key, value in shown.items() if key not in ("loads", "samples")}
        parts = [facts_table(_flat(totals))]
        for load, of_load in zip(point.loads, shown["loads"], strict=True):
            of_load["histogram"].pop("encoded")
            rest = {key: value for key, value in of_load.items() if key != "intervals"}
            parts += [f"<h3>{safe(load.name)}</h3>", facts_table(_flat(rest))]
            parts.append(_rows(f"Intervals of {load.name}", IntervalResult, of_load["intervals"]))
        if shown["samples"]:
            parts.append(_rows("The server's metrics", ServerSample, shown["samples"]))
        yield _details(f"{result.label(point)}: totals and intervals", "\n".join(parts))


def _details(title: str, content: str) -> str:
    return f"<details><summary>{safe(title)}</summary>\n{content}\n</details>"


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            for number, one in enumerate(value):
                yield from _flat(one if isinstance(one, dict) else {"": one}, f"{name}[{number}].")
        else:
            yield name, _exact(value)


def _rows(caption: str, kind: type[msgspec.Struct], rows: Sequence[Mapping[str, Any]]) -> str:
    header = kind.__struct_fields__
    return table(caption, header, [[(_exact(row[name]), True) for name in header] for row in rows])


def _exact(value: Any) -> str:
    """The value as in JSON; texts unquoted."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sweep_charts(result: BenchResult) -> Iterator[str]:
    """Charts of latency and answers against the rate of a sweep, two for each load."""
    for index, plan in enumerate(result.setup.loads):
        of_load = [
            (point.server, point.rate or 0.0, next(load for load in point.loads if load.name == plan.name))
            for point in result.points
        ]
        x = linear_axis("requests/s asked for", [rate for _, rate, _ in of_load])
        lines = list(_latency_lines(result, of_load))
        yield line_chart(f"sweep-latency-{index}", f"{plan.name}: latency against rate", lines, x, _ms_axis(lines))
        lines = [
            Line(
                server.name, [(rate, load.requests_per_s) for name, rate, load in of_load if name == server.name], color
            )
            for color, server in _colored(result)
        ]
        if plan.is_swept:
            lines.append(Line("as asked", [(rate, rate) for rate in sorted({rate for _, rate, _ in of_load})], 0, 2))
        title = f"{plan.name}: answered against asked for"
        y = linear_axis("requests/s answered", _values(lines))
        yield line_chart(f"sweep-answers-{index}", title, lines, x, y, height=170)


def _latency_lines(result: BenchResult, of_load: Sequence[tuple[str, float, LoadResult]]) -> Iterator[Line]:
    """With one server a color for each percentile; with several a color for each server and a dash for each
    percentile."""
    for color, server in _colored(result):
        own = [(rate, load.latency) for name, rate, load in of_load if name == server.name]
        if len(result.servers) > 1:
            yield Line(f"{server.name} P50", [(rate, found.p50) for rate, found in own], color)
            yield Line(f"{server.name} P99", [(rate, found.p99) for rate, found in own], color, 1)
        else:
            yield Line("P50", [(rate, found.p50) for rate, found in own], 1)
            yield Line("P95", [(rate, found.p95) for rate, found in own], 2)
            yield Line("P99", [(rate, found.p99) for rate, found in own], 3)


def percentile_chart(result: BenchResult, points: Sequence[PointResult], name: str) -> str:
    """Percentile curves of all loads of ``points``."""
    loads = [(point, load) for point in points for load in point.loads]
    curves = [
        (_label(points, *each), values, number % NUM_COLORS + 1, 0)
        for number, each in enumerate(loads)
        if (values := curve(each[1].histogram))
    ]
    return curves_chart(name, "Latency by percentile", curves)


def curves_chart(name: str, title: str, curves: Sequence[tuple[str, Sequence[tuple[float, float]], int, int]]) -> str:
    """A chart of percentile curves. Each: label, points (percentile, ms), color, dash (see ``Line``)."""
    lines = [Line(label, [(tail(each), ms) for each, ms in points], *style) for label, points, *style in curves]
    highest = max((points[-1][0] for _, points, _, _ in curves if points), default=50.0)
    return line_chart(name, title, lines, percentile_axis(highest), _ms_axis(lines))


def latency_chart(point: PointResult, name: str) -> str:
    """Latency over time: median, and P99 if most intervals have enough answers for one, else the maximum."""
    lines: list[Line] = []
    for number, load in enumerate(point.loads):
        answered = [one for one in load.intervals if one.answers]
        has_p99 = 2 * sum(one.p99 is not None for one in answered) > len(answered)
        prefix = f"{load.name} " if len(point.loads) > 1 else ""
        color = number % NUM_COLORS + 1
        lines.append(Line(f"{prefix}P50", [(one.at_s, one.p50) for one in load.intervals], color))
        high = [(one.at_s, one.p99 if has_p99 else one.max) for one in load.intervals]
        lines.append(Line(f"{prefix}P99" if has_p99 else f"{prefix}highest", high, color, 1))
    return line_chart(name, "Latency over time", lines, _time_axis(point), _ms_axis(lines))


def throughput_chart(result: BenchResult, point: PointResult, name: str) -> str:
    """Answers and failures per second over time, and the requested rate."""
    lines: list[Line] = []
    for number, load in enumerate(point.loads):
        every_s = result.setup.interval_s
        prefix = f"{load.name} " if len(point.loads) > 1 else ""
        color = number % NUM_COLORS + 1
        within = [one for one in load.intervals if one.at_s < point.measured_s]  # the last answers come after it
        lines.append(Line(f"{prefix}answers", [(one.at_s, one.answers / every_s) for one in within], color))
        if load.num_failed:
            failed = [(one.at_s, one.failures / every_s) for one in within]
            lines.append(Line(f"{prefix}failures", failed, color, 2))
        rate = result.rate_of(point, load)
        if rate is not None:
            lines.append(Line(f"{prefix}asked for", [(0.0, rate), (point.measured_s, rate)], 0, 2))
    y = linear_axis("requests/s", _values(lines))
    return line_chart(name, "Throughput over time", lines, _time_axis(point), y, height=170)


def server_charts(point: PointResult, samples: Sequence[ServerSample], name: str) -> Iterator[str]:
    """Charts from a bei server's metrics: fill of steps, lanes."""
    x = _time_axis(point)
    lines = [
        Line("tokens of a step", [(one.at_s, one.tokens_per_step) for one in samples], 1),
        Line("sequences of a step", [(one.at_s, one.sequences_per_step) for one in samples], 2),
    ]
    y = log_axis("a step, mean", _values(lines))
    yield line_chart(f"{name}-steps", "Batch fill over time", lines, x, y, height=170)
    lines = [
        Line(f"{lane}: wait", [(one.at_s, one.queue_ms.get(lane)) for one in samples], color)
        for color, lane in enumerate(("interactive", "bulk"), 1)
    ]
    lines = [line for line in lines if line.shown]
    y = linear_axis("ms, mean", _values(lines))
    yield line_chart(f"{name}-waits", "Wait in the queue by lane", lines, x, y, height=170)
    lines = [
        Line(f"{lane}: waiting", [(one.at_s, one.waiting.get(lane)) for one in samples], color)
        for color, lane in enumerate(("interactive", "bulk"), 1)
    ]
    y = linear_axis("sequences", _values(lines))
    yield line_chart(f"{name}-waiting", "Sequences waiting by lane", lines, x, y, height=130)


def _time_axis(point: PointResult) -> Axis:
    last = max((one.at_s for load in point.loads for one in load.intervals), default=0.0)
    return linear_axis("seconds of the window", [point.measured_s, last])


def _ms_axis(lines: Sequence[Line]) -> Axis:
    return log_axis("milliseconds", _values(lines))


def _values(lines: Sequence[Line]) -> list[float]:
    return [value for line in lines for _, value in line.shown]


def _colored(result: BenchResult) -> Iterator[tuple[int, ServerFacts]]:
    for number, server in enumerate(result.servers):
        yield number % NUM_COLORS + 1, server


def _label(points: Sequence[PointResult], point: PointResult, load: LoadResult) -> str:
    parts = [point.server] if len({one.server for one in points}) > 1 else []
    parts += [load.name] if len(point.loads) > 1 or not parts else []
    return " ".join(parts)
