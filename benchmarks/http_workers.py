"""Front ends in processes of their own: requests a second where Python is the limit, and one client's latency.

    python -m benchmarks.http_workers [--workers 1 2] [--repetitions 11] [--before CHECKOUT] [--dry]

Over an engine whose steps take a millisecond and no processor (``standin.py``): requests a second of single short texts
at concurrency 64, by the number of front ends, and the median time of one client's request: the time that the way over
two processes adds to it, in many short turns, as the machine's speed changes from second to second. ``--before``: the
same servers of another checkout, which runs its own ``benchmarks.standin``, in the same turns.

The client is a process of its own on the same cores: on two cores more front ends take from each other, from the
engine's process and from the client. ``--dry`` sends a few requests and writes nothing: does it run?
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.arguments import parsed
from benchmarks.harness.load import closed_loop, embeddings_body
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio
from benchmarks.harness.servers import BEFORE, NOW, ROOT, environment, revision, serving

_MODEL = "embedder"
_CONCURRENCY = 64
_TURNS = 10  # of latencies, in a repetition
# In a process of its own, as another checkout has other schemas, and its tests may lie elsewhere.
_SAVE = (
    "import pathlib, sys; from benchmarks.standin import WideEngine; "
    "sys.modules[WideEngine.__module__].save_models(pathlib.Path(sys.argv[1]))"
)


class Sizes(NamedTuple):
    """Requests of a rate, and of a turn's latency."""

    rate: int = 6000
    latency: int = 100


def main() -> None:
    options = parsed(__doc__, workers=[1, 2], repetitions=11, before=Path, dry=False)
    sizes, repetitions = (Sizes(128, 20), 1) if options.dry else (Sizes(), options.repetitions)
    checkouts = {"": ROOT} | ({f"{BEFORE}, ": options.before.resolve()} if options.before else {})
    with tempfile.TemporaryDirectory() as folder:
        results = {"stand-in": measured(checkouts, options.workers, sizes, repetitions, Path(folder))}
    if options.dry:
        print(json.dumps(results, indent=2))
    else:
        commits = {name.rstrip(", ") or NOW: revision(checkout) for name, checkout in checkouts.items()}
        write("http-workers", {"commits": commits, **results})


def measured(
    checkouts: dict[str, Path], workers: Sequence[int], sizes: Sizes, repetitions: int, scratch: Path
) -> dict[str, Any]:
    """All servers run side by side; one at a time is asked."""
    rates: dict[str, Callable[[], float]] = {}
    latencies: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for number in workers:
            for prefix, checkout in checkouts.items():
                server = serving(
                    artifact_of_standin(checkout, scratch / f"{prefix}models"),
                    f"--http-workers={number}",
                    checkout=checkout,
                    home=scratch / f"{prefix}home",
                    program="benchmarks.standin",
                )
                port, _ = stack.enter_context(server)
                name = prefix + ("one process" if number == 1 else f"{number} front ends")
                rates[name] = partial(_rate, port, _bodies(sizes.rate))
                latencies[name] = partial(_latency_ms, port, _bodies(sizes.latency))
        measured_rates = alternate(rates, repetitions)
        measured_latencies = alternate(latencies, repetitions * _TURNS)
    first, *others = rates
    pairs = [(name, f"{BEFORE}, {name}") for name in rates if f"{BEFORE}, {name}" in rates]
    return {
        **({"now / before": {now: ratio(measured_rates, now, before) for now, before in pairs}} if pairs else {}),
        "requests a second, single texts": measured_rates,
        "ratios": {name: ratio(measured_rates, name, first) for name in others},
        "median of one client's request, ms": measured_latencies,
        "added to it, ms": {
            name: _added(measured_latencies[first]["values"], measured_latencies[name]["values"]) for name in others
        },
    }


def artifact_of_standin(checkout: Path, folder: Path) -> Path:
    if not folder.is_dir():
        subprocess.run([sys.executable, "-c", _SAVE, str(folder)], cwd=checkout, env=environment(checkout), check=True)
    (found,) = (path.parent for path in folder.rglob("manifest.json") if path.parent.name == _MODEL)
    return found


def _added(first: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """By the medians of all turns, and within turns, whose mean has a standard error."""
    within = np.array(other) - np.array(first)
    added = {
        "of medians": np.median(other) - np.median(first),
        "median within turns": np.median(within),
        "mean within turns": within.mean(),
        "its standard error": within.std() / np.sqrt(len(within)),
    }
    return {name: round(float(value), 3) for name, value in added.items()}


def standin_text(number: int) -> str:
    """A short text that none of the 17,575 numbers around has: equal ones in flight are computed once. It ends with a
    word of its own: the stand-in's tokenizer knows words of four letters, and none with digits."""
    letters = (ascii_lowercase[number // base % 26] for base in (26 * 26, 26, 1))
    return f"able acid aged also a{''.join(letters)}"


def _bodies(count: int) -> list[str]:
    return [embeddings_body(standin_text(number), _MODEL) for number in range(count)]


def _rate(port: int, bodies: Sequence[str]) -> float:
    return len(bodies) / closed_loop(port, _CONCURRENCY, bodies).elapsed_s


def _latency_ms(port: int, bodies: Sequence[str]) -> float:
    return float(np.median(closed_loop(port, 1, bodies).latencies_s)) * 1e3


if __name__ == "__main__":
    main()
