"""``bei bench compare``: two results of the same measurement side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bei.cli.bench.recorder import curve
from bei.cli.bench.report import curves_chart
from bei.cli.bench.result import BenchResult, LoadResult, PointResult, read_result
from bei.cli.bench.terminal import ms, rendered
from bei.errors import ComparisonError
from bei.utils.full_disk import write_whole
from bei.utils.html.document import Cell, document, facts_table, safe, table
from bei.utils.html.line_chart import STYLE

# Settings in which both results must agree; other settings and the servers may be what is compared.
_SAME = ("dialect", "loads", "texts", "rates", "timeout_s", "obeys_retry_after")
_FIGURES = ("answers/s", "P50", "P90", "P99", "P99.9", "max")


@dataclass(frozen=True)
class ComparedLoad:
    """A load at a point in both results."""

    server: str
    rate: float | None
    load: str
    before: LoadResult
    after: LoadResult

    @property
    def figures(self) -> Iterator[tuple[str, float | None, float | None, float | None]]:
        """Name, before, after, and after / before of each figure; None: missing, or division by zero."""
        for name, old, new in zip(_FIGURES, _figures(self.before), _figures(self.after), strict=True):
            yield name, old, new, None if old is None or new is None or not old else new / old


@dataclass(frozen=True)
class ResultComparison:
    """Two comparable results; ``notes``: other differences."""

    before: BenchResult
    after: BenchResult
    rows: list[ComparedLoad]
    notes: list[str]


def compare(options: dict[str, Any]) -> int:
    """Run the command. Raises ComparisonError, BenchError."""
    before, after = options["before"], options["after"]
    comparison = compared(read_result(before), read_result(after))
    print(as_text(comparison, before, after))  # noqa: T201
    if options["html"] is not None:
        write_whole(options["html"], page(comparison, before, after).encode())
        print(f"written: {options['html']}")  # noqa: T201
    return 0


def compared(before: BenchResult, after: BenchResult) -> ResultComparison:
    """The comparison. Raises ComparisonError, which names all differences that must not be."""
    differences = list(_differences(before, after))
    if differences:
        raise ComparisonError(f"These results do not measure the same: {'; '.join(differences)}.")
    rows = [
        ComparedLoad(new_point.server, new_point.rate, old.name, old, new)
        for old_point, new_point in _pairs(before, after)
        for old, new in zip(old_point.loads, new_point.loads, strict=True)
    ]
    return ResultComparison(before, after, rows, list(_notes(before, after)))


def _differences(before: BenchResult, after: BenchResult) -> Iterator[str]:
    for name in _SAME:
        old, new = getattr(before.setup, name), getattr(after.setup, name)
        if name == "texts":  # the content of the file counts, not its path
            old, new = (msgspec.structs.replace(one, file=one.file and "a file") for one in (old, new))
        if name == "loads":
            yield from _load_differences(before, after)
        elif old != new:
            yield f"{name} {_shown(old)} and {_shown(new)}"
    names = [[server.name for server in result.servers] for result in (before, after)]
    if len(names[0]) != len(names[1]) or (len(names[0]) > 1 and names[0] != names[1]):
        yield f"servers {', '.join(names[0])} and {', '.join(names[1])}"
    for which, result in (("first", before), ("second", after)):
        if result.interrupted:
            yield f"the {which} was ended early"


def _load_differences(before: BenchResult, after: BenchResult) -> Iterator[str]:
    old, new = ({load.name: load for load in result.setup.loads} for result in (before, after))
    if list(old) != list(new):
        yield f"loads {', '.join(old)} and {', '.join(new)}"
        return
    for name in old:
        for key in old[name].__struct_fields__:
            values = getattr(old[name], key), getattr(new[name], key)
            if values[0] != values[1]:
                yield f"{key} of load {name} {_shown(values[0])} and {_shown(values[1])}"


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _pairs(before: BenchResult, after: BenchResult) -> Iterator[tuple[PointResult, PointResult]]:
    """Points of the same rate and server; single servers are paired whatever their names."""
    order = {server.name: number for number, server in enumerate(before.servers)}
    old = {(order[point.server], point.rate): point for point in before.points}
    order = {server.name: number for number, server in enumerate(after.servers)}
    for point in after.points:
        yield old[order[point.server], point.rate], point


def _notes(before: BenchResult, after: BenchResult) -> Iterator[str]:
    for name in ("duration_s", "warmup_s", "workers", "header_names"):
        old, new = getattr(before.setup, name), getattr(after.setup, name)
        if old != new:
            yield f"{name}: {_shown(old)}, then {_shown(new)}"
    for old_server, new_server in zip(before.servers, after.servers, strict=True):
        for name in ("url", "model", "software"):
            old, new = getattr(old_server, name), getattr(new_server, name)
            if old != new:
                yield f"{name} of {new_server.name}: {old}, then {new}"
    for name in ("cpu", "cores", "system"):
        old, new = getattr(before.machine, name), getattr(after.machine, name)
        if old != new:
            yield f"the generator's {name}: {old}, then {new}"
    for which, result in (("first", before), ("second", after)):
        for warning in result.warnings:
            yield f"WARNING of the {which}: {warning}"


def _figures(load: LoadResult) -> list[float | None]:
    found = load.latency
    return [load.requests_per_s, found.p50, found.p90, found.p99, found.p999, found.max]


def as_text(comparison: ResultComparison, before: Path, after: Path) -> str:
    """The comparison as text."""
    header = ("server", "load", "asked/s", "", *_FIGURES, "failed")
    shown: list[list[str]] = []
    for row in comparison.rows:
        old, new, change = _cells(row)
        rate = "-" if row.rate is None else f"{row.rate:g}"
        shown.append([row.server, row.load, rate, "A", *old, str(row.before.num_failed)])
        shown.append(["", "", "", "B", *new, str(row.after.num_failed)])
        shown.append(["", "", "", "B / A", *change, ""])
    head = [f"A: {before}, {comparison.before.started}", f"B: {after}, {comparison.after.started}"]
    table = rendered(header, shown, num_names=2, spare=("P99.9", "P90", "max", "server"))
    return "\n".join([*head, table, *comparison.notes])


def _cells(row: ComparedLoad) -> tuple[list[str], list[str], list[str]]:
    figures = list(row.figures)
    old = [ms(value) for _, value, _, _ in figures]
    new = [ms(value) for _, _, value, _ in figures]
    return old, new, ["-" if ratio is None else f"{ratio:.3f}" for _, _, _, ratio in figures]


def page(comparison: ResultComparison, before: Path, after: Path) -> str:
    """The comparison as a self-contained HTML page."""
    parts = ["<h1>Two loads compared</h1>"]
    named = [("A", before, comparison.before), ("B", after, comparison.after)]
    parts.append(facts_table([(name, f"{path.name}, {result.started}") for name, path, result in named]))
    if comparison.notes:
        items = "".join(f"<li>{safe(note)}</li>" for note in comparison.notes)
        parts.append(f'<div class="verdict open"><strong>What else differs</strong><ul>{items}</ul></div>')
    parts.append("<h2>Figures</h2>")
    rows: list[list[Cell]] = []
    for row in comparison.rows:
        name = row.load if row.rate is None else f"{row.load}, {row.rate:g}/s"
        name = f"{row.server}: {name}" if len(comparison.after.servers) > 1 else name
        failed = ([str(row.before.num_failed)], [str(row.after.num_failed)], [""])
        for label, cells, last in zip(("A", "B", "B / A"), _cells(row), failed, strict=True):
            rows.append([(name if label == "A" else "", False), *((cell, True) for cell in (label, *cells, *last))])
    parts.append(table("Latencies in milliseconds", ["Load", "", *_FIGURES, "Failed"], rows))
    parts.append("<h2>Percentiles</h2>")
    parts += (_chart(row, f"percentiles-{number}", comparison) for number, row in enumerate(comparison.rows))
    return document("Two loads compared", parts, STYLE)


def _chart(row: ComparedLoad, name: str, comparison: ResultComparison) -> str:
    curves = [("A", curve(row.before.histogram), 1, 0), ("B", curve(row.after.histogram), 2, 1)]
    where = f"{row.server}: " if len(comparison.after.servers) > 1 else ""
    at = "" if row.rate is None else f" at {row.rate:g} requests/s"
    return curves_chart(name, f"{where}{row.load}{at}: latency by percentile", curves)
