"""Clusters of Ray on this machine, in a network namespace of their own: Ray listens on addresses that others reach.

    ip netns exec NAME python -m tests.bei.ray.cluster SCENARIO ARTIFACT ROWS FOLDER

Prints what happened as a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ray
from ray import serve
from ray.cluster_utils import Cluster as LocalCluster

from bei.bulk.run import JobOptions, JobProgress, opened_source
from bei.bulk.sources.rows import Columns
from bei.config.settings import ServeConfig
from bei.ray.jobs import Cluster, run_on_ray

_NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
_CONFIG = ServeConfig(tune="off", tokenizer_threads=1)


def job_with_a_node_killed(artifact: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """A job on two nodes, of which one is killed when three shards are done."""
    cluster = LocalCluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
    other = cluster.add_node(**_NODE)
    seen: list[JobProgress] = []

    def tell(progress: JobProgress) -> None:
        seen.append(progress)
        if progress.shards_done == 3:
            threading.Thread(target=cluster.remove_node, args=(other, False)).start()

    try:
        options = _options(rows, folder / "out")
        with opened_source(options) as source:
            done = run_on_ray(source, artifact, options, _CONFIG, Cluster(cluster.address), tell)
        return dict(msgspec.to_builtins(done))
    finally:
        cluster.shutdown()


def job_with_its_driver_killed(artifact: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """A job whose driver is killed when two shards are done, and started again on the same cluster."""
    cluster = LocalCluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 2, "include_dashboard": False})
    command = [sys.executable, "-m", "bei", "embed", artifact, "--input", rows, "--output", folder / "out"]
    command += ["--id-column", "id", "--shard-rows", "10", "--ray", cluster.address, "--json"]
    try:
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                if json.loads(line)["shards_done"] >= 2:
                    driver.kill()
        assert driver.returncode == -signal.SIGKILL
        done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        cluster.shutdown()


def replicas_under_load(artifact: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """The application in Ray Serve: more replicas under load, one of them killed, an answer to every client."""
    from bei.ray import deployment

    ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    cache = str(folder / "cache")
    options = {"num_cpus": 0.5}
    application = deployment(str(artifact), max_replicas=2, wait_s=0.0005, ray_actor_options=options, cache_dir=cache)
    serve.run(application)
    try:
        return asyncio.run(_asked())
    finally:
        serve.shutdown()
        ray.shutdown()


async def _asked() -> dict[str, Any]:
    statuses: Counter[str] = Counter()
    replicas: set[int] = set()
    until = time.monotonic() + 30
    async with httpx.AsyncClient(base_url="http://127.0.0.1:8000", timeout=60) as client:
        ready = await client.get("/ready", headers={"x-request-id": "mine"})

        async def ask(number: int) -> None:
            while time.monotonic() < until:
                body = {"input": [f"{number} {word} cat the" for word in range(40)]}
                try:
                    answer = await client.post("/v1/embeddings", json=body)
                    statuses[str(answer.status_code)] += 1
                except httpx.TransportError as error:
                    statuses[type(error).__name__] += 1

        async def watch() -> None:
            while time.monotonic() < until:
                found = (await asyncio.to_thread(serve.status)).applications["default"].deployments["bei"]
                replicas.add(found.replica_states.get("RUNNING", 0))
                await asyncio.sleep(1)

        await asyncio.gather(watch(), *(ask(number) for number in range(16)))
        missing = await client.get("/no-such-route")
    return {
        "ready": ready.status_code,
        "ids": ready.headers.get_list("x-request-id"),
        "statuses": statuses,
        "replicas": sorted(replicas),
        "error": missing.json(),
    }


def _options(rows: Path, output: Path) -> JobOptions:
    return JobOptions((str(rows),), str(output), columns=Columns(id="id"), shard_rows=10)


if __name__ == "__main__":
    scenario = {one.__name__: one for one in (job_with_a_node_killed, job_with_its_driver_killed, replicas_under_load)}[
        sys.argv[1]
    ]
    found = scenario(*map(Path, sys.argv[2:5]))
    print(json.dumps(found))  # noqa: T201
