"""Front ends in processes of their own: what they bring where Python is the limit, and what they cost where it is not.

    python -m benchmarks.http_workers [--workers 1 2] [--repetitions 11] [--before CHECKOUT] [--dry]

1. Over an engine whose steps take a millisecond and no processor (``standin.py``): requests a second of single short
   texts at concurrency 64, by the number of front ends, and the median time of one client's request: what the way
   over two processes adds to it, in many short turns, as the machine's speed changes from second to second. How many
   arrays were copied into shared memory for all answers.
2. With ``--before``: one process with MiniLM on the CPU, this checkout's server against the other one's, on prose that
   they have not met: single texts at concurrency 64 and requests of 32 at concurrency 4.

The client is a process of its own on the same cores: on two cores more front ends take from each other, from the
engine's process and from the client. ``--dry`` sends a few requests and writes nothing: does it run?
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import alternate, by_total_times, least_disturbed, ratio, with_foreign_load, write
from benchmarks.fleet import BEFORE, NOW, FirstTime, Fleet, kinds
from benchmarks.load import closed_loop, embeddings_body
from benchmarks.models import built, minilm_folder
from benchmarks.prose import PASSAGES, SHORT, read_prose
from benchmarks.server import serving
from benchmarks.standin import COPIES
from tests.e2e.wide_server import save_models

_MODEL = "embedder"
_CONCURRENCY = 64
_TURNS = 10  # of latencies, in a repetition


class Sizes(NamedTuple):
    """How much is measured: requests of a rate, of a turn's latency, and of the real engine those of each kind."""

    rate: int = 6000
    latency: int = 100
    singles: int = 1500
    bulk: int = 60


_DRY = Sizes(128, 20, 64, 4)


def main() -> None:
    """Measure and write ``results/http-workers.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of front ends; 1: one process")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--before", type=Path, help="another checkout, whose server is measured too")
    parser.add_argument("--dry", action="store_true", help="a few requests, and nothing is written")
    options = parser.parse_args()
    sizes, repetitions = (_DRY, 1) if options.dry else (Sizes(), options.repetitions)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        results = {"stand-in": _standin(options.workers, sizes, repetitions, scratch)}
        if options.before is not None:
            results["one process on the CPU"] = _one_process(options.before, sizes, repetitions, scratch)
    if options.dry:
        print(json.dumps(results, indent=2))
    else:
        write("http-workers", results)


def _standin(workers: Sequence[int], sizes: Sizes, repetitions: int, scratch: Path) -> dict[str, Any]:
    """All servers run side by side; one at a time is asked."""
    artifact = next(path for path in save_models(scratch / "models") if path.name == _MODEL)
    rates: dict[str, Callable[[], float]] = {}
    latencies: dict[str, Callable[[], float]] = {}
    copies = {number: scratch / f"copies-{number}" for number in workers}
    with ExitStack() as stack:
        for number in workers:
            copies[number].mkdir()
            server = serving(
                artifact,
                f"--http-workers={number}",
                program="benchmarks.standin",
                home=scratch / "home",
                env={COPIES: str(copies[number])},
            )
            port, _ = stack.enter_context(server)
            rates[_name(number)] = partial(_rate, port, _bodies(sizes.rate))
            latencies[_name(number)] = partial(_latency_ms, port, _bodies(sizes.latency))
        measured_rates = alternate(rates, repetitions)
        measured_latencies = alternate(latencies, repetitions * _TURNS)
    first = _name(workers[0])
    num_answers = (repetitions + 1 + measured_rates[first]["repetitions left out"]) * sizes.rate
    num_answers += (repetitions * _TURNS + 1 + measured_latencies[first]["repetitions left out"]) * sizes.latency
    return {
        "requests a second, single texts": measured_rates,
        "ratios": {name: ratio(measured_rates, name, first) for name in rates if name != first},
        "median of one client's request, ms": measured_latencies,
        "added to it, ms": {
            name: _added(measured_latencies[first]["values"], found["values"])
            for name, found in measured_latencies.items()
            if name != first
        },
        "answers of each server": num_answers,
        "arrays copied into shared memory": {_name(number): _copies(folder) for number, folder in copies.items()},
    }


def _added(one_process: Sequence[float], more: Sequence[float]) -> dict[str, float]:
    """By the medians of all turns, and within turns, whose mean has a standard error."""
    within = np.array(more) - np.array(one_process)
    added = {
        "of medians": np.median(more) - np.median(one_process),
        "median within turns": np.median(within),
        "mean within turns": within.mean(),
        "its standard error": within.std() / np.sqrt(len(within)),
    }
    return {name: round(float(value), 3) for name, value in added.items()}


def _copies(folder: Path) -> dict[str, int]:
    """By process, once all of them have ended."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


def _name(num_workers: int) -> str:
    return "one process" if num_workers == 1 else f"{num_workers} front ends"


def _bodies(count: int) -> list[str]:
    """Distinct short texts: equal ones in flight are computed once."""
    return [embeddings_body(f"able acid aged also {number}", _MODEL) for number in range(count)]


def _rate(port: int, bodies: Sequence[str]) -> float:
    outcome, _ = closed_loop(port, _CONCURRENCY, bodies)
    return len(bodies) / outcome.elapsed_s


def _latency_ms(port: int, bodies: Sequence[str]) -> float:
    outcome, _ = closed_loop(port, 1, bodies)
    return float(np.median(outcome.latencies_s)) * 1e3


def _one_process(before: Path, sizes: Sizes, repetitions: int, scratch: Path) -> dict[str, Any]:
    """Texts a second of this checkout's server and the other one's, which get the same texts in turn."""
    artifact = built(minilm_folder(), scratch)
    servers = kinds({artifact.path: minilm_folder()}, "--http-workers=1", before, "", scratch)
    rates: dict[str, dict[str, list[float]]] = {"single texts": {}, "requests of 32": {}}
    with Fleet(servers, scratch / "cpu-home") as fleet:
        texts = FirstTime(read_prose(), fleet)
        _turn(fleet, texts, sizes, [NOW, BEFORE])  # warms up
        kept, num_left_out = least_disturbed(
            repetitions, lambda number: _turn(fleet, texts, sizes, [NOW, BEFORE] if number % 2 == 0 else [BEFORE, NOW])
        )
        for found in kept:
            for (what, name), rate in found.items():
                rates[what].setdefault(name, []).append(rate)
        described = fleet.described()
    return {
        "texts a second": rates,
        "now / before, by total times": {
            what: round(by_total_times(of[NOW], of[BEFORE]), 4) for what, of in rates.items()
        },
        "turns left out": num_left_out,
        "servers": described,
    }


def _turn(
    fleet: Fleet, texts: FirstTime, sizes: Sizes, order: Sequence[str]
) -> tuple[Mapping[tuple[str, str], float], float]:
    """Rates by what was asked and of whom, and the largest foreign load."""
    singles, passages = texts.take((sizes.singles, SHORT), (32 * sizes.bulk, PASSAGES))
    asked = {
        "single texts": (_CONCURRENCY, [embeddings_body(text) for text in singles], len(singles)),
        "requests of 32": (
            4,
            [embeddings_body(passages[start : start + 32]) for start in range(0, len(passages), 32)],
            len(passages),
        ),
    }
    rates, loads = {}, []
    for what, (concurrency, bodies, num_texts) in asked.items():
        for name in order:
            (outcome, _), load = with_foreign_load(partial(closed_loop, fleet[name].port, concurrency, bodies))
            rates[what, name] = num_texts / outcome.elapsed_s
            loads.append(load)
    return rates, max(loads)


if __name__ == "__main__":
    main()
