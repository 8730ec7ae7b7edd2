"""The application in Ray Serve under load, in a network namespace of its own.

    ip netns exec NAME python -m tests.bei.ray.replicas SCENARIO ARTIFACT OTHER

Engines are slow ones (``stand_ins``). Prints what happened as a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import ray
from ray import serve

from bei.ray import deployment
from tests.bei.ray.stand_ins import SLOW_HOOK

# What takes longer has failed; it is no part of any passing test's time.
_DEADLINE_S = 240.0
_URL = "http://127.0.0.1:8000"
_OPTIONS: dict[str, Any] = {"wait_s": 0.25, "ray_actor_options": {"num_cpus": 0.5}}
# What OpenAI's clients ask again.
_RETRYABLE = (408, 409, 429)
_RETRY_S = 0.1


class Load:
    """Clients that ask one question after the other, each again until it has an answer. ``statuses``: of all
    attempts, by number or by the name of the error; ``norms``: how many answers had vectors of unit length, and how
    many others."""

    def __init__(self) -> None:
        """Nobody asks yet."""
        self.statuses: Counter[str] = Counter()
        self.norms: Counter[str] = Counter()
        self.refused: list[str] = []
        self._is_over = False

    @asynccontextmanager
    async def of(self, num_clients: int) -> AsyncIterator[httpx.AsyncClient]:
        """They ask until the context is left, and have had all their answers then."""
        self._is_over = False
        limits = httpx.Limits(max_connections=num_clients + 4)
        async with httpx.AsyncClient(base_url=_URL, timeout=_DEADLINE_S, limits=limits) as client:
            clients = asyncio.gather(*(self._ask_on(client, number) for number in range(num_clients)))
            try:
                yield client
            finally:
                self._is_over = True
                await clients

    def stop(self) -> None:
        """No further questions."""
        self._is_over = True

    async def _ask_on(self, client: httpx.AsyncClient, number: int) -> None:
        asked = 0
        while not self._is_over:
            asked += 1
            given = [f"{number} {asked} {word} cat the" for word in range(8)]
            while not await self._is_answered(client, {"model": "tiny", "input": given}):
                pass

    async def _is_answered(self, client: httpx.AsyncClient, body: dict[str, Any]) -> bool:
        try:
            answer = await client.post("/v1/embeddings", json=body)
        except httpx.TransportError as error:
            self.statuses[type(error).__name__] += 1
            await asyncio.sleep(_RETRY_S)
            return False
        self.statuses[str(answer.status_code)] += 1
        if answer.status_code == 200:
            vectors = [one["embedding"] for one in answer.json()["data"]]
            assert len(vectors) == len(body["input"])
            self.norms.update("unit" if abs(math.hypot(*vector) - 1) < 1e-3 else "other" for vector in vectors)
            return True
        if answer.status_code < 500 and answer.status_code not in _RETRYABLE:
            self.refused.append(answer.text)
            return True  # it would be refused again
        await asyncio.sleep(_RETRY_S)
        return False


async def follow_the_load(artifact: Path, _: Path) -> dict[str, Any]:
    """32 clients until there are three replicas and for a while then, one client until there is one."""
    _deploy(artifact, max_replicas=3, wait_s=0.1)  # which one client never has waiting, and 32 have on any machine
    load, seen = Load(), [1]
    async with load.of(32):
        await _until(lambda: _running(seen) == 3)
        until = time.monotonic() + 10
        await _until(lambda: _running(seen) != 3 or time.monotonic() > until)  # they stay as long as the load
    async with load.of(1):
        await _until(lambda: _running(seen) == 1)
    return {**_found(load), "replicas": seen}


async def one_is_killed(artifact: Path, _: Path) -> dict[str, Any]:
    """One of two replicas is killed under load; another one takes its place."""
    return await _one_gets(signal.SIGKILL, artifact)


async def one_is_terminated(artifact: Path, _: Path) -> dict[str, Any]:
    """The same with SIGTERM."""
    return await _one_gets(signal.SIGTERM, artifact)


async def _one_gets(number: signal.Signals, artifact: Path) -> dict[str, Any]:
    _deploy(artifact, min_replicas=2, max_replicas=2)
    load = Load()
    async with load.of(8):
        await _until(lambda: sum(load.statuses.values()) > 40)
        before = _processes()
        os.kill(before[0], number)
        await _until(lambda: before[0] not in _processes() and len(_processes()) == 2 and _running() == 2)
        answered = sum(load.statuses.values())
        await _until(lambda: sum(load.statuses.values()) > answered + 40)
    return {**_found(load), "before": len(before), "kept": before[1] in _processes()}


async def another_artifact(artifact: Path, other: Path) -> dict[str, Any]:
    """Another artifact takes the place of the first one behind the same path, with one replica, under load."""
    load, after, replicas = Load(), Load(), [1]
    with TemporaryDirectory() as folder:
        served = Path(folder, "served")
        _deploy(_leading_to(artifact, served))
        async with load.of(8):
            await _until(lambda: sum(load.statuses.values()) > 20)
            update = asyncio.create_task(asyncio.to_thread(_deploy, _leading_to(other, served)))
            await _until(lambda: not _running(replicas) or update.done())
            await update
            await _until(lambda: _running(replicas) == 1)
        async with after.of(1):
            await _until(lambda: sum(after.statuses.values()) > 3)
    return {**_found(load), "after": after.norms, "replicas": replicas}


async def deleted(artifact: Path, _: Path) -> dict[str, Any]:
    """The application is deleted while requests are under way, then Serve is shut down."""
    _deploy(artifact)
    load = Load()
    async with load.of(8):
        await _until(lambda: sum(load.statuses.values()) > 20)
        load.stop()  # those that are under way are the last ones
        await asyncio.to_thread(serve.delete, "default")
    return _found(load)


async def several_models(artifact: Path, other: Path) -> dict[str, Any]:
    """Two models behind one ingress, and a second application with a prefix of its own beside it."""
    two = deployment(str(artifact), str(other), **_OPTIONS)
    serve.run(two)
    serve.run(deployment(str(other), **_OPTIONS), name="second", route_prefix="/second")
    async with httpx.AsyncClient(base_url=_URL, timeout=_DEADLINE_S) as client:

        async def norm(model: str, prefix: str = "") -> float | str:
            answer = await client.post(f"{prefix}/v1/embeddings", json={"model": model, "input": "cat"})
            body = answer.json()
            return math.hypot(*body["data"][0]["embedding"]) if answer.status_code == 200 else body["error"]["code"]

        ready = await client.get("/ready", headers={"x-request-id": "mine"})
        return {
            "models": sorted(one["id"] for one in (await client.get("/v1/models")).json()["data"]),
            "second": [one["id"] for one in (await client.get("/second/v1/models")).json()["data"]],
            "norms": [await norm("tiny"), await norm("other"), await norm("other", "/second")],
            "unknown": await norm("neither"),
            "ready": ready.status_code,
            "ids": ready.headers.get_list("x-request-id"),
            "no_route": (await client.get("/no-such-route")).json()["error"]["code"],
        }


def _leading_to(artifact: Path, link: Path) -> Path:
    link.unlink(missing_ok=True)
    link.symlink_to(artifact)
    return link


def _deploy(artifact: Path, **options: Any) -> None:
    serve.run(deployment(str(artifact), **{**_OPTIONS, **options}))


def _found(load: Load) -> dict[str, Any]:
    return {"statuses": load.statuses, "norms": load.norms, "refused": load.refused[:3]}


def _running(seen: list[int] | None = None) -> int:
    """How many replicas there are; ``seen`` gets each number that differs from its last one."""
    states = serve.status().applications["default"].deployments["bei"].replica_states
    number: int = states.get("RUNNING", 0)
    if seen is not None and seen[-1] != number:
        seen.append(number)
    return number


def _processes() -> list[int]:
    """Of the replicas: those of this network namespace, which other clusters of the machine have not."""
    here, found = Path("/proc/self/ns/net").readlink(), []
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or is no process
            title = (process / "cmdline").read_bytes()
            if title.startswith(b"ray::ServeReplica:default:bei") and (process / "ns/net").readlink() == here:
                found.append(int(process.name))
    return sorted(found)


async def _until(is_reached: Callable[[], bool]) -> None:
    until = time.monotonic() + _DEADLINE_S
    while not await asyncio.to_thread(is_reached):
        assert time.monotonic() < until, "it has taken too long"
        await asyncio.sleep(0.25)


def main(scenario: str, artifact: Path, other: Path) -> dict[str, Any]:
    ray.init(
        num_cpus=4,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": SLOW_HOOK},
    )
    try:
        found: dict[str, Any] = asyncio.run(_SCENARIOS[scenario](artifact, other))
        return found
    finally:
        serve.shutdown()
        ray.shutdown()


_SCENARIOS = {
    one.__name__: one
    for one in (follow_the_load, one_is_killed, one_is_terminated, another_artifact, deleted, several_models)
}

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(Path, sys.argv[2:4]))))  # noqa: T201
