"""SIGTERM and SIGINT: what is accepted is answered, what comes later gets 503, the exit code is 0."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bei.artifact.manifest import Artifact
from tests.e2e.conftest import StartServer
from tests.e2e.process import DEADLINE_S, Server, serve, wait_until
from tests.e2e.wire import wait_until_read

Answers = list[Future[httpx.Response]]

SIGNALS = [signal.SIGTERM, signal.SIGINT]
SECOND_SIGNAL_S = 15.0  # of the five seconds after it, and a busy machine


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def accepted(server: Server, clients: ThreadPoolExecutor, inputs: list[list[list[int]]]) -> Answers:
    """One request for each element of ``inputs``, each on a connection of its own; returns when all are accepted."""
    before = server.metric("bei_inputs_total")  # the canary of the start
    answers = [clients.submit(server.embed, given) for given in inputs]
    wait_until(lambda: server.metric("bei_inputs_total") - before == sum(map(len, inputs)), "all inputs are accepted")
    return answers


@pytest.mark.parametrize("number", SIGNALS)
def test_after_a_signal_the_accepted_are_answered_and_new_ones_get_503(
    gated: StartServer, clients: ThreadPoolExecutor, number: signal.Signals
) -> None:
    server = gated()
    inputs = [[[i, i + 1], [i + 2]] for i in range(0, 90, 3)]
    answers = accepted(server, clients, inputs)
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as kept_open:
        assert kept_open.get("/health").status_code == 200
        server.send_signal(number)
        server.wait_for_log("draining")
        for refused in (kept_open.post("/v1/embeddings", json={"input": "late"}), server.embed("late")):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
    assert server.get_status("/ready") == 503
    assert server.get_status("/health") == 200  # draining is no reason to be restarted
    assert not any(answer.done() for answer in answers)
    server.say("open")
    for given, answer in zip(inputs, answers, strict=True):
        response = answer.result(DEADLINE_S)
        assert response.status_code == 200
        assert response.json()["usage"]["total_tokens"] == sum(map(len, given))
    assert server.wait_exit() == 0
    assert server.log[-1].endswith("stopped")


@pytest.mark.parametrize("number", SIGNALS)
def test_an_idle_server_stops_at_once_with_exit_code_0(gated: StartServer, number: signal.Signals) -> None:
    server = gated()
    server.send_signal(number)
    assert server.wait_exit() == 0
    assert not any("Traceback" in line for line in server.log)


def test_a_second_signal_stops_without_waiting_for_the_queue(gated: StartServer, clients: ThreadPoolExecutor) -> None:
    server = gated(EXIT_S="60")
    answers = accepted(server, clients, [[[i, 1]] for i in range(20)])
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("second signal")
    assert [answer.result(DEADLINE_S).status_code for answer in answers] == [503] * len(answers)
    server.say("one")  # the batch on the engine cannot be taken back
    assert server.wait_exit() == 0
    assert sum("engine has" in line for line in server.log) == 1


def test_a_second_signal_ends_the_process_though_the_engine_hangs(
    gated: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = gated()
    answers = accepted(server, clients, [[[i, 1]] for i in range(5)])
    server.wait_for_log("engine has")
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    server.send_signal(signal.SIGINT)
    sent_s = time.monotonic()
    assert [answer.result(DEADLINE_S).status_code for answer in answers] == [503] * len(answers)
    assert server.wait_exit() == 1
    assert time.monotonic() - sent_s < SECOND_SIGNAL_S
    assert any("has not ended within 4 s" in line for line in server.log)


def test_a_second_signal_ends_the_process_though_the_event_loop_hangs(gated: StartServer) -> None:
    server = gated(HANG_ON_DRAIN="1")
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("the event loop hangs")
    server.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    assert server.wait_exit() == 1
    assert time.monotonic() - sent_s < SECOND_SIGNAL_S
    assert any("has not ended within 4 s" in line for line in server.log)


def test_a_second_signal_ends_the_process_though_the_interpreter_s_lock_is_held(
    gated: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = gated(HOLD_LOCK="1")
    accepted(server, clients, [[[5, 1]]])
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("the interpreter's lock is held")
    sent_s = time.monotonic()
    assert server.wait_exit() == 1
    assert time.monotonic() - sent_s < SECOND_SIGNAL_S
    assert any("most recent call first" in line for line in server.log)  # faulthandler's, of every thread


def test_an_idle_connection_and_half_a_request_do_not_hold_the_exit_up(gated: StartServer) -> None:
    server = gated()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as idle, socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ncontent-length: 100\r\n\r\n{")
        wait_until_read(server)
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert half.recv(100).startswith(b"HTTP/1.1 503 ")
        assert idle.recv(100) == b""
    assert not any("Traceback" in line for line in server.log)


def test_under_load_on_a_real_engine_nothing_accepted_is_lost(
    tiny: Artifact, env: Mapping[str, str], home: Path, clients: ThreadPoolExecutor
) -> None:
    with serve([tiny.path, "--engine-threads", "1"], env, home) as server:
        inputs = [[[5 + (i + j) % 50, 6 + i, *([7] * (j % 40))] for j in range(200)] for i in range(40)]
        answers = accepted(server, clients, inputs)
        server.send_signal(signal.SIGTERM)
        responses = [answer.result(DEADLINE_S) for answer in answers]
        assert server.wait_exit() == 0
    assert [response.status_code for response in responses] == [200] * len(inputs)
    assert [len(response.json()["data"]) for response in responses] == [200] * len(inputs)
