"""Load from a client process of its own (``load_client.py``): streams of requests, and what became of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

EMBEDDINGS = "/v1/embeddings"
LANE = "X-Bei-Lane"
TIMEOUT = "Request-Timeout-Ms"
BROKEN, UNANSWERED = 0, -1  # statuses: the connection broke; no answer when the run ended


@dataclass(frozen=True)
class Stream:
    """One kind of traffic. ``concurrency`` makes it a closed loop, ``arrivals_s`` (seconds from the start) an open one.

    A closed loop sends each of ``bodies`` once; arrival i sends body i, and begins again where there are fewer bodies.
    ``retry``: what a client does about 429 and 503: nothing, wait as Retry-After says, or ask every ``poll_s``.
    """

    name: str
    bodies: Sequence[str]
    path: str = EMBEDDINGS
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    concurrency: int | None = None
    arrivals_s: Sequence[float] | None = None
    max_connections: int = 256
    retry: Literal["never", "obey", "poll"] = "never"
    poll_s: float = 0.05

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.arrivals_s is None):
            raise ValueError("a stream has either a concurrency or arrivals")


@dataclass(frozen=True)
class Outcome:
    """What became of a stream's requests: one element a try, in the order in which they ended; seconds from the start.

    ``sent_s`` is -1 for what was never sent. ``retry_after_s`` is NaN where no header said so, to the millisecond
    where ``retry-after-ms`` did.
    """

    body: IntArray
    attempt: IntArray
    due_s: FloatArray
    sent_s: FloatArray
    done_s: FloatArray
    status: IntArray
    retry_after_s: FloatArray
    num_started: int
    num_reconnects: int
    errors: list[str]

    @property
    def latencies_s(self) -> FloatArray:
        """Of the answers with 200, from when a request was due: waiting for a free connection counts."""
        latencies: FloatArray = (self.done_s - self.due_s)[self.status == 200]
        return latencies

    @property
    def lags_s(self) -> FloatArray:
        """How late what was sent was sent: what of the latencies is the client's, or its connections'."""
        lags: FloatArray = (self.sent_s - self.due_s)[self.sent_s >= 0]
        return lags

    @property
    def statuses(self) -> dict[str, int]:
        """How many tries ended with which status."""
        return {str(status): count for status, count in sorted(Counter(self.status.tolist()).items())}

    @property
    def elapsed_s(self) -> float:
        """From the first request to the last answer."""
        return float(self.done_s.max() - self.sent_s[self.sent_s >= 0].min())

    def must_be_ok(self) -> Outcome:
        """Itself; ends the program if a request was not answered with 200, or none was sent."""
        if not len(self.status) or (self.status != 200).any():
            raise SystemExit(f"not every request was answered with 200: {self.statuses} {self.errors}")
        return self


@dataclass(frozen=True)
class Load:
    """A run of the client. ``started_s`` is on time.monotonic's clock; ``cpu_s`` is the client's own."""

    streams: dict[str, Outcome]
    started_s: float
    elapsed_s: float
    cpu_s: float

    @property
    def client_share(self) -> float:
        """What the client used of one core."""
        return self.cpu_s / self.elapsed_s

    def __getitem__(self, name: str) -> Outcome:
        return self.streams[name]


def drive(
    port: int,
    streams: Sequence[Stream],
    *,
    seconds: float | None = None,
    lead: str | None = None,
    patience_s: float = 300.0,
) -> Load:
    """Run ``streams`` at once until all bodies are answered, or ``seconds`` have passed, or those of ``lead`` are.

    What is on its way then is waited for, ``patience_s`` at most.
    """
    specs = [{**vars(stream), "bodies": list(stream.bodies), "headers": dict(stream.headers)} for stream in streams]
    task = {"port": port, "seconds": seconds, "lead": lead, "patience_s": patience_s, "streams": specs}
    client = [sys.executable, "-m", "benchmarks.load_client"]
    root = Path(__file__).parents[1]
    done = subprocess.run(client, input=json.dumps(task), stdout=subprocess.PIPE, text=True, check=True, cwd=root)
    answer = json.loads(done.stdout)
    outcomes = {name: _outcome(columns) for name, columns in answer["streams"].items()}
    return Load(outcomes, answer["started_s"], answer["elapsed_s"], answer["cpu_s"])


def closed_loop(port: int, concurrency: int, bodies: Sequence[str], path: str = EMBEDDINGS) -> tuple[Outcome, Load]:
    """Send every body once. All must be answered with 200."""
    load = drive(port, [Stream("all", bodies, path, concurrency=concurrency)])
    return load["all"].must_be_ok(), load


def embeddings_body(given: str | Sequence[str], model: str | None = None) -> str:
    """A request of the embeddings route for a text or several."""
    fields = {"input": given, "encoding_format": "base64"}
    return json.dumps(fields if model is None else {"model": model, **fields})


def poisson(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """When requests are due that know nothing of each other: ``rate`` a second, gaps exponential."""
    return list(_gaps_to(random.Random(seed), rate, seconds))


def evenly(rate: float, seconds: float) -> list[float]:
    """When requests are due that come every 1 / ``rate`` seconds, the first at 0."""
    return [index / rate for index in range(int(rate * seconds))]


def _gaps_to(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    now = rng.expovariate(rate)
    while now < seconds:
        yield now
        now += rng.expovariate(rate)


def _outcome(columns: dict[str, Any]) -> Outcome:
    floats = {name: np.array(columns[name], np.float64) for name in ("due_s", "sent_s", "done_s")}
    seconds, milliseconds = (np.array(columns[f"retry_after_{unit}"], np.float64) for unit in ("s", "ms"))
    return Outcome(
        body=np.array(columns["body"], np.int64),
        attempt=np.array(columns["attempt"], np.int64),
        status=np.array(columns["status"], np.int64),
        retry_after_s=np.where(np.isnan(milliseconds), seconds, milliseconds / 1e3),
        num_started=columns["num_started"],
        num_reconnects=columns["num_reconnects"],
        errors=columns["errors"],
        **floats,
    )
