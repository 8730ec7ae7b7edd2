"""The charts of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bei.cli.bench.recording import curve
from bei.cli.bench.result import BenchResult, LoadResult, PointResult, ServerFacts, ServerSample
from bei.cli.bench.warnings import plan_of_load
from bei.utils.html.line_chart import NUM_COLORS, Axis, Line, line_chart, linear_axis, log_axis, percentile_axis, tail


def sweep_charts(result: BenchResult) -> Iterator[str]:
    """Latency and answers against the rate of a sweep: two charts for the load that is swept, one for each other."""
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
    """One server: a colour a percentile. Several: a colour a server, a dash a percentile."""
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
    """The percentile curves of all loads of ``points``."""
    found = [(point, load, curve(load.histogram)) for point in points for load in point.loads]
    lines = [
        Line(_label(points, point, load), [(tail(each), value) for each, value in values], number % NUM_COLORS + 1)
        for number, (point, load, values) in enumerate(found)
        if values
    ]
    highest = max((values[-1][0] for _, _, values in found if values), default=50.0)
    return line_chart(name, "Latency by percentile", lines, percentile_axis(highest), _ms_axis(lines))


def latency_chart(point: PointResult, name: str) -> str:
    """Latency over time: the median, and P99 if most intervals have answers enough for one, else the highest."""
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
    """Answers a second over time, failures where there are any, and what was asked for."""
    lines: list[Line] = []
    for number, load in enumerate(point.loads):
        every_s = result.setup.interval_s
        prefix = f"{load.name} " if len(point.loads) > 1 else ""
        color = number % NUM_COLORS + 1
        lines.append(Line(f"{prefix}answers", [(one.at_s, one.answers / every_s) for one in load.intervals], color))
        if load.num_failed:
            failed = [(one.at_s, one.failures / every_s) for one in load.intervals]
            lines.append(Line(f"{prefix}failures", failed, color, 2))
        _, rate = plan_of_load(result, point, load)
        if rate is not None:
            lines.append(Line(f"{prefix}asked for", [(0.0, rate), (point.measured_s, rate)], 0, 2))
    y = linear_axis("requests/s", _values(lines))
    return line_chart(name, "Throughput over time", lines, _time_axis(point), y, height=170)


def server_charts(point: PointResult, samples: Sequence[ServerSample], name: str) -> Iterator[str]:
    """What the metrics of a bei server say: how full its steps were, and its lanes."""
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
