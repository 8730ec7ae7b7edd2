"""Batches of a server with two front ends: one runs them, and the other goes on when it dies."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.e2e.swapping_server import save_build

pytestmark = pytest.mark.slow

NUM_LINES = 6_000


def fronts(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.pid).children()
    return [process for process in children if process.cmdline()[-1].startswith("front-")]


def holder(server: Server, lock: Path) -> psutil.Process | None:
    """The front end that holds the lock."""
    inode = str(lock.stat().st_ino)
    pids = {int(line.split()[4]) for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line}
    return next((process for process in fronts(server) if process.pid in pids), None)


def test_another_front_end_goes_on_when_the_one_that_runs_a_batch_dies(tmp_path: Path, env: Mapping[str, str]) -> None:
    artifact = save_build(tmp_path / "fake", 1).path
    flags = ("--http-workers", "2", "--batch-dir", tmp_path / "batches", "--tokenizer-threads", "2")
    command = [sys.executable, "-m", "tests.e2e.processes_server", artifact, *flags]
    with Server(command, env, tmp_path) as server, httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        lines = (
            {"custom_id": f"c{n}", "method": "POST", "url": "/embed", "body": {"inputs": f"hello {n}"}}
            for n in range(NUM_LINES)
        )
        content = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        file = client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/embed", "completion_window": "24h"}
        path = f"/v1/batches/{client.post('/v1/batches', json=asked).json()['id']}"

        def batch() -> dict[str, object]:
            found: dict[str, object] = httpx.get(server.url + path, timeout=DEADLINE_S).json()
            return found

        for status in ("in_progress", "completed"):  # the second time it may have ended
            wait_until(lambda: holder(server, tmp_path / "batches" / "lock") is not None, "a front end runs batches")
            wait_until(lambda: batch()["status"] != "validating", "lines are answered")
            process = holder(server, tmp_path / "batches" / "lock")
            assert process is not None
            assert batch()["status"] in ("in_progress", status)
            process.kill()
            wait_until(lambda process=process: not process.is_running(), "it is gone")  # type: ignore[misc]
            wait_until(lambda: len(fronts(server)) == 2, "another one takes its place")
        wait_until(lambda: batch()["status"] == "completed", "the batch ends")
        done = batch()
        assert done["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        text = client.get(f"/v1/files/{done['output_file_id']}/content").text
        assert [json.loads(line)["custom_id"] for line in text.splitlines()] == [f"c{n}" for n in range(NUM_LINES)]
