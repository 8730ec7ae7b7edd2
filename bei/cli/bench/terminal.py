"""Terminal output: the summary of a result, and the progress of a run (a table on a terminal, else a line a point)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bei.cli.bench.findings import findings
from bei.cli.bench.recorder import IntervalTotals
from bei.cli.bench.result import BenchResult, BenchSetup, LoadResult, PointResult
from bei.cli.bench.workers import PointRecord
from bei.cli.console_text import console_text, stdout_width, wrapped
from bei.printable import printable

# Columns that a narrow terminal goes without, in this order; the files of --out have them.
_SPARE = ("CPU", "P99.9", "P90", "inputs/s", "max", "server")
# Between two columns.
_GAP = 3
HEADER = ("server", "load", "asked/s", "answers/s", "inputs/s", "P50", "P90", "P99", "P99.9", "max", "failed", "CPU")


def summary(result: BenchResult) -> str:
    """The result as a table with warnings and errors."""
    rows = [row_of(result, point, load) for point in result.points for load in point.loads]
    shown = rendered(HEADER, rows, num_names=2, spare=_SPARE)
    notes = ["milliseconds from when a request was due (of a closed loop: sent)"]
    if "CPU" in shown:
        notes.append("CPU: the busiest generator's share of a core")
    notes += [f"WARNING {warning}" for warning in result.warnings]
    errors = (f"{load.name}: {error}" for point in result.points for load in point.loads for error in load.errors)
    notes += [f"error    {error}" for error in dict.fromkeys(errors)]
    said, notes = ([wrapped(printable(line)) for line in lines] for lines in (findings(result), notes))
    return "\n".join([*said, "", shown, *notes])


def row_of(result: BenchResult, point: PointResult, load: LoadResult) -> list[str]:
    """The table row of a load at a point."""
    latency = load.latency
    rate = result.rate_of(point, load)
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
    """Milliseconds with at least three digits."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rendered(header: Sequence[str], rows: Iterable[Sequence[str]], num_names: int, spare: Sequence[str] = ()) -> str:
    """A table whose first ``num_names`` columns are names, and the others numbers. It goes without columns of ``spare``
    until it fits the terminal."""
    rows, width = [*rows], stdout_width()
    left_out: set[str] = set()
    for name in ("", *spare):
        left_out.add(name)
        kept = [number for number, title in enumerate(header) if title not in left_out or not title]
        widths = [max(len(printable(row[number])) for row in [header, *rows]) for number in kept]
        if sum(widths) + _GAP * len(kept) <= width:
            break
    table = Table(box=box.SIMPLE, pad_edge=False)
    for number in kept:
        name = header[number]
        table.add_column(name, justify="left" if number < num_names else "right", no_wrap=number >= num_names)
    for row in rows:
        table.add_row(*(Text(printable(row[number])) for number in kept))
    return console_text(table, width=width).strip("\n")


class ProgressDisplay:
    """A context manager that shows the progress of the points."""

    def __init__(self, setup: BenchSetup, num_points: int, console: Console | None = None) -> None:
        self._setup = setup
        self._num_points = num_points
        self._console = console or Console(stderr=True)
        self._live = (
            RichLive(console=self._console, refresh_per_second=2, transient=True) if self._console.is_terminal else None
        )
        self._title = ""
        self._shown_s = -1.0  # elapsed time of the point at the last update

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, server: str, rate: float | None, number: int) -> None:
        at = f" at {rate:g} requests/s" if rate is not None else ""
        self._title = f"point {number} of {self._num_points}: {server}{at}"

    def show(self, record: PointRecord) -> None:
        """Update the progress, at most once a second, since percentiles cost milliseconds."""
        if self._live is not None and (record.elapsed_s - self._shown_s >= 1 or record.elapsed_s < self._shown_s):
            self._shown_s = record.elapsed_s
            self._live.update(Group(*self._lines(record)))

    def end(self, point: PointResult) -> None:
        if self._live is None:
            found = "; ".join(
                f"{load.name}: {load.requests_per_s:g} requests/s, P50 {_ms(load.latency.p50)}, "
                f"P99 {_ms(load.latency.p99)}, {load.num_failed} failed"
                for load in point.loads
            )
            print(f"{self._title}: {found}", file=sys.stderr, flush=True)  # noqa: T201

    def _lines(self, record: PointRecord) -> tuple[Text, Table, ProgressBar]:
        setup = self._setup
        table = Table(box=box.SIMPLE, pad_edge=False)
        for name in ("load", "in flight", "answers/s", "inputs/s", "P50", "P99", "max", "failed"):
            table.add_column(name, justify="left" if name == "load" else "right")
        for load in setup.loads:
            found = record.loads[load.name]
            # The last interval that all workers have reported.
            last = found.intervals[max(found.intervals)] if found.intervals else IntervalTotals()
            p50, p99 = found.total.latency.percentiles_ms([50, 99])
            table.add_row(
                load.name,
                str(sum(found.in_flight.values())),
                f"{last.answers / setup.interval_s:.1f}",
                f"{last.inputs / setup.interval_s:.1f}",
                _ms(p50),
                _ms(p99),
                _ms(found.total.latency.max_ms),
                str(sum(found.total.failures.values())),
            )
        whole_s = setup.warmup_s + setup.duration_s
        phase = "warm-up" if record.elapsed_s < setup.warmup_s else "measuring"
        phase = "waiting for the last answers" if record.elapsed_s >= whole_s else phase
        phase = "ending" if record.is_interrupted else phase
        title = Text(f"{self._title}, {phase}, {max(0.0, record.elapsed_s):.0f} of {whole_s:g} s (Ctrl-C ends early)")
        return title, table, ProgressBar(whole_s, min(whole_s, max(0.0, record.elapsed_s)), width=60)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
