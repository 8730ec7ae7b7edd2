"""Three times the capacity for two minutes: memory, waits of accepted requests, and the truth of Retry-After.

    python -m benchmarks.overload [--seconds 120] [--deadline-ms 2000] [--serve "--max-queue-size 4096"]

Requests of 16 passages come at ``--times`` the capacity that a closed loop measured first, whatever the server does:
without a deadline, and with one (``Request-Timeout-Ms``), each on a server of its own, which has met all their words
and answered three times its texts at its capacity: a model keeps up to 32 MB of words, an engine what it needs for each
shape of a step, and that is no cost of overload. Then the truth of Retry-After (``benchmarks.retry_after``,
``--rounds`` for each of ``--fill-texts``), and twelve clients that obey it: alone with requests of 2,048 texts, more
than the server takes at once, and with requests of 16 beside the overload. MiniLM. Prose comes again where it ends.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import parsed
from benchmarks.harness.load import TIMEOUT, FloatArray, Outcome, Stream, drive, embeddings_body, poisson
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.sampling import sampling
from benchmarks.harness.servers import NOW, Fleet, Server, kinds
from benchmarks.harness.summaries import latency_ms
from benchmarks.harness.texts import PASSAGES, Prose, read_prose
from benchmarks.retry_after import truth

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
    options = parsed(
        __doc__,
        seconds=120.0,
        times=3.0,
        deadline_ms=2000,
        capacity_seconds=15.0,
        rounds=2,
        fill_texts=[1024, 2048, 4096],
        obey_texts=2048,
        obey_seconds=600.0,
        before=Path,
        serve="",
    )
    prose = read_prose(repeats=True)
    with tempfile.TemporaryDirectory() as scratch:
        now = kinds({built(minilm_folder(), Path(scratch)).path: minilm_folder()}, options, Path(scratch))[NOW]
        with Fleet({NOW: now}, Path(scratch) / "home") as fleet:
            capacity = _capacity(fleet[NOW].port, prose, options.capacity_seconds)
            rate = options.times * capacity
            print(f"capacity: {capacity:.1f} requests a second", flush=True)
            runs = {}
            for name, deadline_ms in (("no deadline", None), ("deadline", options.deadline_ms)):
                fleet.restart()
                runs[name] = overloaded(fleet[NOW], prose, rate, options.seconds, capacity, deadline_ms)
                print(f"{name}: {runs[name]['statuses']}", flush=True)
            fleet.restart()
            port = fleet[NOW].port
            retry_after = truth(port, prose, capacity * TEXTS, options.fill_texts * options.rounds).summary()
            print(f"Retry-After: {retry_after}", flush=True)
            size, seconds = options.obey_texts, options.obey_seconds
            obeying = {
                f"alone, requests of {size} texts": _obeying_alone(port, prose, size, seconds),
                f"beside the overload, requests of {TEXTS} texts": _obeying_beside(port, prose, rate, seconds),
            }
            described = fleet.described()
    results = {
        "capacity, requests of 16 passages a second": round(capacity, 2),
        "offered, times the capacity": options.times,
        "deadline, ms": options.deadline_ms,
        **runs,
        "Retry-After": retry_after,
        "twelve clients that obey": obeying,
        "servers": described,
    }
    write("overload", results)


def overloaded(
    server: Server, prose: Prose, rate: float, seconds: float, capacity: float, deadline_ms: int | None
) -> dict[str, Any]:
    """Memory, latencies of accepted requests, and refusals, of a server that gets ``rate`` requests a second."""
    stream = offered(prose, rate, seconds, {} if deadline_ms is None else {TIMEOUT: str(deadline_ms)})
    warm = Stream("warm", stream.bodies[: _WARM_ROUNDS * _POOL_TEXTS // TEXTS], concurrency=_CAPACITY_CONCURRENCY)
    drive(server.port, [warm])["warm"].must_be_ok()
    with sampling(server.process.pid) as samples:
        load = drive(server.port, [stream], patience_s=600)
    outcome = load["all"]
    accepted, refused = outcome.status == 200, outcome.status == 429
    times = np.array(samples.times_s) - load.started_s
    during = (times >= 0) & (times <= load.elapsed_s)
    times, rss = times[during], np.array(samples.rss_mb)[during]
    settled = rss[times >= min(_SETTLED_S, seconds / 2)]
    step = max(1, len(times) // _KEPT_SAMPLES)
    result: dict[str, Any] = {
        "requests": int(outcome.num_started),
        "statuses": outcome.statuses,
        "answered with 200 a second, of the capacity": round(accepted.sum() / outcome.elapsed_s / capacity, 3),
        "accepted, ms from when it was due": latency_ms(outcome.latencies_s),
        "client's lag, ms": latency_ms(outcome.lags_s),
        "client, share of a core": round(load.client_share, 3),
        "Retry-After, s": _spread(outcome.retry_after_s[refused]),
        "429s without Retry-After": int(np.isnan(outcome.retry_after_s[refused]).sum()),
        "RSS, MB": {
            "at the start": float(rss[0]),
            "settled": float(settled[0]),
            "most": float(settled.max()),
            "most / settled": round(float(settled.max() / settled[0]), 3),
            "every few seconds": [[round(float(at), 1), float(mb)] for at, mb in zip(times, rss, strict=True)][::step],
        },
        "errors": outcome.errors,
    }
    if deadline_ms is not None:
        in_time = (outcome.done_s - outcome.sent_s)[accepted] * 1e3 <= deadline_ms
        result["accepted and answered within the deadline"] = round(float(in_time.mean()), 4) if len(in_time) else None
    return result


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
    return {
        "requests": num_requests,
        "got through": int(through.sum()),
        "all got through": bool(through.sum() == num_requests),
        "tries of those": _spread(outcome.attempt[through] + 1.0),
        "first try to answer, s": _spread([done_s - first_sent_s[body] for body, done_s in ended]),
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


if __name__ == "__main__":
    main()
