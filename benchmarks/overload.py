"""Three times what a server can do, for two minutes: its memory, what accepted requests wait, what refusals promise.

    python -m benchmarks.overload [--seconds 120] [--deadline-ms 2000] [--serve "--max-queue-size 4096"]

Requests of 16 passages come at ``--times`` the capacity that a closed loop measured first, whatever the server does:
without a deadline, and with one (``Request-Timeout-Ms``), each on a server of its own, which has met all their words
and answered three times its texts at its capacity: a model keeps up to 32 MB of words, an engine what it needs for each
shape of a step, and that is not what overload costs. Then the truth of Retry-After
(``benchmarks.retry_after``), and twelve clients that obey it: alone with requests of 2,048 texts, more than the
server takes at once, and with requests of 16 beside the overload. MiniLM. Prose comes again where it ends.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import write
from benchmarks.fleet import NOW, Fleet, Kind
from benchmarks.load import TIMEOUT, FloatArray, Load, Outcome, Stream, drive, embeddings_body, poisson
from benchmarks.models import built, minilm_folder
from benchmarks.overload_plot import plot
from benchmarks.prose import PASSAGES, Prose, read_prose
from benchmarks.retry_after import truth
from benchmarks.server import Samples, sampling
from benchmarks.summaries import latency_ms

TEXTS = 16
_CAPACITY_CONCURRENCY = 16
_MOST_BODIES = 4_000  # of one stream: more arrivals send them again
_POOL_TEXTS = 2_000  # passages that the overload is made of, each time with another number in front
_WARM_ROUNDS = 3  # passages sent before the overload, of the pool
_CONNECTIONS = 4_000
_SETTLED_S = 10.0  # memory counts from here: queues are full, pools have their size
_CLIENTS = 12
_KEPT_SAMPLES = 60  # of memory, in the JSON
_OBEYING_REQUESTS = 2  # of each client, alone
_FILLED_S = 30.0  # of overload fill a server's queue


def main() -> None:
    """Measure and write ``results/overload.json`` and its plot."""
    options = _parser().parse_args()
    prose = read_prose(repeats=True)
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch)).path
        kind = {NOW: Kind([artifact], tuple(shlex.split(options.serve)))}
        with Fleet(kind, Path(scratch) / "home") as fleet:
            capacity = _capacity(fleet[NOW].port, prose, options.capacity_seconds)
            rate = options.times * capacity
            print(f"capacity: {capacity:.1f} requests a second", flush=True)
            runs = {}
            for name, deadline_ms in (("no deadline", None), ("deadline", options.deadline_ms)):
                fleet.restart()
                runs[name] = Overload(fleet, prose, rate, options.seconds, deadline_ms)
                print(f"{name}: {runs[name].load['all'].statuses}", flush=True)
            fleet.restart()
            port = fleet[NOW].port
            rounds = truth(port, prose, capacity * TEXTS, options.fill_texts * options.rounds)
            print(f"Retry-After: {rounds.summary()}", flush=True)
            obeying = {
                f"alone, requests of {options.obey_texts} texts": _obeying_alone(
                    port, prose, options.obey_texts, options.obey_seconds
                ),
                "beside the overload, requests of 16 texts": _obeying_beside(port, prose, rate, options.obey_seconds),
            }
            described = fleet.described()
    results = {
        "capacity, requests of 16 passages a second": round(capacity, 2),
        "offered, times the capacity": options.times,
        "deadline, ms": options.deadline_ms,
        **{name: run.summary(capacity) for name, run in runs.items()},
        "Retry-After": rounds.summary(),
        "twelve clients that obey": obeying,
        "servers": described,
    }
    write("overload", results)
    plot(runs, rounds)


class Overload:
    """One run: offered load, what became of it, and the server's memory meanwhile."""

    def __init__(self, fleet: Fleet, prose: Prose, rate: float, seconds: float, deadline_ms: int | None) -> None:
        self.deadline_ms = deadline_ms
        self.seconds = seconds
        self.rate = rate
        headers = {} if deadline_ms is None else {TIMEOUT: str(deadline_ms)}
        server = fleet[NOW]
        stream = offered(prose, rate, seconds, headers)
        num_bodies = _WARM_ROUNDS * _POOL_TEXTS // TEXTS
        warm = Stream("warm", stream.bodies[:num_bodies], concurrency=_CAPACITY_CONCURRENCY)
        drive(server.port, [warm])["warm"].must_be_ok()
        with sampling(server.process.pid) as samples:
            self.load: Load = drive(server.port, [stream], patience_s=600)
        self.samples: Samples = samples

    @property
    def rss(self) -> tuple[FloatArray, FloatArray]:
        """Seconds since the load began, and MB, until the last answer."""
        times = np.array(self.samples.times_s) - self.load.started_s
        kept = (times >= 0) & (times <= self.load.elapsed_s)
        return times[kept], np.array(self.samples.rss_mb)[kept]

    def summary(self, capacity: float) -> dict[str, Any]:
        """Memory, latencies of what was accepted, refusals."""
        outcome = self.load["all"]
        accepted = outcome.status == 200
        times, rss = self.rss
        settled = rss[times >= min(_SETTLED_S, self.seconds / 2)]
        from_arrival_s = (outcome.done_s - outcome.sent_s)[accepted]
        result: dict[str, Any] = {
            "requests": int(outcome.num_started),
            "statuses": outcome.statuses,
            "answered with 200 a second, of the capacity": round(accepted.sum() / outcome.elapsed_s / capacity, 3),
            "accepted, ms from when it was due": latency_ms(outcome.latencies_s),
            "client's lag, ms": latency_ms(outcome.lags_s),
            "client, share of a core": round(self.load.client_share, 3),
            "Retry-After, s": _spread(outcome.retry_after_s[outcome.status == 429]),
            "429s without Retry-After": int(np.isnan(outcome.retry_after_s[outcome.status == 429]).sum()),
            "RSS, MB": {
                "at the start": float(rss[0]),
                "settled": float(settled[0]),
                "most": float(settled.max()),
                "most / settled": round(float(settled.max() / settled[0]), 3),
                "every few seconds": [[round(float(at), 1), float(mb)] for at, mb in self._thinned_rss()],
            },
            "errors": outcome.errors,
        }
        if self.deadline_ms is not None:
            kept = from_arrival_s * 1e3 <= self.deadline_ms
            result["accepted and answered within the deadline"] = round(float(kept.mean()), 4) if len(kept) else None
        return result

    def _thinned_rss(self) -> Iterator[tuple[float, float]]:
        times, rss = self.rss
        step = max(1, len(times) // _KEPT_SAMPLES)
        return zip(times[::step], rss[::step], strict=True)


def offered(prose: Prose, rate: float, seconds: float, headers: dict[str, str] | None = None) -> Stream:
    """An open loop of requests of 16 passages out of a pool, the first requests of all of it.

    A number in front makes each passage one that no other request has: the server computes what waits twice once.
    """
    arrivals = poisson(rate, seconds)
    pool, numbers = itertools.cycle(prose.take(_POOL_TEXTS, PASSAGES)), itertools.count()
    count = max(_POOL_TEXTS // TEXTS, min(len(arrivals), _MOST_BODIES))
    bodies = [embeddings_body([f"{next(numbers)} {next(pool)}" for _ in range(TEXTS)]) for _ in range(count)]
    return Stream("all", bodies, headers=headers or {}, arrivals_s=arrivals, max_connections=_CONNECTIONS)


def requests(prose: Prose, count: int, size: int) -> list[str]:
    """``count`` requests of ``size`` passages each."""
    return [embeddings_body(prose.take(size, PASSAGES)) for _ in range(count)]


def _capacity(port: int, prose: Prose, seconds: float) -> float:
    """Requests of 16 passages that the server answers a second, in a closed loop that keeps it busy."""
    bodies = requests(prose, _MOST_BODIES, TEXTS)
    for duration in (min(3.0, seconds), seconds):  # the first warms up
        stream = Stream("all", bodies, concurrency=_CAPACITY_CONCURRENCY)
        outcome = drive(port, [stream], seconds=duration)["all"].must_be_ok()
        bodies = bodies[outcome.num_started :]
    return len(outcome.status) / outcome.elapsed_s


def _obeying_alone(port: int, prose: Prose, size: int, seconds: float) -> dict[str, Any]:
    bodies = requests(prose, _CLIENTS * _OBEYING_REQUESTS, size)
    stream = Stream("obeying", bodies, concurrency=_CLIENTS, retry="obey")
    return _obeyed(drive(port, [stream], seconds=seconds, lead="obeying")["obeying"], len(bodies))


def _obeying_beside(port: int, prose: Prose, rate: float, seconds: float) -> dict[str, Any]:
    """Twelve clients that come when the overload has filled the server."""
    arrivals = [min(_FILLED_S, seconds / 3)] * _CLIENTS
    obeying = Stream("obeying", requests(prose, _CLIENTS, TEXTS), arrivals_s=arrivals, retry="obey")
    load = drive(port, [offered(prose, rate, seconds), obeying], seconds=seconds, lead="obeying")
    return _obeyed(load["obeying"], _CLIENTS)


def _obeyed(outcome: Outcome, num_requests: int) -> dict[str, Any]:
    """How many requests got through, with how many tries, and how long after the first."""
    through = outcome.status == 200
    first_sent_s: dict[int, float] = {}
    for body, sent_s in zip(outcome.body.tolist(), outcome.sent_s.tolist(), strict=True):
        if sent_s >= 0:
            first_sent_s[body] = min(sent_s, first_sent_s.get(body, sent_s))
    ended = zip(outcome.body[through].tolist(), outcome.done_s[through].tolist(), strict=True)
    took_s = [done_s - first_sent_s[body] for body, done_s in ended]
    return {
        "requests": num_requests,
        "got through": int(through.sum()),
        "all got through": bool(through.sum() == num_requests),
        "tries of those": _spread(outcome.attempt[through] + 1.0),
        "first try to answer, s": _spread(took_s),
        "statuses of all tries": outcome.statuses,
        "errors": outcome.errors,
    }


def _spread(values: Sequence[float] | FloatArray) -> dict[str, float | int]:
    found = np.asarray(values, np.float64)
    found = found[~np.isnan(found)]
    if not len(found):
        return {"count": 0}
    figures = {"min": found.min(), "median": np.median(found), "max": found.max()}
    return {"count": len(found), **{name: round(float(value), 3) for name, value in figures.items()}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each overload")
    parser.add_argument("--times", type=float, default=3.0, help="offered load, in capacities")
    parser.add_argument("--deadline-ms", type=int, default=2000)
    parser.add_argument("--capacity-seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=2, help="for each size of the requests that fill the server")
    parser.add_argument("--fill-texts", type=int, nargs="+", default=[1024, 2048, 4096], help="those sizes")
    parser.add_argument("--obey-texts", type=int, default=2048, help="of a request of the obeying clients, alone")
    parser.add_argument("--obey-seconds", type=float, default=600.0, help="the obeying clients give up after these")
    parser.add_argument("--serve", default="", help="flags of bei serve, as in a shell")
    return parser


if __name__ == "__main__":
    main()
