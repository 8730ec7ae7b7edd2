"""No request stops the others: the largest legal ones beside /health, their memory, clients that leave in the middle.

A real process with the widths of real models (tests/e2e/wide_server.py). The bounds here are guards against a loop that
stands still and memory that grows without end; the figures are benchmarks/stalls.py's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.e2e.wide_server import WIDTH, save_models
from tests.e2e.wire import connect, head, read_answer

LONGEST_S = 1.0
TEXT = "able " * 200


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_models(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def wide(models: list[Path], env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """A server of all models in 2 GB of address space, on the default limits."""
    command = [sys.executable, "-m", "tests.e2e.wide_server", "--memory", 2_000_000_000, *models, "--port", 0]
    with Server(command, env, home) as server:
        yield server


class Health(threading.Thread):
    """Asks for /health and /ready over and over, which must both say 200.

    ``longest_s``: the most CPU time that the server spent while an answer was due. Others may take the cores away for
    longer than any stall lasts: on the clock that would look like one. Each of the ``count`` answers was seen as soon
    as it was there; others are left out, since the server had gone on to something else meanwhile.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._process = psutil.Process(server.pid)
        self._is_over = threading.Event()
        self.longest_s = 0.0
        self.count = 0
        self.statuses: set[int] = set()

    def __enter__(self) -> Health:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._is_over.set()
        self.join(DEADLINE_S)
        assert kind is not None or self.statuses == {200}

    def run(self) -> None:
        with connect(self._server) as wire:
            for path in itertools.cycle(("/health", "/ready")):
                if self._is_over.is_set():
                    return
                started_s = self._cpu_s()
                wire.sendall(head(0, path=path, method="GET"))
                is_seen_at_once = has_looked_all_the_time(wire)
                spent_s = self._cpu_s() - started_s
                self.statuses.add(read_answer(wire).status)
                if is_seen_at_once:
                    self.longest_s = max(self.longest_s, spent_s)
                    self.count += 1
                self._is_over.wait(0.005)

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def has_looked_all_the_time(wire: socket.socket) -> bool:
    """Return when an answer is there: whether this thread has run every tenth of a second until then."""
    looked_s, is_so, is_there = time.monotonic(), True, False
    while not is_there:
        is_there = bool(select.select([wire], [], [], 0.01)[0])
        now_s = time.monotonic()
        is_so, looked_s = is_so and now_s - looked_s < 0.1, now_s
    return is_so


def rss_mb(server: Server, name: str = "VmRSS") -> float:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


MONSTERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "a text of 2 MB": ("/tokenize", {"inputs": "a " * 1_000_000, "model": "embedder"}, 1_000_002),
    "a prompt of 2 MB": ("/tokenize", {"prompt": "a " * 1_000_000, "model": "embedder"}, 1_000_002),
    "vectors of tokens": ("/embed_all", {"inputs": [f"{i} {TEXT}" for i in range(200)]}, 200),
    "labels of tokens": ("/predict_tokens", {"inputs": [f"{i} {TEXT}" for i in range(300)], "raw_scores": True}, 300),
    "16,384 texts": ("/embed", {"inputs": [f"able {i}" for i in range(16384)], "model": "embedder"}, 16384),
    "sparse vectors": ("/embed_sparse", {"inputs": [f"able {i}" for i in range(8000)]}, 8000),
    "labels": ("/predict", {"inputs": [[f"able {i}"] for i in range(1000)], "model": "classifier"}, 1000),
    "token ids": ("/embed", {"inputs": [[i] * 512 for i in range(2000)], "model": "embedder"}, 2000),
    "a long query": ("/rerank", {"query": "able " * 60_000, "texts": ["able"] * 1000, "model": "reranker"}, 1000),
}


def length_of(content: Any) -> int:
    if isinstance(content, dict):
        return int(content["count"])
    return len(content[0]) if len(content) == 1 else len(content)


# What took the most memory before it was bounded, at full size.
BOMBS: dict[str, tuple[str, dict[str, Any], int]] = {
    "a text of 6 MB": ("/tokenize", {"inputs": "a " * 3_000_000, "model": "embedder"}, 3_000_002),
    "a prompt of 7.9 MB": ("/tokenize", {"prompt": "a " * 3_950_000, "model": "embedder"}, 3_950_002),
    "labels of 2,048 texts": ("/predict_tokens", {"inputs": [f"{i} {'able ' * 250}" for i in range(2048)]}, 2048),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BOMBS))
def test_a_memory_bomb_is_answered_within_its_memory(wide: Server, name: str) -> None:
    check_monster(wide, *BOMBS[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "prompt" in name else []) for name in MONSTERS]
)
def test_everybody_is_answered_beside_a_monstrous_request(wide: Server, name: str) -> None:
    check_monster(wide, *MONSTERS[name])


