"""Adapters of a real engine behind front ends in processes of their own: many at once, and swaps under load."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import httpx
import numpy as np
import pytest

from bei.core import Float32Array
from tests.bei_build.weights.test_peft_adapters import save_lora
from tests.e2e.process import DEADLINE_S, Server, serve, wait_until
from tests.e2e.swapping_server import put_in_place
from tests.support.builds import build_artifact
from tests.support.reading import saved

pytestmark = pytest.mark.slow

NAMES = ("query", "passage", "match", "mine")
TEXTS = [f"text {number} of the world " + "hello " * (number % 9) for number in range(16)]
# Of unit vectors: products of a step with other rows are summed in another order.
SAME = 1e-5


def build(base: Path, out: Path, seed: int, names: tuple[str, ...] = NAMES) -> None:
    """``base`` with adapters of ``names``, whose weights are drawn by ``seed``."""
    lora = [
        f"{name}={save_lora(out.parent / f'{out.name}-{name}', base, 'BertModel', seed + i)}"
        for i, name in enumerate(names)
    ]
    build_artifact(base, out, name="tiny", reference="engine", pooling="mean", lora=tuple(lora))


@pytest.fixture
def server(tmp_path: Path, env: Mapping[str, str]) -> Iterator[Server]:
    base = saved(tmp_path / "base", "BertModel")
    build(base, tmp_path / "tiny", 1)
    with serve([tmp_path / "tiny", "--http-workers", 2, "--swap-vectors"], env, tmp_path) as server:
        yield server


def vector(client: httpx.Client, text: str, name: str) -> Float32Array:
    answer = client.post("/v1/embeddings", json={"model": f"tiny:{name}", "input": text})
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"], np.float32)


def alone(client: httpx.Client) -> dict[tuple[str, str], Float32Array]:
    """By text and adapter, one request at a time."""
    return {(text, name): vector(client, text, name) for text in TEXTS for name in NAMES}


def is_same(one: Float32Array, other: Float32Array) -> bool:
    return bool(np.abs(one - other).max() <= SAME)


def test_64_requests_of_4_adapters_at_once_are_answered_as_each_alone(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client, ThreadPoolExecutor(64) as threads:
        wanted = alone(client)
        asked = [*wanted] * 4
        found = threads.map(lambda each: vector(client, *each), asked)
        assert all(is_same(row, wanted[each]) for each, row in zip(asked, found, strict=True))
    for text in TEXTS:
        rows = [wanted[text, name] for name in NAMES]
        assert not any(is_same(one, other) for i, one in enumerate(rows) for other in rows[:i])


def test_an_adapter_more_is_swapped_in_under_load_and_changes_no_answer_of_the_others(
    server: Server, tmp_path: Path
) -> None:
    found: list[tuple[tuple[str, str], Float32Array]] = []
    is_over = threading.Event()

    def ask(first: int) -> None:
        with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
            for each in islice(cycle(wanted), first, None):
                found.append((each, vector(client, *each)))
                if is_over.is_set():
                    return

    def wait_for_more() -> None:
        enough = len(found) + 2 * len(wanted)
        wait_until(lambda: len(found) >= enough or any(one.done() for one in clients), "clients are answered")

    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client, ThreadPoolExecutor(8) as threads:
        assert client.post("/v1/embeddings", json={"model": "tiny:new", "input": "hello"}).status_code == 404
        wanted = alone(client)
        clients = [threads.submit(ask, 7 * number) for number in range(8)]
        try:
            wait_for_more()
            build(tmp_path / "base", tmp_path / "more", 1, (*NAMES, "new"))
            put_in_place(tmp_path / "more", tmp_path / "tiny")
            server.send_signal(signal.SIGHUP)
            server.wait_for_log("is served from the artifact")
            wait_for_more()
        finally:
            is_over.set()
        for one in clients:
            one.result()
        new = vector(client, TEXTS[0], "new")
    assert all(is_same(row, wanted[each]) for each, row in found)
    assert not any(is_same(new, wanted[TEXTS[0], name]) for name in NAMES)


def test_an_artifact_that_lacks_an_adapter_of_the_served_one_does_not_take_its_place(
    server: Server, tmp_path: Path
) -> None:
    build(tmp_path / "base", tmp_path / "new", 1, NAMES[:3])
    put_in_place(tmp_path / "new", tmp_path / "tiny")
    server.send_signal(signal.SIGHUP)
    assert "It has fewer adapters (not mine)" in server.wait_for_log("cannot take its place")
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        vector(client, "hello", "mine")
