"""A model with two towers in several processes: vectors of one process, whoever dies, is replaced or is to blame."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import transformers

from bei.artifact.manifest import Artifact
from bei.config.devices import usable_cores
from bei.core import Float32Array
from tests.e2e.children import check_error, children, left_behind, stopped, vectors_of, wait_until_well, with_own_tmp
from tests.e2e.image_processes import KILLS
from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.e2e.swapping_server import put_in_place
from tests.support.builds import build_artifact
from tests.support.two_towers import TEXTS, data_url, drawn_files, library_vectors, png, save_clip

FILES = [*drawn_files()[:12], *(png(color=(color, 200 - color, 70)) for color in range(0, 200, 10))]
INPUTS: list[object] = [*({"image": data_url(content)} for content in FILES), *TEXTS]
_NUM_AT_ONCE = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("checkpoint") / "clip")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "clip", name="clip")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Float32Array:
    """Of INPUTS, by transformers: one process has them within 2e-4 (tests/e2e/test_images.py)."""
    return library_vectors(checkpoint, transformers.CLIPModel, FILES, TEXTS)


def serving(artifact: Artifact, env: Mapping[str, str], folder: Path, *flags: object) -> Server:
    """Nothing is cached: every request has steps."""
    command = [sys.executable, "-m", "tests.e2e.image_processes", artifact.path, "--cache-megabytes", "0", *flags]
    return Server(command, with_own_tmp(env, folder), folder)


@pytest.fixture(scope="module")
def many(artifact: Artifact, env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two front ends. At its end nothing of it is left."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "slow").touch()
    with serving(artifact, env, folder, "--http-workers", 2) as server:
        yield server
        assert {*children(server)} == {"front-0", "front-1", "engine-0"}
        assert stopped(server) == 0
    assert left_behind(folder) == []
    assert not any("Traceback" in line for line in server.log), "\n".join(server.log)


@pytest.fixture(scope="module")
def spread(artifact: Artifact, env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two devices, if there are two cores."""
    cores = usable_cores()
    if len(cores) < 2:
        pytest.skip("there is one core")
    folder = tmp_path_factory.mktemp("spread")
    (folder / "slow").touch()
    with serving(artifact, env, folder, "--devices", f"{cores[0]},{cores[1]}") as server:
        yield server
        assert {*children(server)} == {"front-0", "manager", "engine-0", "engine-1"}
        assert stopped(server) == 0
    assert left_behind(folder) == []


class Load:
    """Clients that ask for images and texts without a pause, and check every vector. ``may_break``: a connection may,
    while it waits for an answer; then the request is sent again, on another one."""

    def __init__(self, server: Server, expected: Float32Array, *, may_break: bool = False) -> None:
        self._url = f"{server.url}/v1/embeddings"
        self._expected = expected
        self._may_break = may_break
        self._is_over = threading.Event()
        self.num_answers = [0] * _NUM_AT_ONCE
        self.num_broken = [0] * _NUM_AT_ONCE

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(_NUM_AT_ONCE)
        self._running = [self._pool.submit(self._ask_on, number) for number in range(_NUM_AT_ONCE)]
        self.wait_for_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for one in self._running:
            one.result(DEADLINE_S)
        self._pool.shutdown()

    def wait_for_more(self, count: int = 3) -> None:
        """Return when every client has so many more answers; fails where one has met an error."""
        reached = [number + count for number in self.num_answers]

        def are_there() -> bool:
            for one in self._running:
                if one.done():
                    one.result()
            return all(number >= least for number, least in zip(self.num_answers, reached, strict=True))

        wait_until(are_there, "every client is answered")

    def _ask_on(self, number: int) -> None:
        while not self._is_over.is_set():
            try:
                with httpx.Client(timeout=DEADLINE_S) as client:
                    while not self._is_over.is_set():
                        self._ask(client, number)
            except httpx.TransportError:
                if not self._may_break:
                    raise
                self.num_broken[number] += 1

    def _ask(self, client: httpx.Client, number: int) -> None:
        places = [(number + 7 * self.num_answers[number] + step) % len(FILES) for step in (0, 1)] + [-1]
        answer = client.post(self._url, json={"input": [INPUTS[place] for place in places]})
        assert answer.status_code == 200, answer.text
        found = [item["embedding"] for item in answer.json()["data"]]
        np.testing.assert_allclose(found, self._expected[places], atol=2e-4)
        self.num_answers[number] += 1


@pytest.mark.parametrize("devices", ["many", "spread"])
def test_vectors_are_those_of_the_library_whichever_process_computes_them(
    devices: str, expected: Float32Array, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(devices)
    wait_until_well(server)
    for _ in range(4):  # a connection each
        np.testing.assert_allclose(vectors_of(server.embed(INPUTS)), expected, atol=2e-4)
    refused = server.embed([INPUTS[0], {"image": data_url(b"junk")}])
    check_error(refused, 400, "invalid_image")


@pytest.mark.parametrize(
    ("devices", "name"), [("many", "engine-0"), ("many", "front-1"), ("spread", "engine-1"), ("spread", "manager")]
)
def test_a_process_that_is_killed_among_images_is_replaced_and_costs_nobody_an_answer(
    devices: str, name: str, expected: Float32Array, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(devices)
    before = children(server)
    with Load(server, expected, may_break=name.startswith("front")) as load:
        before[name].send_signal(signal.SIGKILL)
        server.wait_for_log(f"{name} is ready again")
        load.wait_for_more()
    assert max(load.num_broken) <= name.startswith("front")  # the request under way, and no other
    after = children(server)
    assert {other for other in before if before[other].pid != after[other].pid} == {name}
    wait_until_well(server)
    wait_until(lambda: server.metric("bei_queue_sequences") == 0, "nothing waits")


@pytest.mark.parametrize("devices", ["many", "spread"])
def test_an_image_that_kills_engines_is_the_only_one_that_is_refused(
    devices: str, expected: Float32Array, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(devices)
    guilty = {"image": data_url(png(color=KILLS))}
    with Load(server, expected) as load:
        check_error(server.embed([guilty]), 500, "engine_died")
        load.wait_for_more()
        check_error(server.embed([guilty]), 500, "engine_died")
        load.wait_for_more()
    wait_until_well(server)


def test_a_rebuilt_artifact_is_swapped_in_under_images_and_kept_by_processes_that_follow(
    checkpoint: Path, artifact: Artifact, many: Server, expected: Float32Array, tmp_path: Path
) -> None:
    def digests() -> set[str]:
        return {httpx.get(f"{many.url}/info", timeout=DEADLINE_S).json()["digest"] for _ in range(8)}

    new = build_artifact(checkpoint, tmp_path / "next", name="clip", max_batch_size=7)
    (former,) = digests()
    with Load(many, expected) as load:
        put_in_place(new.path, artifact.path)
        many.send_signal(signal.SIGHUP)
        many.wait_for_log("supervisor: clip is served from the artifact")
        many.wait_for_log("has answered its last request and is closed")
        load.wait_for_more()
        assert digests() == {new.manifest.digest} != {former}
        children(many)["engine-0"].kill()
        many.wait_for_log("engine-0 is ready again")
        load.wait_for_more()
    np.testing.assert_allclose(vectors_of(many.embed(INPUTS)), expected, atol=2e-4)
