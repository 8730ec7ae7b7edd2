"""Servers that answer without an end, too much, too slowly or too deeply."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from bei.cli.bench.bounded_http import AnswerTooLongError, most_answer_bytes
from bei.cli.bench.dialects import DIALECTS
from bei.cli.bench.driver import NOT_HTTP, TIMED_OUT, TOO_LONG, LoadDriver, LoadRequest, RequestStream
from bei.cli.bench.http1 import HttpResponse
from bei.cli.bench.sockets import ServerAddress, SocketNetwork
from bei.cli.bench.target import target_of

Answer = Callable[[socket.socket], None]

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def endless_chunks(client: socket.socket) -> None:
    client.sendall(_HEAD + b"transfer-encoding: chunked\r\n\r\n")
    while True:
        client.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")


def endless_to_the_close(client: socket.socket) -> None:
    client.sendall(_HEAD + b"\r\n")
    while True:
        client.sendall(b"a" * 65536)


def endless_header(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        client.sendall(b"a" * 65536)


def endless_interim_responses(client: socket.socket) -> None:
    while True:
        client.sendall(b"HTTP/1.1 100 Continue\r\nlink: x\r\n\r\n" * 500)


def drip(client: socket.socket) -> None:
    for byte in _HEAD + b"content-length: 100\r\n\r\n" + b"a" * 100:
        client.sendall(bytes([byte]))
        time.sleep(0.05)


@pytest.fixture
def answering() -> Iterator[Callable[[Answer], str]]:
    """``answering(answer)`` is the URL of a server that gives ``answer`` to whoever has sent something."""
    with contextlib.ExitStack() as stack:

        def start(answer: Answer) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def one(client: socket.socket) -> None:
                with client, contextlib.suppress(OSError):
                    client.settimeout(20)
                    client.recv(65536)
                    answer(client)

            def accept() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        client = listener.accept()[0]
                        threading.Thread(target=one, args=(client,), daemon=True).start()

            threading.Thread(target=accept, daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


@pytest.mark.parametrize("answer", [endless_chunks, endless_to_the_close])
def test_an_endless_answer_is_read_to_its_bound(answer: Answer, answering: Callable[[Answer], str]) -> None:
    target = target_of(answering(answer))
    with pytest.raises(AnswerTooLongError, match="more than the 1,000,000 bytes that are read"):
        target.request("GET", "/", {}, None, 20.0, 1_000_000)


@pytest.mark.parametrize("answer", [endless_header, endless_interim_responses])
def test_endless_headers_end_with_an_error(answer: Answer, answering: Callable[[Answer], str]) -> None:
    target = target_of(answering(answer))
    with pytest.raises(Exception, match=r"more than|got more than|header line") as caught:
        target.request("GET", "/", {}, None, 20.0, 1_000_000)
    assert not isinstance(caught.value, TimeoutError)


def test_the_time_of_an_answer_counts_to_its_end(answering: Callable[[Answer], str]) -> None:
    target = target_of(answering(drip))
    with pytest.raises(TimeoutError):
        target.request("GET", "/", {}, None, 0.5, 1_000_000)


class Sink:
    def __init__(self) -> None:
        self.outcomes: list[int] = []

    def ended(
        self, request: LoadRequest, done_s: float, outcome: int, answer: HttpResponse | None, again_s: float | None
    ) -> None:
        self.outcomes.append(outcome)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (endless_chunks, TOO_LONG),
        (endless_to_the_close, TOO_LONG),
        (endless_header, NOT_HTTP),
        (endless_interim_responses, NOT_HTTP),
        (drip, TIMED_OUT),
    ],
)
def test_a_load_counts_such_answers_as_failures_and_holds_none(
    answer: Answer, outcome: int, answering: Callable[[Answer], str]
) -> None:
    target, sink = target_of(answering(answer)), Sink()
    requests = iter([(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", 1)] * 4)
    network = SocketNetwork(ServerAddress(target.host, target.port))
    stream = RequestStream("all", lambda: next(requests, None), sink, concurrency=2, timeout_s=10.0, keeps_body=True)
    if outcome == TIMED_OUT:
        stream.timeout_s = 0.5
    driver = LoadDriver(network, [stream])
    driver.run()
    assert sink.outcomes == [outcome] * 4
    assert driver._num_held_bytes == 0


def test_the_bound_of_an_answer_follows_its_inputs() -> None:
    assert most_answer_bytes(1) == 1_500_000
    assert most_answer_bytes(100_000) == 256_000_000


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_json_that_is_nested_deeply_is_no_answer(dialect: object) -> None:
    for start in (b"[", b'{"data":', b'{"a":', b'{"data":[{"embedding":['):
        assert dialect.check(start * 200_000, 1)  # type: ignore[attr-defined]
