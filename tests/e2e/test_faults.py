"""Faults on real processes: nothing accepted is lost or answered twice, and /health and /ready tell the truth."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.e2e.faulty_server import DIES, HANGS, HOLDS, NAN, RAISES, STUCK
from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.support.artifacts import expected_vectors, save_artifact

# Shorter than this nothing is taken to hang: healthy steps of these servers take microseconds.
HANG_TIMEOUT = ("--hang-timeout", "1")

StartServer = Callable[..., Server]
Answer = Future[httpx.Response]


@pytest.fixture
def faulty(tmp_path: Path, env: Mapping[str, str]) -> Iterator[StartServer]:
    """``faulty(*flags)``: a server whose engine fails as its inputs say."""
    artifact = save_artifact(tmp_path / "fake")
    with ExitStack() as stack:

        def start(*flags: str) -> Server:
            command = [sys.executable, "-m", "tests.e2e.faulty_server", artifact.path, *flags]
            return stack.enter_context(Server(command, env, tmp_path))

        yield start


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def vectors_of(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


def check_vectors(response: httpx.Response, inputs: list[list[int]]) -> None:
    np.testing.assert_allclose(vectors_of(response), expected_vectors(inputs), rtol=1e-6)


def check_error(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code
    assert "Traceback" not in response.text


def waiting(server: Server, number: int, lane: str = "interactive") -> None:
    """Return when so many sequences are in the queue."""
    wait_until(lambda: server.metric("bei_queue_sequences", lane=lane) == number, f"{number} are queued")


def state(server: Server) -> tuple[int, int]:
    return server.get_status("/health"), server.get_status("/ready")


def stopped(server: Server) -> int:
    server.send_signal(signal.SIGTERM)
    return server.wait_exit()


def test_poisonous_sequences_cost_only_their_own_requests_the_answer(
    faulty: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = faulty()
    first = clients.submit(server.embed, [[HOLDS]])
    server.wait_for_log("engine holds")
    good = [[value, 1] for value in range(1, 7)]
    answers = [clients.submit(server.embed, [values]) for values in good]
    poison, nan = (clients.submit(server.embed, [[value, 1]]) for value in (RAISES, NAN))
    waiting(server, 8)  # all of them run in one step
    server.say("open")
    check_error(poison.result(DEADLINE_S), 500, "engine_failed")
    check_error(nan.result(DEADLINE_S), 500, "non_finite_output")
    check_vectors(first.result(DEADLINE_S), [[HOLDS]])
    for values, answer in zip(good, answers, strict=True):
        check_vectors(answer.result(DEADLINE_S), [values])
    assert server.metric("bei_batch_failures_total", kind="exception") > 1
    assert server.metric("bei_batch_failures_total", kind="non_finite") >= 1
    assert state(server) == (200, 200)
    assert stopped(server) == 0


def test_an_engine_that_hangs_is_replaced_and_every_request_answered(
    faulty: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = faulty(*HANG_TIMEOUT)
    answers = [clients.submit(server.embed, [[HANGS], [1]])]
    server.wait_for_log("engine hangs")
    answers.append(clients.submit(server.embed, [[2]]))
    server.wait_for_log("loading another engine")
    assert state(server) == (503, 503)
    answers.append(clients.submit(server.embed, [[3]]))  # accepted although nothing runs
    waiting(server, 2)
    server.say("load")
    for answer, inputs in zip(answers, ([[HANGS], [1]], [[2]], [[3]]), strict=True):
        check_vectors(answer.result(DEADLINE_S), inputs)
    wait_until(lambda: state(server) == (200, 200), "it is well again")
    assert server.metric("bei_engine_restarts_total") == 1
    server.say("open")  # the step that hung ends now: nobody waits for it
    check_vectors(server.embed([[HANGS]]), [[HANGS]])
    counted = {"route": "/v1/embeddings", "status": "200"}
    wait_until(lambda: server.metric("bei_requests_total", **counted) == 4, "each answer is counted once")
    assert stopped(server) == 0


def test_an_engine_that_hangs_and_cannot_be_replaced_is_dead_and_everybody_hears_of_it(
    faulty: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = faulty(*HANG_TIMEOUT)
    answers = [clients.submit(server.embed, [[STUCK]])]
    server.wait_for_log("engine hangs")
    answers += [clients.submit(server.embed, [[value], [value, 1]]) for value in range(10)]
    server.wait_for_log("loading another engine")
    waiting(server, 20)
    assert state(server) == (503, 503)
    server.say("load")
    for answer in answers:
        check_error(answer.result(DEADLINE_S), 503, "engine_dead")
    check_error(server.embed([[1]]), 503, "engine_dead")
    check_error(server.embed("a text"), 503, "engine_dead")
    assert state(server) == (503, 503)
    assert stopped(server) == 0  # although a thread is still inside the engine


def test_a_dead_engine_thread_is_an_error_to_whoever_waits_and_whoever_comes(
    faulty: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = faulty()
    holds = clients.submit(server.embed, [[HOLDS]])
    server.wait_for_log("engine holds")
    answers = [
        clients.submit(server.embed, [[DIES]]),
        *(clients.submit(server.embed, [[value]]) for value in range(20)),
    ]
    waiting(server, 21)
    server.say("open")
    check_vectors(holds.result(DEADLINE_S), [[HOLDS]])
    codes = {answer.result(DEADLINE_S).status_code for answer in answers}
    assert codes <= {200, 503}  # those that ran in a step before it have their answers
    check_error(answers[0].result(), 503, "engine_dead")
    check_error(server.embed([[1]]), 503, "engine_dead")
    assert state(server) == (503, 503)
    assert stopped(server) == 0


def test_a_thousand_clients_that_leave_take_their_work_along(faulty: StartServer, clients: ThreadPoolExecutor) -> None:
    server = faulty()
    process = psutil.Process(server.pid)
    wait_until(lambda: server.metric("bei_tokens_total") > 0, "the canary of the start is counted")
    tokens = server.metric("bei_tokens_total")
    first = clients.submit(server.embed, [[HOLDS]])
    server.wait_for_log("engine holds")
    num_descriptors, num_threads = process.num_fds(), process.num_threads()
    host, port = server.url.removeprefix("http://").split(":")
    for block in range(4):
        with ExitStack() as leaving:
            for number in range(250):
                body = json.dumps({"input": [[1 + block, number % 80, number // 80]]}).encode()
                head = f"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ncontent-length: {len(body)}\r\n\r\n"
                client = leaving.enter_context(socket.create_connection((host, int(port)), DEADLINE_S))
                client.sendall(head.encode() + body)
            waiting(server, 250)
        waiting(server, 0)
    wait_until(lambda: server.metric("bei_requests_total", status="499") == 1000, "all have left")
    server.say("open")
    check_vectors(first.result(DEADLINE_S), [[HOLDS]])
    check_vectors(server.embed([[1, 2, 3]]), [[1, 2, 3]])
    wait_until(lambda: server.metric("bei_tokens_total") - tokens == 4, "nothing of the others has run")
    assert server.metric("bei_queue_cost_seconds", lane="interactive") == 0
    wait_until(lambda: process.num_fds() <= num_descriptors + 2, "descriptors are given back")
    wait_until(lambda: process.num_threads() <= num_threads + 2, "and threads")
    assert stopped(server) == 0


def test_a_signal_under_load_answers_what_is_accepted_in_both_lanes(
    faulty: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = faulty()
    first = clients.submit(server.embed, [[HOLDS]])
    server.wait_for_log("engine holds")
    singles = [[[1, value]] for value in range(20)]
    bulks = [[[2, value, other] for other in range(30)] for value in range(20)]
    answers: list[Answer] = [clients.submit(server.embed, inputs) for inputs in (*singles, *bulks)]
    waiting(server, 20)
    waiting(server, 600, "bulk")
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    check_error(server.embed([[1]]), 503, "shutting_down")
    server.say("open")
    check_vectors(first.result(DEADLINE_S), [[HOLDS]])
    for inputs, answer in zip((*singles, *bulks), answers, strict=True):
        check_vectors(answer.result(DEADLINE_S), inputs)
    assert server.wait_exit() == 0


def test_a_long_queue_before_a_step_that_takes_its_time_is_alive_and_ready(
    faulty: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = faulty()
    inputs = [[3, value % 80, value // 80] for value in range(5000)]
    answers = [clients.submit(server.embed, [[HOLDS]])]
    server.wait_for_log("engine holds")
    answers.append(clients.submit(server.embed, inputs))
    waiting(server, 5000, "bulk")
    assert [state(server) for _ in range(5)] == [(200, 200)] * 5
    assert server.metric("bei_queue_sequences", lane="interactive") == 0  # no canary stands in it
    server.say("open")
    check_vectors(answers[1].result(DEADLINE_S), inputs)
    assert state(server) == (200, 200)
    assert stopped(server) == 0
