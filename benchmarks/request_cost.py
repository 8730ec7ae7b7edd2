"""What a short request costs a server in CPU time, before and after: for machines whose speed does not stand still.

    python -m benchmarks.request_cost --before CHECKOUT [--turns 12] [--requests 1500] [--concurrency 64]

Single texts of prose that the servers have not met (about 29 tokens), MiniLM, in a closed loop, in turns: this
checkout's server, the other one's. A server's CPU time is its process's, engine included; where all cores are busy,
which they are at this concurrency, throughput is its inverse. What other virtual machines take is not in it, but they
slow caches and cores down, so the turns are short, and neighbours are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path

import psutil

from benchmarks.common import with_foreign_load, write
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
    us: dict[str, list[float]] = {NOW: [], BEFORE: []}
    rates: dict[str, list[float]] = {NOW: [], BEFORE: []}
    foreign: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), "bf16", Path(scratch))
        servers = kinds({artifact.path: minilm_folder()}, "", options.before, "", Path(scratch))
        with Fleet(servers, Path(scratch) / "home") as fleet:
            texts = FirstTime(read_prose(), fleet)
            for turn in range(options.turns + 1):
                (taken,) = texts.take((options.requests, SHORT))
                bodies = [embeddings_body(text) for text in taken]
                for name in (NOW, BEFORE) if turn % 2 else (BEFORE, NOW):  # who comes second finds a warmer machine
                    (used_s, rate), load = with_foreign_load(partial(_used, fleet[name], bodies, options.concurrency))
                    if turn:  # the first warms up
                        us[name].append(1e6 * used_s / len(bodies))
                        rates[name].append(rate)
                        foreign.append(load)
            described = fleet.described()
    pairs = [now / before for now, before in zip(us[NOW], us[BEFORE], strict=True)]
    deviation = statistics.stdev(pairs) / len(pairs) ** 0.5
    write(
        "request-cost",
        {
            "requests of a turn": options.requests,
            "concurrency": options.concurrency,
            "now / before, CPU time": {
                "of all turns": round(sum(us[NOW]) / sum(us[BEFORE]), 4),
                "median within turns": round(statistics.median(pairs), 4),
                "standard error of the mean within turns": round(deviation, 4),
                "values": [round(pair, 4) for pair in pairs],
            },
            "now / before, requests a second, of all turns": round(
                sum(1 / rate for rate in rates[BEFORE]) / sum(1 / rate for rate in rates[NOW]), 4
            ),
            "CPU us a request": {name: [round(value) for value in values] for name, values in us.items()},
            "requests a second": {name: [round(rate, 1) for rate in values] for name, values in rates.items()},
            "foreign_load": [round(load, 3) for load in foreign],
            "servers": described,
        },
    )


def _used(server: Server, bodies: list[str], concurrency: int) -> tuple[float, float]:
    """CPU seconds of the server, and requests a second."""
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    outcome, _ = closed_loop(server.port, concurrency, bodies)
    after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return used_s, len(bodies) / outcome.elapsed_s


if __name__ == "__main__":
    main()
