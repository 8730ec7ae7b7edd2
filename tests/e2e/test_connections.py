"""What a client may make the server hold and wait for: connections, headers, bodies. Real sockets, a real process."""

from __future__ import annotations

import contextlib
import resource
import select
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.e2e.wire import connect, embed, head, is_closed, read_answer, wait_until_read

MEGABYTE = 1_000_000


@pytest.fixture
def start(gated: StartServer) -> Iterator[StartServer]:
    """A server with an engine that does not wait. At the end it must be alive and answer, without a traceback."""
    servers: list[Server] = []

    def make(*flags: object) -> Server:
        server = gated(*map(str, flags))
        server.say("open")
        servers.append(server)
        return server

    yield make
    for server in servers:
        assert server.get_status("/health") == 200
        assert server.embed([5, 6]).status_code == 200
        assert not any("Traceback" in line for line in server.log), server.log


@pytest.fixture
def shared(server: Server) -> Iterator[Server]:
    """The server of all tests, with its default settings. At the end it must answer, without a traceback."""
    yield server
    assert server.get_status("/health") == 200
    assert server.embed([5, 6]).status_code == 200
    assert not any("Traceback" in line for line in server.log), server.log


# Headers


def test_headers_that_do_not_arrive_in_time_are_408(start: StartServer) -> None:
    server = start("--header-timeout", 1)
    with connect(server) as wire:
        wire.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\n")
        answer = read_answer(wire)
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        assert is_closed(wire)


def test_headers_that_trickle_are_408_though_each_byte_is_in_time(start: StartServer) -> None:
    server = start("--header-timeout", 2)
    with connect(server) as wire:
        wire.sendall(b"POST /v1/embeddings HTTP/1.1\r\nx: ")
        give_up_s = time.monotonic() + DEADLINE_S
        while not select.select([wire], [], [], 0.1)[0]:
            assert time.monotonic() < give_up_s
            with contextlib.suppress(ConnectionError):
                wire.sendall(b"x")
        assert read_answer(wire).status == 408


def test_sixty_megabytes_of_headers_are_431_and_not_kept(shared: Server) -> None:
    process = psutil.Process(shared.pid)
    before, refused = process.memory_info().rss, shared.metric("bei_requests_total", status="431")
    with connect(shared) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(60):
                wire.sendall(b"x" * MEGABYTE)
        answer = read_answer(wire)
        assert (answer.status, answer.code) == (431, "headers_too_large")
    assert process.memory_info().rss - before < 20 * MEGABYTE
    assert shared.metric("bei_requests_total", status="431") == refused + 1


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        ("GET /health HTTP/1.1\r\nhost: bei\r\n" + "".join(f"x-{i}: y\r\n" for i in range(127)), 200),
        ("GET /health HTTP/1.1\r\nhost: bei\r\n" + "".join(f"x-{i}: y\r\n" for i in range(128)), 431),
        (f"GET /health HTTP/1.1\r\nhost: bei\r\nx: {'y' * 32_000}\r\n", 200),
        (f"GET /health HTTP/1.1\r\nx: {'y' * 33_000}\r\n", 431),
        (f"GET /health?{'y' * 33_000} HTTP/1.1\r\n", 431),
    ],
    ids=["128 headers", "129 headers", "32 kB", "33 kB", "33 kB of query"],
)
def test_headers_are_counted_and_measured(shared: Server, request_head: str, status: int) -> None:
    with connect(shared) as wire:
        wire.sendall(request_head.encode() + b"\r\n")
        assert read_answer(wire).status == status


@pytest.mark.parametrize(
    "tail", [b"x: " + b"y" * MEGABYTE, b"x: y\r\n" * 10_000], ids=["one long trailer", "many trailers"]
)
def test_trailers_are_held_to_the_same_limits(shared: Server, tail: bytes) -> None:
    with connect(shared) as wire:
        wire.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        with contextlib.suppress(ConnectionError):
            wire.sendall(tail)
        assert read_answer(wire).status == 431


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /\xff HTTP/1.1\r\nhost: bei\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: bei\r\nhost: bei\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ntransfer-encoding: chunked\r\n\r\nnot hex\r\n",
    ],
)
def test_malformed_http_is_400_in_our_form(shared: Server, garbage: bytes) -> None:
    with connect(shared) as wire:
        wire.sendall(garbage)
        answer = read_answer(wire)
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert is_closed(wire)


