"""Results as tables for a terminal, or for a file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bei.cli.bench.result import BenchResult, LoadResult, PointResult
from bei.cli.bench.warnings import plan_of_load
from bei.utils.untrusted_files import printable

_WIDTH = 120
_HEADER = ("server", "load", "asked/s", "answers/s", "inputs/s", "P50", "P90", "P99", "P99.9", "max", "failed", "CPU")


def summary(result: BenchResult) -> str:
    """What was measured, and what to know about it."""
    rows = [row_of(result, point, load) for point in result.points for load in point.loads]
    shown = rendered(_HEADER, rows, num_names=2)
    notes = [
        "milliseconds from when a request was due (closed loop: sent); CPU: the busiest generator's share of a core"
    ]
    notes += [f"WARNING {warning}" for warning in result.warnings]
    errors = (f"{load.name}: {error}" for point in result.points for load in point.loads for error in load.errors)
    notes += [f"error    {error}" for error in dict.fromkeys(errors)]
    return "\n".join([shown, *map(printable, notes)])


def row_of(result: BenchResult, point: PointResult, load: LoadResult) -> list[str]:
    """A load at a point."""
    latency = load.latency
    _, rate = plan_of_load(result, point, load)
    return [
        point.server,
        load.name,
        "-" if rate is None else f"{rate:g}",
        f"{load.requests_per_s:.1f}",
        f"{load.inputs_per_s:.1f}",
        *(ms(value) for value in (latency.p50, latency.p90, latency.p99, latency.p999, latency.max)),
        str(load.num_failed),
        f"{max(point.cpu_shares, default=0.0):.1%}",
    ]


def ms(value: float | None) -> str:
    """Milliseconds to three digits or more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rendered(header: Sequence[str], rows: Iterable[Sequence[str]], num_names: int) -> str:
    """A table whose first columns are names, and all others numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < num_names else "right", no_wrap=number >= num_names)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, highlight=False, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")
