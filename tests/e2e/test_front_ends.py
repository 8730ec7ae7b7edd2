"""What two front ends of a real server share: connections, limits, rates of keys, and what they say of the server."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.e2e.standin_child import HOLDS
from tests.e2e.swapping_server import save_build

pytestmark = pytest.mark.slow

FREE = {"X-Api-Key": "0123456789abcdef-free"}
RATED = {"X-Api-Key": "0123456789abcdef-rated"}
RATE = 1
MOST_TOKENS = 96  # twice what one client holds here: at each front end it is one more, with a share of the limit
MOST_CONNECTIONS = 24
KEYS = f"free: {FREE['X-Api-Key']}\nrated:\n  key: {RATED['X-Api-Key']}\n  requests_per_second: {RATE}\n"
TEXT = [1, 2, 3, 4]


class Asked:
    """A server, asked with a connection for each request."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def embed(self, given: list[list[int]], headers: Mapping[str, str] = FREE) -> int:
        body = {"input": given}
        url = f"{self.server.url}/v1/embeddings"
        return httpx.post(url, json=body, headers=headers, timeout=DEADLINE_S).status_code

    def fronts(self) -> dict[str, psutil.Process]:
        children = psutil.Process(self.server.pid).children()
        named = {process.cmdline()[-1]: process for process in children if process.is_running()}
        return {name: process for name, process in named.items() if name.startswith("front-")}

    def connections(self) -> list[int]:
        """Of each front end, those that clients have opened."""
        return sorted(
            sum(one.status == "ESTABLISHED" for one in process.net_connections("tcp"))
            for process in self.fronts().values()
        )


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, env: Mapping[str, str]) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("front-ends")
    save_build(folder / "tiny", 1)
    (folder / "keys.yaml").write_text(KEYS)
    flags = {
        "http-workers": 2,
        "api-keys-file": "keys.yaml",
        "max-queue-tokens": MOST_TOKENS,
        "max-connections": MOST_CONNECTIONS,
    }
    command = [sys.executable, "-m", "tests.e2e.processes_server", "tiny"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    with Server(command, {**env, "LEAVE_S": "60"}, folder) as server:
        yield Asked(server, folder)
        (folder / "open").touch()


def test_connections_are_spread_evenly(asked: Asked) -> None:
    host, port = asked.server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        wait_until(lambda: asked.connections() == [0, 0], "those of other tests are closed")
        for _ in range(20):
            client = stack.enter_context(httpx.Client(base_url=f"http://{host}:{port}", timeout=DEADLINE_S))
            assert client.get("/health").status_code == 200
        assert asked.connections() == [10, 10]


def test_more_connections_than_there_may_be_close_an_idle_one_wherever_it_is(asked: Asked) -> None:
    with ExitStack() as stack:
        for _ in range(2 * MOST_CONNECTIONS):
            client = stack.enter_context(httpx.Client(base_url=asked.server.url, timeout=DEADLINE_S))
            assert client.get("/health").status_code == 200
        assert sum(asked.connections()) <= MOST_CONNECTIONS


def test_the_rate_of_a_key_is_that_of_the_server(asked: Asked) -> None:
    began_s = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        statuses = Counter(pool.map(lambda _: asked.embed([TEXT], RATED), range(40)))
    seconds = time.monotonic() - began_s
    assert set(statuses) == {200, 429}
    assert RATE <= statuses[200] <= RATE + RATE * seconds


def test_accepted_tokens_are_those_of_the_server_and_free_again_when_a_front_end_is_killed(asked: Asked) -> None:
    with ThreadPoolExecutor(16) as pool:
        held = pool.submit(asked.embed, [[HOLDS, *TEXT]])
        asked.server.wait_for_log("engine holds")
        waiting = [pool.submit(asked.embed, [[number, *TEXT]]) for number in range(10, 18)]
        num_tokens = 5 * 9
        wait_until(lambda: stats(asked)["queue"]["interactive"]["tokens"] == 5 * 8, "all of them wait")
        assert asked.embed([[1] * (MOST_TOKENS - num_tokens + 1)]) == 429
        wait_until(lambda: stats(asked)["open_requests"] == 9, "both say what they hold")
        fronts = asked.fronts()
        fronts["front-0"].send_signal(signal.SIGKILL)
        wait_until(lambda: stats(asked)["open_requests"] < 9, "what it held is given back")
        (asked.folder / "open").touch()
        ended = [one.exception(DEADLINE_S) or one.result() for one in (held, *waiting)]
        assert {type(one) for one in ended} >= {int}  # of the other front end
        assert all(one == 200 or isinstance(one, httpx.TransportError) for one in ended)
    wait_until(lambda: asked.fronts().keys() == fronts.keys(), "it is there again")
    wait_until(lambda: stats(asked)["open_requests"] == 0, "nothing is open")
    assert asked.embed([[2] * 10, [3] * 10, [4] * 10]) == 200


def stats(asked: Asked) -> dict[str, Any]:
    """Of the model, by whichever front end accepts the connection."""
    found = httpx.get(f"{asked.server.url}/stats", headers=FREE, timeout=DEADLINE_S).json()
    (model,) = found["models"]
    result: dict[str, dict[str, dict[str, int]]] = model
    return result


def test_every_front_end_says_the_same_and_no_counter_falls_when_one_is_killed(asked: Asked) -> None:
    wait_until(lambda: asked.server.metric("bei_process_up", process="front-0") == 1, "both are there")

    def answered() -> float:
        return asked.server.metric("bei_requests_total", route="/v1/embeddings", status="200")

    before = asked.server.metric_of_all("bei_requests_total", route="/v1/embeddings", status="200")
    for number in range(20, 40):
        assert asked.embed([[number]]) == 200
    least = before + 20
    wait_until(lambda: [answered() for _ in range(6)] == [least] * 6, "both say the same")
    restarts = asked.server.metric("bei_process_restarts_total", process="front-1")
    asked.fronts()["front-1"].send_signal(signal.SIGKILL)
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        now = answered()
        assert now == least
    wait_until(lambda: asked.server.metric("bei_process_up", process="front-1") == 1, "it is there again")
    assert asked.server.metric("bei_process_restarts_total", process="front-1") == restarts + 1
    assert asked.embed([[41]]) == 200
    wait_until(lambda: [answered() for _ in range(6)] == [least + 1] * 6, "both say the same")
    for name in ("front-0", "front-1", "engine-0", "supervisor"):
        assert asked.server.metric_of_all("bei_process_up", process=name) == 1
    assert asked.server.metric("bei_inputs_total") >= asked.server.metric("bei_inputs_inferred_total") > 0