def test_connect_is_405(shared: Server) -> None:
    with connect(shared) as wire:
        wire.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n")
        assert read_answer(wire).status == 405


# Bodies


def test_a_body_that_does_not_arrive_in_time_is_408(start: StartServer) -> None:
    server = start("--body-timeout", 1)
    with connect(server) as wire:
        wire.sendall(head(1000) + b"{")
        answer = read_answer(wire)
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert is_closed(wire)
    assert server.metric("bei_requests_total", route="/v1/embeddings", status="408") == 1


def test_a_body_that_is_too_large_and_stalls_is_408(start: StartServer) -> None:
    server = start("--body-timeout", 1, "--payload-limit", 100)
    with connect(server) as wire:
        wire.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ntransfer-encoding: chunked\r\n\r\n")
        wire.sendall(b"c8\r\n" + b" " * 200 + b"\r\n")
        assert read_answer(wire).status == 408
        assert is_closed(wire)


def test_a_length_that_is_too_large_is_413_before_the_body(start: StartServer) -> None:
    server = start("--payload-limit", 100)
    with connect(server) as wire:
        wire.sendall(head(1000))
        assert read_answer(wire).status == 413


def test_http_2_in_clear_text_gets_a_goaway(server: Server) -> None:
    with connect(server) as wire:
        wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert wire.recv(100).startswith(b"\0\0\0\4\0\0\0\0\0")
        assert is_closed(wire)


def test_a_body_that_is_too_large_and_becomes_malformed_is_400(start: StartServer) -> None:
    server = start("--payload-limit", 100)
    with connect(server) as wire:
        wire.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ntransfer-encoding: chunked\r\n\r\n")
        wire.sendall(b"c8\r\n" + b" " * 200 + b"\r\n")
        wait_until_read(server)
        wire.sendall(b"not hex\r\n")
        assert read_answer(wire).status == 400
        assert is_closed(wire)


def test_a_slow_body_that_makes_progress_is_read(start: StartServer) -> None:
    server = start("--body-timeout", 2)
    body = b'{"input": [5]' + b" " * 99_986 + b"}"
    with connect(server) as wire:
        wire.sendall(head(len(body)) + body[:20_000])
        for i in range(20_000, len(body), 20_000):  # what has come may take a second for every 10,000 bytes more
            threading.Event().wait(0.6)
            wire.sendall(body[i : i + 20_000])
        assert read_answer(wire).status == 200


def test_a_body_of_a_request_that_is_answered_already_may_not_go_on_for_ever(start: StartServer) -> None:
    server = start("--body-timeout", 1)
    with connect(server) as wire:
        wire.sendall(head(1000, path="/health", method="GET") + b"{")
        assert read_answer(wire).status == 200
        assert is_closed(wire)


def test_unfinished_bodies_share_a_memory_and_the_slow_ones_yield(start: StartServer) -> None:
    server = start("--body-memory", MEGABYTE, "--payload-limit", MEGABYTE)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(30)]
        for wire in slow:
            wire.sendall(head(MEGABYTE) + b" " * 30_000)
        wait_until_read(server)
        body = b'{"input": [5]' + b" " * (MEGABYTE - 14) + b"}"

        def is_read() -> bool:
            with connect(server) as fast:
                with contextlib.suppress(ConnectionError):
                    fast.sendall(head(len(body)) + body)
                return read_answer(fast).status == 200

        wait_until(is_read, "the others are slow from the first second on, and yield")
        for wire in slow:
            answer = read_answer(wire)
            assert (answer.status, answer.code) == (429, "overloaded")
            assert int(answer.headers["retry-after"]) > 0


def test_a_hundred_large_bodies_at_once_are_answered_or_refused_and_the_memory_is_given_back(
    start: StartServer,
) -> None:
    server = start("--body-memory", 5 * MEGABYTE, "--payload-limit", MEGABYTE)
    body = b'{"input": [5]' + b" " * (MEGABYTE - 14) + b"}"
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connect(server)) for _ in range(30)]
        for wire in wires:
            wire.sendall(head(len(body)) + body[:500_000])
        statuses = []
        for wire in wires:
            with contextlib.suppress(ConnectionError):
                wire.sendall(body[500_000:])
            statuses.append(read_answer(wire).status)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 5
    for _ in range(10):
        with connect(server) as wire:
            wire.sendall(head(len(body)) + body)
            assert read_answer(wire).status == 200


