"""Clusters of Ray on this machine, in a network namespace of their own: Ray listens on addresses that others reach.

    ip netns exec NAME python -m tests.bei.ray.cluster SCENARIO ARTIFACT ROWS FOLDER

Prints what happened as a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.cluster_utils import Cluster as LocalCluster

from bei.bulk.run import JobOptions, JobProgress, opened_source
from bei.bulk.sources.rows import Columns
from bei.config.settings import ServeConfig
from bei.ray.jobs import Cluster, run_on_ray
from tests.bei.ray.stand_ins import HANGING_HOOK, HAS_HUNG

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
    return _job_with_two_drivers(signal.SIGKILL, artifact, rows, folder)


def job_with_its_driver_terminated(artifact: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """The same with SIGTERM, which schedulers send first."""
    return _job_with_two_drivers(signal.SIGTERM, artifact, rows, folder)


def _job_with_two_drivers(end: signal.Signals, artifact: Path, rows: Path, folder: Path) -> dict[str, Any]:
    cluster = LocalCluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 2, "include_dashboard": False})
    command = [sys.executable, "-m", "bei", "embed", artifact, "--input", rows, "--output", folder / "out"]
    command += ["--id-column", "id", "--shard-rows", "10", "--ray", cluster.address, "--json"]
    try:
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                if json.loads(line)["shards_done"] == 2:
                    driver.send_signal(end)
        # Ray ends a driver that gets SIGTERM with the signal's number as its exit code.
        assert driver.returncode in (-end, end)
        done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        cluster.shutdown()


def job_with_a_worker_that_hangs(artifact: Path, rows: Path, folder: Path) -> dict[str, Any]:
    """A job on two nodes, of whose engines one hangs."""
    os.environ[HAS_HUNG] = str(folder / "has_hung")
    os.environ[RAY_JOB_CONFIG_JSON_ENV_VAR] = json.dumps({"runtime_env": {"worker_process_setup_hook": HANGING_HOOK}})
    cluster = LocalCluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
    cluster.add_node(**_NODE)
    options, config = _options(rows, folder / "out"), dataclasses.replace(_CONFIG, hang_timeout=3.0)
    try:
        with opened_source(options) as source:
            done = run_on_ray(source, artifact, options, config, Cluster(cluster.address), lambda _: None)
        return {**msgspec.to_builtins(done), "has_hung": (folder / "has_hung").exists()}
    finally:
        cluster.shutdown()


def _options(rows: Path, output: Path) -> JobOptions:
    return JobOptions((str(rows),), str(output), columns=Columns(id="id"), shard_rows=10)


if __name__ == "__main__":
    scenarios = (
        *(job_with_a_node_killed, job_with_a_worker_that_hangs),
        *(job_with_its_driver_killed, job_with_its_driver_terminated),
    )
    scenario = {one.__name__: one for one in scenarios}[sys.argv[1]]
    found = scenario(*map(Path, sys.argv[2:5]))
    print(json.dumps(found))  # noqa: T201