def check_monster(wide: Server, path: str, body: dict[str, Any], length: int) -> None:
    """The request is answered, everybody else too, and its memory is at most four times its answer and 64 MB."""
    content = json.dumps(body).encode()
    before_mb = rss_mb(wide)
    Path(f"/proc/{wide.pid}/clear_refs").write_text("5")  # VmHWM begins anew
    with Health(wide) as health:
        response = httpx.post(wide.url + path, content=content, timeout=DEADLINE_S)
        give_up_s = time.monotonic() + DEADLINE_S
        while health.count <= 5 and time.monotonic() < give_up_s:
            assert httpx.post(wide.url + path, content=content, timeout=DEADLINE_S).status_code == 200
    assert response.status_code == 200, response.text[:300]
    assert length_of(response.json()) == length
    assert rss_mb(wide, "VmHWM") - before_mb < 4 * len(response.content) / 1e6 + 64
    assert health.count > 5
    assert health.longest_s < LONGEST_S


def test_what_the_limits_refuse_is_refused_at_once(wide: Server) -> None:
    with Health(wide) as health:
        response = httpx.post(f"{wide.url}/embed_all", json={"inputs": [TEXT] * 2048}, timeout=DEADLINE_S)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "answer_too_large")
    assert health.longest_s < LONGEST_S


@pytest.mark.parametrize(("path", "field"), [("/embed", "inputs"), ("/v1/embeddings", "input")])
def test_lists_of_token_ids_by_the_million_are_refused_at_once(wide: Server, path: str, field: str) -> None:
    content = f'{{"model":"embedder","{field}":[{"[7]," * 1_900_000}[7]]}}'.encode()
    with Health(wide) as health:
        response = httpx.post(wide.url + path, content=content, timeout=DEADLINE_S)
    assert response.status_code == 400, response.text[:300]
    assert "has 1900001 inputs" in response.json()["error"]["message"]
    assert health.longest_s < LONGEST_S


def test_memory_of_a_large_answer_is_given_back(wide: Server) -> None:
    path, body, _ = MONSTERS["vectors of tokens"]
    size = len(httpx.post(wide.url + path, json=body, timeout=DEADLINE_S).content)
    before_mb = rss_mb(wide)
    for _ in range(3):
        assert len(httpx.post(wide.url + path, json=body, timeout=DEADLINE_S).content) == size
    wait_until(lambda: rss_mb(wide) < before_mb + 64, "it has given back what three answers took")
    assert rss_mb(wide, "VmHWM") < 4 * size / 1e6 + 500  # of all tests here


def test_memory_of_a_request_that_is_refused_as_too_many_is_given_back(wide: Server) -> None:
    content = json.dumps({"query": "able", "documents": [""] * 1_900_000, "model": "reranker"}).encode()
    before_mb = rss_mb(wide)
    for _ in range(2):
        assert httpx.post(f"{wide.url}/v1/rerank", content=content, timeout=DEADLINE_S).status_code == 400
    wait_until(lambda: rss_mb(wide) < before_mb + 64, "it has given back what the documents took")


def test_clients_that_take_large_answers_slowly_yield_to_others(
    models: list[Path], env: Mapping[str, str], home: Path
) -> None:
    flags = ("--answer-memory", 20_000_000, "--answer-limit", 20_000_000)
    command = [sys.executable, "-m", "tests.e2e.wide_server", models[0], "--port", 0, *flags]
    texts = [f"able {number}" for number in range(1330)]  # 6.1 MB
    content = json.dumps({"input": texts}).encode()
    with Server(command, env, home) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
            slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            slow.sendall(head(len(content)) + content)

        def is_answered() -> bool:
            body = {"input": texts[:600]}
            return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=DEADLINE_S).status_code == 200

        wait_until(is_answered, "those that take nothing are slow after a second, and one of them yields")
        assert server.metric("bei_requests_total", status="499") == 1
        assert not any("Traceback" in line or "ASGI" in line for line in server.log), server.log


def test_a_client_that_leaves_in_the_middle_of_its_answer_costs_nothing_more(wide: Server) -> None:
    _, body, _ = MONSTERS["vectors of tokens"]
    content = json.dumps(body).encode()
    host, port = wide.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as leaves:
        head = f"POST /embed_all HTTP/1.1\r\nhost: bei\r\ncontent-length: {len(content)}\r\n\r\n"
        leaves.sendall(head.encode() + content)
        assert leaves.recv(1000).startswith(b"HTTP/1.1 200")
    counted = {"route": "/embed_all", "status": "499"}
    wait_until(lambda: wide.metric("bei_requests_total", **counted) >= 1, "the server saw it leave")
    response = httpx.post(f"{wide.url}/embed_all", json={"inputs": TEXT}, timeout=DEADLINE_S)
    assert len(response.json()[0][0]) == WIDTH


def test_a_drain_waits_for_an_answer_that_is_being_sent(models: list[Path], env: Mapping[str, str], home: Path) -> None:
    command = [sys.executable, "-m", "tests.e2e.wide_server", *models, "--port", 0]
    _, body, length = MONSTERS["vectors of tokens"]
    with Server(command, env, home) as server:
        with httpx.stream("POST", f"{server.url}/embed_all", json=body, timeout=DEADLINE_S) as response:
            pieces = response.iter_bytes()
            content = bytearray(next(pieces))
            server.send_signal(signal.SIGTERM)
            server.wait_for_log("draining")
            for piece in pieces:
                content += piece
        assert len(json.loads(content)) == length
        assert server.wait_exit() == 0