def test_unfinished_bodies_take_no_more_than_their_memory(start: StartServer) -> None:
    """Those that had to yield, too: they were held until the garbage collector came by."""
    server = start("--body-memory", 20 * MEGABYTE, "--payload-limit", MEGABYTE)
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(250):
            wire = stack.enter_context(connect(server))
            wire.sendall(head(MEGABYTE) + b" " * 900_000)
        wait_until(lambda: process.memory_info().rss - before < 60 * MEGABYTE, "those that yielded are freed")


def test_a_client_that_asks_first_is_told_to_continue(shared: Server) -> None:
    whole = embed([5], "expect: 100-continue")
    request_head, body = whole.split(b"\r\n\r\n", 1)
    with connect(shared) as wire:
        wire.sendall(request_head + b"\r\n\r\n")
        assert wire.recv(100).startswith(b"HTTP/1.1 100 ")
        wire.sendall(body)
        assert read_answer(wire).status == 200


# Upgrades

H2C = (
    "connection: Upgrade, HTTP2-Settings",
    "upgrade: h2c",
    "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
WEBSOCKET = ("connection: upgrade", "upgrade: websocket")
UNKNOWN = ("connection: keep-alive, Upgrade", "upgrade: x/1")


@pytest.mark.parametrize("headers", [H2C, WEBSOCKET, UNKNOWN], ids=["h2c", "websocket", "unknown"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_the_body_of_a_request_that_asks_to_upgrade_is_read_and_the_connection_kept(
    shared: Server, headers: tuple[str, ...], size: int
) -> None:
    whole = embed([5], *headers)[:-1] + b" " * size + b"}"
    whole = whole.replace(b"content-length: 14", b"content-length: %d" % (14 + size))
    with connect(shared) as wire:
        for _ in range(2):
            wire.sendall(whole)
            assert read_answer(wire).status == 200
        for byte in embed([5], *headers):  # and if it comes byte by byte
            wire.sendall(bytes([byte]))
        assert read_answer(wire).status == 200
        wire.sendall(whole + embed([6]))  # pipelined
        assert [read_answer(wire).status for _ in range(2)] == [200, 200]


def test_a_chunked_body_with_an_upgrade_is_read(shared: Server) -> None:
    with connect(shared) as wire:
        wire.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ntransfer-encoding: chunked\r\n"
            + "\r\n".join(H2C).encode()
            + b'\r\n\r\nb\r\n{"input": [\r\n3\r\n5]}\r\n0\r\n\r\n'
        )
        assert read_answer(wire).status == 200


# Connections


def test_a_connection_is_kept_for_longer_than_five_seconds(shared: Server) -> None:
    with connect(shared) as wire:
        wire.sendall(embed([5]))
        assert read_answer(wire).status == 200
        threading.Event().wait(6.5)
        wire.sendall(embed([5]))
        assert read_answer(wire).status == 200


def test_an_idle_connection_is_closed_after_its_time_with_or_without_a_request(start: StartServer) -> None:
    server = start("--keep-alive-timeout", 3)
    with connect(server) as used, connect(server) as unused:
        used.sendall(embed([5]))
        assert read_answer(used).status == 200
        assert is_closed(used)
        assert is_closed(unused)


def test_over_the_limit_the_connection_idle_for_longest_is_closed(start: StartServer) -> None:
    server = start("--max-connections", 3)
    with connect(server) as first, connect(server) as second, connect(server) as third:
        for wire in (second, third, first):  # the second is the one that has been idle for longest
            wire.sendall(embed([5]))
            assert read_answer(wire).status == 200
        with connect(server) as fourth:
            fourth.sendall(embed([5]))
            assert read_answer(fourth).status == 200
            assert is_closed(second)
            for wire in (first, third):
                wire.sendall(embed([5]))
                assert read_answer(wire).status == 200


def test_clients_that_never_finish_their_headers_make_room_like_idle_ones(start: StartServer) -> None:
    server = start("--max-connections", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(server)).sendall(b"GET /health HTTP/1.1\r\n")
        wait_until(lambda: server.get_status("/health") == 200, "there is room")


def test_a_connection_over_the_limit_gets_503_where_all_others_are_busy(gated: StartServer) -> None:
    server = gated("--max-connections", "2")
    with connect(server) as first, connect(server) as second:
        for wire in (first, second):
            wire.sendall(embed([5]))
        server.wait_for_log("engine has")
        wait_until_read(server)
        with connect(server) as third:
            answer = read_answer(third)
            assert (answer.status, answer.code) == (503, "too_many_connections")
            assert int(answer.headers["retry-after"]) > 0
            assert is_closed(third)
        server.say("open")
        assert [read_answer(wire).status for wire in (first, second)] == [200, 200]
    assert server.get_status("/health") == 200
    assert server.embed([5]).status_code == 200


@pytest.mark.parametrize("number", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_idle_connections_cost_little_and_hold_nobody_up(start: StartServer, number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < number + 500:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = start()
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(number):
                wire = stack.enter_context(connect(server))
                wire.sendall(head(0, path="/health", method="GET"))
                assert read_answer(wire).status == 200
            assert server.embed([5, 6]).status_code == 200
            grown = process.memory_info().rss - before
            print(f"{number} idle connections: {grown / number:.0f} bytes each")  # noqa: T201
            assert grown / number < 20_000
            idle_s = process.cpu_times().user
            threading.Event().wait(2)
            assert process.cpu_times().user - idle_s < 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_without_descriptors_serves_on_and_lets_clients_in_later(start: StartServer) -> None:
    server = start()
    process = psutil.Process(server.pid)
    began_s = time.monotonic()
    with connect(server) as kept, contextlib.ExitStack() as stack:
        kept.sendall(embed([5]))
        assert read_answer(kept).status == 200
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, hard))  # nothing can be opened any more
        waiting = [stack.enter_context(connect(server)) for _ in range(20)]
        for wire in waiting:
            wire.sendall(embed([5]))
        server.wait_for_log("cannot accept connections")
        before_s = sum(process.cpu_times()[:2])
        threading.Event().wait(2)
        assert sum(process.cpu_times()[:2]) - before_s < 1.5, "it spins"
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert [read_answer(wire).status for wire in waiting] == [200] * len(waiting)
    assert 1 <= sum("cannot accept" in line for line in server.log) <= 1 + (time.monotonic() - began_s) / 10


def test_a_request_under_way_is_answered_though_there_are_no_descriptors(gated: StartServer) -> None:
    server = gated()
    with connect(server) as busy, connect(server) as idle:
        busy.sendall(embed([5]))
        server.wait_for_log("engine has")
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, hard))
        with connect(server) as late:
            server.wait_for_log("cannot accept connections")
            assert is_closed(idle)  # to make room
            server.say("open")
            assert read_answer(busy).status == 200
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
            late.sendall(embed([5]))
            assert read_answer(late).status == 200
    assert server.get_status("/health") == 200


