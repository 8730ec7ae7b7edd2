"""The client of ``benchmarks/load.py``: ``bei bench``'s driver in a process of its own, requests made beforehand.

Reads a task from stdin and prints what happened, both JSON.

    {"port", "seconds", "lead", "patience_s", "streams": [{
        "name", "method", "path", "headers", "bodies",
        "concurrency",                     closed loop: so many requests on their way, until bodies run out
        "arrivals_s", "max_connections",   open loop: body i (cyclically) is due so many seconds after the start
        "retry", "poll_s"}]}               on 429 and 503: never; obey (wait as Retry-After says); poll (every poll_s)

No request starts once ``seconds`` have passed or every body of the stream called ``lead`` has its answer (whichever
is given); what is on its way is waited for, ``patience_s`` at most. An open loop's request that finds no free
connection waits here, and its latency counts from when it was due: a server that stalls cannot slow the questions down.

It parses no more of an answer than its head and its length, so that the cores it shares with the server go to the
server. Times are seconds since ``started_s`` (CLOCK_MONOTONIC). Status 0: the connection broke; -1: not
answered, or (``sent_s`` -1) never sent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from bei.cli.bench.driver import BROKEN, UNANSWERED, LoadDriver, LoadRequest, RequestStream
from bei.cli.bench.http1 import HttpResponse, head_of, request_of
from bei.cli.bench.sockets import ServerAddress, SocketNetwork, allow_files

_ERRORS_KEPT = 5


class Rows:
    """A row for each try (``bei.cli.bench.driver.RequestSink``)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, float, float, float, int, float | None, float | None]] = []
        self.errors: list[str] = []

    def ended(
        self, request: LoadRequest, done_s: float, fate: int, answer: HttpResponse | None, again_s: float | None
    ) -> None:
        """Write it down."""
        seconds = milliseconds = None
        if answer is not None and fate != 200:
            seconds, milliseconds = _number(answer.header(b"retry-after")), _number(answer.header(b"retry-after-ms"))
            error = f"{fate} {answer.body.decode(errors='replace')}"
            if len(self.errors) < _ERRORS_KEPT and error not in self.errors:
                self.errors.append(error)
        status = fate if fate > 0 or fate == UNANSWERED else BROKEN
        sent = (request.index, request.attempt, request.try_due_s, request.sent_s)
        self.rows.append((*sent, done_s, status, seconds, milliseconds))

    def report(self) -> dict[str, Any]:
        """Columns of all rows."""
        names = ("body", "attempt", "due_s", "sent_s", "done_s", "status", "retry_after_s", "retry_after_ms")
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(names)
        return {**{name: list(column) for name, column in zip(names, columns, strict=True)}, "errors": self.errors}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Drive all streams; what happened."""
    sinks = {spec["name"]: Rows() for spec in task["streams"]}
    driver = LoadDriver(
        SocketNetwork(ServerAddress("127.0.0.1", task["port"])),
        [_stream(spec, sinks[spec["name"]]) for spec in task["streams"]],
        seconds=task.get("seconds"),
        lead=task.get("lead"),
        patience_s=task.get("patience_s", 300.0),
        abandons_waiting=True,
    )
    cpu_s, started_s = time.process_time(), time.monotonic()
    driver.run(started_s)
    return {
        "started_s": started_s,
        "elapsed_s": driver.now(),
        "cpu_s": time.process_time() - cpu_s,
        "streams": {name: {**sink.report(), **_counts(driver, name)} for name, sink in sinks.items()},
    }


def _stream(spec: dict[str, Any], sink: Rows) -> RequestStream:
    arrivals = spec.get("arrivals_s")
    stream = RequestStream(spec["name"], _contents(spec, is_endless=arrivals is not None), sink)
    if arrivals is None:
        stream.concurrency = spec["concurrency"]
    else:
        stream.arrivals = iter(arrivals)
        stream.max_connections = spec["max_connections"]
    stream.retry, stream.poll_s = spec.get("retry", "never"), spec.get("poll_s", 0.05)
    return stream


def _contents(spec: dict[str, Any], *, is_endless: bool) -> Callable[[], tuple[bytes, int] | None]:
    """Whole requests, one after the other; again and again where ``is_endless``."""
    head = head_of(spec.get("method", "POST"), spec["path"], "localhost", spec.get("headers", {}))
    requests = [request_of(head, body.encode()) for body in spec["bodies"]]
    number = -1

    def content() -> tuple[bytes, int] | None:
        nonlocal number
        number += 1
        return (requests[number % len(requests)], 1) if is_endless or number < len(requests) else None

    return content


def _counts(driver: LoadDriver, name: str) -> dict[str, int]:
    num_started, num_finished, num_reconnects = driver.counts(name)
    return {"num_started": num_started, "num_finished": num_finished, "num_reconnects": num_reconnects}


def _number(value: bytes | None) -> float | None:
    """Of a header; None where it is missing or no number."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


if __name__ == "__main__":
    allow_files()
    json.dump(run(json.load(sys.stdin)), sys.stdout)
