"""Time and CPU time of a short request, before and after: for machines whose speed does not stand still.

    python -m benchmarks.request_cost --before CHECKOUT [--starts 12] [--turns 6] [--requests 400] [--concurrency 16]

Single texts of prose that the servers have not met (about 29 tokens), MiniLM, in a closed loop, in turns: this
checkout's server, the other one's. A server's CPU time is its process's, engine included; where all cores are busy,
which they are from 16 clients on, throughput is its inverse. The share of other virtual machines is not in it, but they
slow caches and cores down, so turns are short, neighbours are compared, and disturbed ones are made again.

What differs from one start of a server to the next is more than what differs within one, so both are started anew
``--starts`` times, and errors are those of the ratios of starts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.harness.arguments import parsed
from benchmarks.harness.load import closed_loop, embeddings_body
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import geometric_mean, least_disturbed, with_foreign_load
from benchmarks.harness.servers import BEFORE, NOW, Fleet, Server, UnseenTexts, kinds
from benchmarks.harness.texts import SHORT, read_prose


class Used(NamedTuple):
    """A server's use of the machine for the requests of a turn."""

    cpu_s: float
    elapsed_s: float
    foreign_load: float


def main() -> None:
    options = parsed(__doc__, before=Path, starts=12, turns=6, requests=400, concurrency=16)
    if options.before is None:
        raise SystemExit("--before CHECKOUT: this benchmark compares two servers")
    starts: list[list[dict[str, Used]]] = []
    num_left_out = 0
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        servers = kinds({artifact.path: minilm_folder()}, options, Path(scratch))
        with Fleet(servers, Path(scratch) / "home") as fleet:
            texts = UnseenTexts(read_prose(), fleet)
            while len(starts) < options.starts:
                if starts:
                    fleet.restart()
                kept, left_out = _turns(fleet, texts, options)
                starts.append(kept)
                num_left_out += left_out
                print(f"start {len(starts)} of {options.starts}", flush=True)
            described = fleet.described()
    write(
        "request-cost",
        {
            "starts of both servers": options.starts,
            "turns of a start": options.turns,
            "requests of a turn": options.requests,
            "concurrency": options.concurrency,
            "now / before, of starts": {
                "time": _ratios([_ratio(turns, "elapsed_s") for turns in starts]),
                "CPU time": _ratios([_ratio(turns, "cpu_s") for turns in starts]),
            },
            "CPU us a request": {
                name: [round(1e6 * turn[name].cpu_s / options.requests) for turns in starts for turn in turns]
                for name in (NOW, BEFORE)
            },
            "foreign_load": {
                name: [turn[name].foreign_load for turns in starts for turn in turns] for name in (NOW, BEFORE)
            },
            "turns left out": num_left_out,
            "servers": described,
        },
    )


def _turns(fleet: Fleet, texts: UnseenTexts, options: argparse.Namespace) -> tuple[list[dict[str, Used]], int]:
    """The turns of one start, behind one that warms up, and how many were left out."""

    def turn(number: int) -> tuple[dict[str, Used], float]:
        found = _turn(fleet, texts, options.requests, options.concurrency, now_first=number % 2 == 0)
        return found, max(used.foreign_load for used in found.values())

    turn(0)
    return least_disturbed(options.turns, turn)


def _ratio(turns: Sequence[dict[str, Used]], what: str) -> float:
    """Now to before, all turns together."""
    return float(sum(getattr(turn[NOW], what) for turn in turns) / sum(getattr(turn[BEFORE], what) for turn in turns))


def _ratios(ratios: Sequence[float]) -> dict[str, Any]:
    mean, error = geometric_mean(ratios)
    each = [round(ratio, 4) for ratio in ratios]
    return {"geometric mean": mean, "its standard error": error, "of each start": each}


def _turn(fleet: Fleet, texts: UnseenTexts, count: int, concurrency: int, *, now_first: bool = True) -> dict[str, Used]:
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
    outcome = closed_loop(server.port, concurrency, bodies)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system, outcome.elapsed_s


if __name__ == "__main__":
    main()