def test_max_connections_is_fitted_to_the_limit_of_open_files(gated: StartServer) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = gated("--max-connections", str(10 * hard))
    assert any(f"max_connections is lowered from {10 * hard} to" in line for line in server.log)
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_pipelined_requests_are_answered_in_order_and_what_is_too_much_is_not_held(shared: Server) -> None:
    with connect(shared) as wire:
        wire.sendall(b"".join(embed([[5]] * n) for n in range(1, 51)))
        assert [read_answer(wire).body.count(b'"index"') for _ in range(50)] == list(range(1, 51))
        get = b"GET /health HTTP/1.1\r\nhost: bei\r\n\r\n"
        wire.sendall(embed([5]) + get * 1000)
        answers = [read_answer(wire) for _ in range(101)]
        assert {answer.status for answer in answers} == {200}
        assert answers[-1].headers["connection"] == "close"
        assert is_closed(wire)


def test_garbage_behind_a_good_request_does_not_disturb_its_answer(gated: StartServer) -> None:
    server = gated()
    with connect(server) as wire:
        wire.sendall(embed([5]))
        server.wait_for_log("engine has")
        wire.sendall(b"garbage\r\n\r\n")
        server.say("open")
        assert read_answer(wire).status == 200
        assert is_closed(wire)
    assert server.embed([5]).status_code == 200


def test_a_client_that_does_not_take_its_answers_is_cut_off(start: StartServer) -> None:
    server = start("--keep-alive-timeout", 3)
    process = psutil.Process(server.pid)

    def num_connections() -> int:
        return sum(connection.status == "ESTABLISHED" for connection in process.net_connections("tcp"))

    with connect(server) as wire:
        wire.sendall(embed([[5]] * 2048) * 90)
        server.wait_for_log("engine has")
        assert num_connections() == 1
        wait_until(lambda: num_connections() == 0, "it is cut off")
