"""One benchmark in two checkouts in turn, each running its own code of the benchmark.

    python -m benchmarks.compare --before CHECKOUT [--rounds 5] [--figures TEXT] NAME [ARGUMENTS OF THE BENCHMARK]

``python -m benchmarks.NAME ARGUMENTS`` runs in this checkout and in the other one, ``--rounds`` times, every second
round in the other order; nothing of this checkout is imported there, so layouts and schemas may differ. Every number
that all runs have under the same names becomes a figure: medians and extremes of both sides, and now / before of
medians and within rounds, whose mean has a standard error. ``--figures``: those whose path has this text. What a
benchmark would leave in its checkout's results is put back. Benchmarks with a ``--before`` of their own compare servers
in shorter turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.record import write
from benchmarks.harness.rounds import geometric_mean, spread, turns, with_foreign_load
from benchmarks.harness.servers import BEFORE, NOW, ROOT, environment, revision

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figures", default="")
    parser.add_argument("name")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    checkouts = {NOW: ROOT, BEFORE: options.before.resolve()}
    runs: dict[str, list[Figures]] = {name: [] for name in checkouts}
    loads: dict[str, list[float]] = {name: [] for name in checkouts}
    for number, in_order in turns(list(checkouts), options.rounds):
        for side in in_order:
            run = partial(results_of, checkouts[side], options.name, options.arguments)
            results, load = with_foreign_load(run)
            runs[side].append(dict(figures(results)))
            loads[side].append(load)
            print(f"round {number + 1} of {options.rounds}, {side}: others used {load:.1%} of the machine", flush=True)
    compared = {path: row for path, row in comparison(runs).items() if options.figures in path}
    for path, row in compared.items():
        sides = ", ".join(f"{side} {row[side]['median']:.6g}" for side in checkouts)
        within = row["now / before"]
        print(f"{path}: {sides}; {within['mean within rounds']} +- {within['its standard error']}")
    about = {
        "commits": {side: revision(path) for side, path in checkouts.items()},
        "arguments": options.arguments,
        "foreign_load": loads,
    }
    write(f"compare-{options.name}", {**about, "figures": compared})


def results_of(checkout: Path, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON that the benchmark prints at its end."""
    with tempfile.TemporaryDirectory() as folder, unchanged(checkout / "benchmarks" / "results"):
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        env = environment(checkout, extra={"BENCHMARK_RESULTS": folder})
        done = subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} in {checkout}")
    return last_object(done.stdout)


def last_object(output: str) -> dict[str, Any]:
    """The JSON object, indented, with which ``output`` ends."""
    found: dict[str, Any] = json.loads("{\n" + f"\n{output}".rpartition("\n{\n")[2])
    return found


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Put the files of ``folder`` back at the end."""
    before = {path: path.read_bytes() for path in folder.glob("*")}
    try:
        yield
    finally:
        for path in folder.glob("*"):
            if path not in before:
                path.unlink()
        for path, content in before.items():
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)


def figures(results: object, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of nested objects by their path; lists are the values behind figures, and are left out."""
    if isinstance(results, dict):
        for name, value in results.items():
            yield from figures(value, f"{path} > {name}" if path else name)
    elif isinstance(results, (int, float)) and not isinstance(results, bool):
        yield path, float(results)


def comparison(runs: Mapping[str, Sequence[Figures]]) -> dict[str, dict[str, Any]]:
    """By path, of the figures that all runs have."""
    everything = [run for side in runs.values() for run in side]
    return {
        path: _compared({side: [run[path] for run in of] for side, of in runs.items()})
        for path in everything[0]
        if all(path in run for run in everything)
    }


def _compared(values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {side: spread(of) for side, of in values.items()}
    if min(*values[NOW], *values[BEFORE]) <= 0:  # counts of nothing, differences
        mean = error = of_medians = None
    else:
        mean, error = geometric_mean([now / before for now, before in zip(values[NOW], values[BEFORE], strict=True)])
        of_medians = round(row[NOW]["median"] / row[BEFORE]["median"], 4)
    return {
        **row,
        "now / before": {"of medians": of_medians, "mean within rounds": mean, "its standard error": error},
    }


if __name__ == "__main__":
    main()
