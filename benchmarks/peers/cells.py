"""What is measured: cells, each a kind of traffic that all peers of a run get in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.load import Stream, drive, poisson
from benchmarks.harness.rounds import spread, turns, with_foreign_load
from benchmarks.harness.summaries import latency_ms
from benchmarks.harness.texts import PASSAGES, SHORT, Prose, Words, groups
from benchmarks.peers.sides import Pair, ServerSide, Side, Timed

_PROBE_S = 0.7
_MOST_TEXTS = 6000  # of one measurement
_SETTLE_S = 0.2  # threads of the one before spin a while
BESIDE_RATE, BESIDE_S = 8.0, 6.0


@dataclass(frozen=True)
class Cell:
    """Requests of ``texts`` texts of ``length``, ``concurrency`` at once; ``documents``: reranking instead, of so many.

    A measurement has as many requests as last ``seconds`` by the peer's own speed, and each peer gets the first of the
    same texts. ``fewest``: requests of a client, so that the last ones, which are answered with idle cores beside them,
    weigh little.
    """

    name: str
    title: str
    texts: int = 1
    length: Words = SHORT
    concurrency: int = 1
    documents: int = 0
    servers_only: bool = False
    seconds: float = 1.5
    fewest: int = 3


_ALIKE = Words(45, 0.0)
_LONG = Words(300, 0.0)

CELLS = {
    cell.name: cell
    for cell in (
        Cell("single-1", "One text at a time"),
        Cell("single-16", "Single texts, 16 at once", concurrency=16),
        Cell("single-64", "Single texts, 64 at once", concurrency=64),
        Cell("single-256", "Single texts, 256 at once", concurrency=256, servers_only=True, fewest=2),
        Cell("requests-32", "Requests of 32 texts alike in length, 4 at once", 32, _ALIKE, 4, fewest=2),
        Cell("mixed", "Requests of 32 texts of mixed lengths, 4 at once", 32, PASSAGES, 4, fewest=2),
        Cell("long", "Requests of 8 texts of 300 words, 4 at once", 8, _LONG, 4, fewest=2),
        Cell("rerank-100", "Rerank of 100 documents, one request at a time", documents=100),
    )
}


def measure(cell: Cell, sides: Sequence[Side], prose: Prose, repetitions: int) -> dict[str, Any]:
    """Every side once to warm up and to size its measurements, then in turn, every second repetition backwards. One
    that refuses such requests has no result."""
    warm = _requests(cell, prose, 1024 // max(cell.texts, cell.documents, 1))
    sizes: dict[str, int] = {}
    refusing: set[str] = set()
    for side in (side for side in sides if side.is_server or not cell.servers_only):
        with _noting_refusal(cell.name, side, refusing):
            sizes[side.peer.name] = _size(cell, side, warm)
    sides = [side for side in sides if side.peer.name in sizes]
    found: dict[str, list[tuple[Timed, float]]] = {side.peer.name: [] for side in sides}
    for _, in_order in turns(sides, repetitions):
        requests = _requests(cell, prose, max(sizes.values()))
        for side in (side for side in in_order if side.peer.name not in refusing):
            time.sleep(_SETTLE_S)
            some = requests[: sizes[side.peer.name]]
            with _noting_refusal(cell.name, side, refusing):
                found[side.peer.name].append(with_foreign_load(partial(_run, cell, side, some)))
    return {name: _summary(timed) for name, timed in found.items() if name not in refusing}


@contextmanager
def _noting_refusal(cell: str, side: Side, refusing: set[str]) -> Iterator[None]:
    try:
        yield
    except SystemExit as refusal:
        refusing.add(side.peer.name)
        print(f"{side.peer.name}: not measured in {cell}: {refusal}", flush=True)


def _requests(cell: Cell, prose: Prose, count: int) -> list[Any]:
    if cell.documents:
        return [(prose.take(1, SHORT)[0], prose.take(cell.documents, PASSAGES)) for _ in range(count)]
    return [*groups(prose.take(count * cell.texts, cell.length), cell.texts)]


def _size(cell: Cell, side: Side, requests: Sequence[Any]) -> int:
    """How many requests last ``cell.seconds``; the first run warms up what the second measures."""
    _run(cell, side, requests[: cell.concurrency], _PROBE_S)
    timed = _run(cell, side, requests, _PROBE_S)
    per_s = timed.per_s / max(cell.texts, cell.documents)
    most = _MOST_TEXTS // max(cell.texts, cell.documents)
    return max(cell.fewest * cell.concurrency, min(most, round(per_s * cell.seconds)))


def _run(cell: Cell, side: Side, requests: Sequence[Any], most_s: float | None = None) -> Timed:
    if cell.documents:
        pairs: Sequence[Pair] = requests
        return side.rerank(pairs, most_s)
    return side.embed(requests, cell.concurrency, most_s)


def _summary(found: Sequence[tuple[Timed, float]]) -> dict[str, Any]:
    latencies = np.concatenate([timed.latencies_s for timed, _ in found])
    return {
        "per_s": spread([round(timed.per_s, 2) for timed, _ in found]),
        "latency_ms": latency_ms(latencies),
        "texts": [timed.count for timed, _ in found],
        "foreign_load": [foreign for _, foreign in found],
    }


def beside_bulk(sides: Sequence[Side], prose: Prose, repetitions: int) -> dict[str, Any]:
    """Single texts that come 8 a second, alone and beside four clients with requests of 32: of servers only. Latency
    counts from when a text was due."""
    servers = [side for side in sides if isinstance(side, ServerSide)]
    found: dict[str, dict[str, list[Any]]] = {
        side.peer.name: {"alone": [], "beside": [], "bulk": [], "foreign": []} for side in servers
    }
    refusing: set[str] = set()
    for number, in_order in turns(servers, repetitions):
        singles = [[text] for text in prose.take(round(2 * BESIDE_RATE * BESIDE_S), SHORT)]
        bulk = [*groups(prose.take(32 * 400, PASSAGES), 32)]
        for side in (side for side in in_order if side.peer.name not in refusing):
            with _noting_refusal("beside-bulk", side, refusing):
                one, foreign = with_foreign_load(partial(_beside, side, singles, bulk, number))
                rows = found[side.peer.name]
                for name, value in {**one, "foreign": foreign}.items():
                    rows[name].append(value)
    return {name: _beside_summary(rows) for name, rows in found.items() if name not in refusing}


def _beside(
    side: ServerSide, singles: Sequence[Sequence[str]], bulk: Sequence[Sequence[str]], number: int
) -> dict[str, Any]:
    arrivals = poisson(BESIDE_RATE, BESIDE_S, seed=number)

    def streams(with_bulk: bool) -> list[Stream]:
        single = side.stream("interactive", singles, arrivals_s=arrivals)
        return [single, side.stream("bulk", bulk, concurrency=4)] if with_bulk else [single]

    alone = drive(side.port, streams(False), seconds=BESIDE_S)["interactive"].must_be_ok()
    both = drive(side.port, streams(True), seconds=BESIDE_S)
    work = both["bulk"].must_be_ok()
    return {
        "alone": alone.latencies_s.tolist(),
        "beside": both["interactive"].must_be_ok().latencies_s.tolist(),
        "bulk": 32 * len(work.body) / work.elapsed_s,
    }


def _beside_summary(rows: dict[str, list[Any]]) -> dict[str, Any]:
    def together(name: str) -> dict[str, float | int]:
        return latency_ms([value for values in rows[name] for value in values])

    return {
        "alone_ms": together("alone"),
        "beside_ms": together("beside"),
        "p99_ms": [latency_ms(values)["p99"] for values in rows["beside"]],
        "bulk_per_s": spread([round(value, 2) for value in rows["bulk"]]),
        "foreign_load": rows["foreign"],
    }


def in_turn(sides: Sequence[str], repetitions: int, measure: Callable[[str], float]) -> dict[str, dict[str, Any]]:
    """A figure of each name, ``repetitions`` times, every second time backwards."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _, in_order in turns(sides, repetitions):
        for name in in_order:
            found[name].append(with_foreign_load(partial(measure, name)))
    return {
        name: {**spread([round(value, 3) for value, _ in values]), "foreign_load": [load for _, load in values]}
        for name, values in found.items()
    }
