"""The load client against servers made here: what it sends when, and what it writes down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from bei.cli.bench.driver import BROKEN, UNANSWERED
from benchmarks.harness.load import Load, Outcome, Stream, drive, evenly, poisson
from benchmarks.retry_after import Rounds, _add

Respond = Callable[[BaseHTTPRequestHandler, bytes], None]
Listen = Callable[[Respond], int]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """``listen(respond)``: the port of an HTTP server whose POSTs ``respond`` answers."""
    with ExitStack() as stack:

        def start(respond: Respond) -> int:
            class Handler(BaseHTTPRequestHandler):
                protocol_version = "HTTP/1.1"

                def do_POST(self) -> None:
                    respond(self, self.rfile.read(int(self.headers["content-length"])))

                def log_message(self, format: str, *args: object) -> None:
                    pass

            class Server(ThreadingHTTPServer):
                def handle_error(self, request: object, client_address: object) -> None:
                    pass  # a client that had given up

            server = stack.enter_context(Server(("127.0.0.1", 0), Handler))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            return int(server.server_address[1])

        yield start


def say(handler: BaseHTTPRequestHandler, status: int = 200, body: bytes = b"{}", **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_latency_counts_from_when_a_request_was_due_not_from_when_a_stalled_server_let_it_be_sent(
    listen: Listen,
) -> None:
    first = threading.Event()

    def stalls_once(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if not first.is_set():
            first.set()
            time.sleep(0.5)
        say(handler)

    stream = Stream("one", ["{}"], arrivals_s=[0.0, 0.1, 0.2, 0.3], max_connections=1)
    outcome = drive(listen(stalls_once), [stream])["one"]
    assert outcome.statuses == {"200": 4}
    np.testing.assert_allclose(outcome.due_s, [0.0, 0.1, 0.2, 0.3])
    assert (outcome.latencies_s >= [0.5, 0.4, 0.3, 0.2]).all()
    assert (outcome.lags_s[1:] >= [0.39, 0.29, 0.19]).all()


def test_a_closed_loop_sends_every_body_once_and_never_more_than_its_concurrency(listen: Listen) -> None:
    lock, seen, most = threading.Lock(), list[bytes](), [0, 0]

    def count(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        with lock:
            seen.append(body)
            most[0] += 1
            most[1] = max(most)
        time.sleep(0.005)
        with lock:
            most[0] -= 1
        say(handler)

    bodies = [f'"{number}"' for number in range(40)]
    outcome = drive(listen(count), [Stream("all", bodies, concurrency=3)])["all"].must_be_ok()
    assert sorted(seen) == sorted(body.encode() for body in bodies)
    assert most[1] <= 3
    assert sorted(outcome.body) == list(range(40))


def test_clients_that_obey_wait_as_long_as_they_are_told_to_the_millisecond_where_that_is_said(listen: Listen) -> None:
    tries = list[bytes]()

    def refuse_twice(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        tries.append(body)
        if len(tries) < 3:
            say(handler, 429, b'{"error": "full"}', retry_after="1", retry_after_ms="150")
        else:
            say(handler)

    outcome = drive(listen(refuse_twice), [Stream("one", ['"a"'], concurrency=1, retry="obey")])["one"]
    assert tries == [b'"a"'] * 3
    assert outcome.status.tolist() == [429, 429, 200]
    assert outcome.attempt.tolist() == [0, 1, 2]
    np.testing.assert_allclose(outcome.retry_after_s[:2], 0.15)
    assert (np.diff(outcome.sent_s) >= 0.15).all()
    assert (outcome.sent_s - outcome.due_s < 2).all()  # as the seconds alone would have it
    assert outcome.errors == ['429 {"error": "full"}']


def test_the_streams_that_a_lead_has_end_with_it_and_headers_go_with_their_stream(listen: Listen) -> None:
    lanes = set[tuple[bytes, str | None]]()

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        lanes.add((body, handler.headers["X-Bei-Lane"]))
        time.sleep(0.05)
        say(handler)

    lead = Stream("lead", ['"bulk"'] * 6, concurrency=2, headers={"X-Bei-Lane": "bulk"})
    beside = Stream("beside", ['"one"'], arrivals_s=evenly(50, 60))
    load = drive(listen(answer), [lead, beside], lead="lead")
    assert load["lead"].statuses == {"200": 6}
    assert 0 < load["beside"].num_started < 1500  # of 3000
    assert set(load["beside"].status.tolist()) == {200}  # what was on its way got its answer
    assert lanes == {(b'"bulk"', "bulk"), (b'"one"', None)}
    assert load.cpu_s > 0


def test_a_connection_that_was_closed_while_idle_is_made_anew_and_one_that_breaks_is_written_down(
    listen: Listen,
) -> None:
    def close_behind(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.close_connection = True
        if body != b'"break"':
            say(handler)

    port = listen(close_behind)
    kept = drive(port, [Stream("kept", ["{}"], arrivals_s=evenly(20, 0.5))])["kept"]
    assert kept.statuses == {"200": 10}
    broken = drive(port, [Stream("broken", ['"break"', "{}"], concurrency=1)])["broken"]
    assert broken.status.tolist() == [BROKEN, 200]


def test_what_is_not_answered_in_time_is_written_down_too(listen: Listen) -> None:
    release = threading.Event()

    def hang(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        release.wait(10)
        say(handler)

    stream = Stream("one", ["{}"], arrivals_s=[0.0, 0.05, 5.0], max_connections=1)
    outcome = drive(listen(hang), [stream], seconds=0.2, patience_s=0.2)["one"]
    release.set()
    assert outcome.num_started == 2
    assert outcome.status.tolist() == [UNANSWERED, UNANSWERED]
    assert sorted(outcome.sent_s >= 0) == [False, True]  # the second waited for the only connection


def test_arrivals_are_of_the_rate_asked_for_and_the_same_for_the_same_seed() -> None:
    arrivals = poisson(50, 100, seed=3)
    assert arrivals == sorted(arrivals) == poisson(50, 100, seed=3) != poisson(50, 100, seed=4)
    assert 4_700 < len(arrivals) < 5_300
    gaps = np.diff(arrivals)
    assert 0.9 < gaps.std() / gaps.mean() < 1.1  # exponential
    assert arrivals[0] > 0
    assert arrivals[-1] < 100
    assert evenly(4, 1) == [0, 0.25, 0.5, 0.75]


def test_a_stream_is_a_closed_loop_or_an_open_one() -> None:
    with pytest.raises(ValueError, match="either"):
        Stream("both", ["{}"], concurrency=1, arrivals_s=[0.0])
    with pytest.raises(ValueError, match="either"):
        Stream("none", ["{}"])


def outcome_of(rows: list[tuple[float, float, int, float]]) -> Outcome:
    """Rows of (sent, done, status, Retry-After)."""
    sent_s, done_s, status, retry_s = (np.array(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), np.int64)
    return Outcome(zeros, zeros, sent_s, sent_s, done_s, status.astype(np.int64), retry_s, 1, [])


def test_the_truth_of_retry_after_is_the_time_from_a_refusal_to_the_acceptance() -> None:
    nan = float("nan")
    prober = outcome_of([(0.9, 1.0, 429, 8.0), (2.9, 3.0, 429, 1.0), (4.7, 4.8, 429, 9.0), (5.0, 6.0, 200, nan)])
    fill = outcome_of([(0.0, 9.0, 200, nan)])
    rounds = Rounds(num_rounds=0)
    _add(rounds, Load({"prober": prober, "fill": fill}, 0.0, 10.0, 0.1))
    assert rounds.room_s == [4.0, 2.0]  # the third refusal was too near to say anything
    assert rounds.drained_s == [8.0, 6.0]
    assert rounds.num_near == 1
    summary = rounds.summary()
    assert summary["said / until there was room"] == {"p10": 0.65, "median": 1.25, "p90": 1.85}
    assert summary["within 1.5 times until there was room"] == 0.0
    assert summary["first refusals: said, s"] == [8.0]
