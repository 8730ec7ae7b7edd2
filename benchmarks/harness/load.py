"""Load from a client process of its own, by ``bei bench``'s driver: streams of requests, and their outcomes.

No request starts once ``seconds`` have passed or every body of the stream called ``lead`` has its answer (whichever is
given); those on their way are waited for, ``patience_s`` at most. An open loop's request that finds no free connection
waits in the client, and its latency counts from when it was due: a server that stalls cannot slow the questions down.

The client parses no more of an answer than its head and its length, so that the cores it shares with the server go to
the server. Its requests are made beforehand.
"""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bei.cli.bench.driver import BROKEN, UNANSWERED, LoadDriver, LoadRequest, RequestStream
from bei.cli.bench.http1 import HttpResponse, head_of, request_of
from bei.cli.bench.sockets import ServerAddress, SocketNetwork, allow_files
from benchmarks.harness.grpc_channel import Channel, call_of
from benchmarks.harness.grpc_channel import head_of as call_head_of
from benchmarks.harness.texts import groups

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

EMBEDDINGS = "/v1/embeddings"
LANE = "X-Bei-Lane"
TIMEOUT = "Request-Timeout-Ms"
_ERRORS_KEPT = 5
_CLIENT = "from benchmarks.harness.load import client; client()"


@dataclass(frozen=True)
class Stream:
    """One kind of traffic. ``concurrency`` makes it a closed loop, ``arrivals_s`` (seconds from the start) an open one.
    ``grpc_port``: it goes over one channel to this port, ``bodies`` are messages and ``path`` is a method's.

    A closed loop sends each of ``bodies`` once; arrival i sends body i, and begins again where there are fewer bodies.
    ``retry``: what a client does about 429 and 503: nothing, wait as Retry-After says, or ask every ``poll_s``.
    """

    name: str
    bodies: Sequence[str | bytes]
    path: str = EMBEDDINGS
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    concurrency: int | None = None
    arrivals_s: Sequence[float] | None = None
    max_connections: int = 256
    retry: Literal["never", "obey", "poll"] = "never"
    poll_s: float = 0.05
    grpc_port: int | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.arrivals_s is None):
            raise ValueError("a stream has either a concurrency or arrivals")


@dataclass(frozen=True)
class Outcome:
    """A stream's requests, one element a try, in the order in which they ended; seconds from the start.

    Status BROKEN (0): the connection broke; UNANSWERED: not answered or, ``sent_s`` being -1, never sent.
    ``retry_after_s`` is NaN where no header said so, to the millisecond where ``retry-after-ms`` did.
    """

    body: IntArray
    attempt: IntArray
    due_s: FloatArray
    sent_s: FloatArray
    done_s: FloatArray
    status: IntArray
    retry_after_s: FloatArray
    num_started: int
    errors: list[str]

    @property
    def latencies_s(self) -> FloatArray:
        """Of the answers with 200, from when a request was due: waiting for a free connection counts."""
        latencies: FloatArray = (self.done_s - self.due_s)[self.status == 200]
        return latencies

    @property
    def lags_s(self) -> FloatArray:
        """How late requests were sent: the part of the latencies that is the client's, or its connections'."""
        lags: FloatArray = (self.sent_s - self.due_s)[self.sent_s >= 0]
        return lags

    @property
    def statuses(self) -> dict[str, int]:
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
    """One run of the client. ``started_s`` is on time.monotonic's clock; ``cpu_s`` is the client's own."""

    streams: dict[str, Outcome]
    started_s: float
    elapsed_s: float
    cpu_s: float

    @property
    def client_share(self) -> float:
        """The client's use of one core."""
        return self.cpu_s / self.elapsed_s

    def __getitem__(self, name: str) -> Outcome:
        return self.streams[name]


class _Task(NamedTuple):
    port: int
    streams: Sequence[Stream]
    seconds: float | None
    lead: str | None
    patience_s: float


def drive(
    port: int,
    streams: Sequence[Stream],
    *,
    seconds: float | None = None,
    lead: str | None = None,
    patience_s: float = 300.0,
) -> Load:
    """Run ``streams`` at once until all bodies are answered, or ``seconds`` have passed, or those of ``lead`` are."""
    task = pickle.dumps(_Task(port, streams, seconds, lead, patience_s))
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _CLIENT], input=task, stdout=subprocess.PIPE, check=True, cwd=root)
    load: Load = pickle.loads(done.stdout)
    return load


def closed_loop(
    port: int, concurrency: int, bodies: Sequence[str | bytes], path: str = EMBEDDINGS, *, grpc_port: int | None = None
) -> Outcome:
    """Send every body once. All must be answered with 200."""
    stream = Stream("all", bodies, path, concurrency=concurrency, grpc_port=grpc_port)
    return drive(port, [stream])["all"].must_be_ok()


