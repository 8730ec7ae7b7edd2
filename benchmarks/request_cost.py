"""What a short request costs a server in CPU time, before and after: for machines whose speed does not stand still.

    python -m benchmarks.request_cost --before CHECKOUT [--turns 12] [--requests 1500] [--concurrency 64]

Single texts of prose that the servers have not met (about 29 tokens), MiniLM, in a closed loop, in turns: this
checkout's server, the other one's. A server's CPU time is its process's, engine included; where all cores are busy,
which they are at this concurrency, throughput is its inverse. What other virtual machines take is not in it, but they
slow caches and cores down, so turns are short, neighbours are compared, and disturbed ones are made again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.common import Quiet, with_foreign_load, write
from benchmarks.fleet import BEFORE, NOW, FirstTime, Fleet, kinds
from benchmarks.load import closed_loop, embeddings_body
from benchmarks.models import built, minilm_folder
from benchmarks.prose import SHORT, read_prose
from benchmarks.server import Server


def main() -> None:
    """Measure and write ``results/request-cost.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="another checkout, whose server is measured too")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--requests", type=int, default=1500, help="of a turn")
    parser.add_argument("--concurrency", type=int, default=64)
    options = parser.parse_args()
    turns: list[dict[str, Used]] = []
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), "bf16", Path(scratch))
        servers = kinds({artifact.path: minilm_folder()}, "", options.before, "", Path(scratch))
        with Fleet(servers, Path(scratch) / "home") as fleet:
            texts, quiet = FirstTime(read_prose(), fleet), Quiet(options.turns)
            _turn(fleet, texts, options.requests, options.concurrency)  # warms up
            while len(turns) < options.turns:
                found = _turn(fleet, texts, options.requests, options.concurrency, now_first=len(turns) % 2 == 0)
                if quiet.keeps(used.foreign_load for used in found.values()):
                    turns.append(found)
            described = fleet.described()
    pairs = [turn[NOW].cpu_s / turn[BEFORE].cpu_s for turn in turns]
    totals = {name: sum(turn[name].cpu_s for turn in turns) for name in (NOW, BEFORE)}
    elapsed = {name: sum(turn[name].elapsed_s for turn in turns) for name in (NOW, BEFORE)}
    write(
        "request-cost",
        {
            "requests of a turn": options.requests,
            "concurrency": options.concurrency,
            "CPU time, now / before": {
                "of all turns": round(totals[NOW] / totals[BEFORE], 4),
                "median within turns": round(statistics.median(pairs), 4),
                "standard error of the mean within turns": round(statistics.stdev(pairs) / len(pairs) ** 0.5, 4),
                "within turns": [round(pair, 4) for pair in pairs],
            },
            "requests a second, now / before, of all turns": round(elapsed[BEFORE] / elapsed[NOW], 4),
            "CPU us a request": {
                name: [round(1e6 * turn[name].cpu_s / options.requests) for turn in turns] for name in (NOW, BEFORE)
            },
            "foreign_load": {name: [turn[name].foreign_load for turn in turns] for name in (NOW, BEFORE)},
            "turns made again": quiet.num_disturbed,
            "servers": described,
        },
    )


class Used(NamedTuple):
    """What a server took for the requests of a turn."""

    cpu_s: float
    elapsed_s: float
    foreign_load: float


def _turn(fleet: Fleet, texts: FirstTime, count: int, concurrency: int, *, now_first: bool = True) -> dict[str, Used]:
    """The same requests to both servers, one after the other."""
    (taken,) = texts.take((count, SHORT))
    bodies = [embeddings_body(text) for text in taken]
    used = {}
    for name in (NOW, BEFORE) if now_first else (BEFORE, NOW):
        (cpu_s, elapsed_s), load = with_foreign_load(partial(_used, fleet[name], bodies, concurrency))
        used[name] = Used(cpu_s, elapsed_s, load)
    return used


def _used(server: Server, bodies: list[str], concurrency: int) -> tuple[float, float]:
    """CPU seconds of the server, and seconds."""
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    outcome, _ = closed_loop(server.port, concurrency, bodies)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system, outcome.elapsed_s


if __name__ == "__main__":
    main()