def texts_per_s(port: int, concurrency: int, texts: Sequence[str], size: int = 1) -> float:
    """Of a closed loop of requests for embeddings, ``size`` texts each; single texts stand alone in theirs."""
    bodies = [embeddings_body(group if size > 1 else group[0]) for group in groups(texts, size)]
    return len(texts) / closed_loop(port, concurrency, bodies).elapsed_s


def embeddings_body(given: str | Sequence[str] | Sequence[Mapping[str, str]], model: str | None = None) -> str:
    fields = {"input": given, "encoding_format": "base64"}
    return json.dumps(fields if model is None else {"model": model, **fields})


def poisson(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """When independent requests are due: ``rate`` a second, gaps exponential."""
    rng, arrivals = random.Random(seed), list[float]()
    now = rng.expovariate(rate)
    while now < seconds:
        arrivals.append(now)
        now += rng.expovariate(rate)
    return arrivals


def evenly(rate: float, seconds: float) -> list[float]:
    return [index / rate for index in range(int(rate * seconds))]


def client() -> None:
    """The process of the client: reads a task from stdin, and writes its load to stdout."""
    allow_files()
    task: _Task = pickle.load(sys.stdin.buffer)
    sinks = {stream.name: _Rows() for stream in task.streams}
    network = SocketNetwork(ServerAddress("127.0.0.1", task.port))
    driver = LoadDriver(
        network,
        [_driven(stream, sinks[stream.name], network) for stream in task.streams],
        seconds=task.seconds,
        lead=task.lead,
        patience_s=task.patience_s,
        abandons_waiting=True,
    )
    cpu_s, started_s = time.process_time(), time.monotonic()
    driver.run(started_s)
    elapsed_s, cpu_s = driver.now(), time.process_time() - cpu_s
    outcomes = {name: sink.outcome(driver.counts(name)[0]) for name, sink in sinks.items()}
    pickle.dump(Load(outcomes, started_s, elapsed_s, cpu_s), sys.stdout.buffer)


class _Rows:
    """A row for each try (``bei.cli.bench.driver.RequestSink``)."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []
        self._errors: list[str] = []

    def ended(
        self, request: LoadRequest, done_s: float, fate: int, answer: HttpResponse | None, again_s: float | None
    ) -> None:
        wait_s = float("nan")
        if answer is not None and fate != 200:
            seconds, milliseconds = _number(answer, b"retry-after"), _number(answer, b"retry-after-ms") / 1e3
            wait_s = seconds if np.isnan(milliseconds) else milliseconds
            error = f"{fate} {answer.body.decode(errors='replace')}"
            if len(self._errors) < _ERRORS_KEPT and error not in self._errors:
                self._errors.append(error)
        status = fate if fate > 0 or fate == UNANSWERED else BROKEN
        sent = (request.index, request.attempt, request.try_due_s, request.sent_s)
        self._rows.append((*sent, done_s, status, wait_s))

    def outcome(self, num_started: int) -> Outcome:
        columns = np.array(self._rows, np.float64).reshape(-1, 7).T
        body, attempt, status = (columns[index].astype(np.int64) for index in (0, 1, 5))
        due_s, sent_s, done_s, wait_s = columns[[2, 3, 4, 6]]
        return Outcome(body, attempt, due_s, sent_s, done_s, status, wait_s, num_started, self._errors)


def _driven(stream: Stream, sink: _Rows, network: SocketNetwork) -> RequestStream:
    driven = RequestStream(stream.name, _contents(stream), sink)
    if stream.grpc_port is not None:
        address = ServerAddress("127.0.0.1", stream.grpc_port)
        driven.connect = Channel(lambda handler: network.connect(handler, address)).connect
    if stream.arrivals_s is None:
        driven.concurrency = stream.concurrency
    else:
        driven.arrivals = iter(stream.arrivals_s)
        driven.max_connections = stream.max_connections
    driven.retry, driven.poll_s = stream.retry, stream.poll_s
    return driven


def _contents(stream: Stream) -> Callable[[], tuple[bytes, int] | None]:
    """Whole requests, one after the other; of an open loop again and again."""
    contents = [body.encode() if isinstance(body, str) else body for body in stream.bodies]
    if stream.grpc_port is None:
        head = head_of(stream.method, stream.path, "localhost", stream.headers)
        requests = [request_of(head, content) for content in contents]
    else:
        head = call_head_of(stream.path, stream.headers)
        requests = [call_of(head, content) for content in contents]
    is_endless, number = stream.arrivals_s is not None, -1

    def content() -> tuple[bytes, int] | None:
        nonlocal number
        number += 1
        return (requests[number % len(requests)], 1) if is_endless or number < len(requests) else None

    return content


def _number(answer: HttpResponse, header: bytes) -> float:
    """NaN where it is missing or no number."""
    try:
        return float(answer.header(header) or "nan")
    except ValueError:
        return float("nan")
