"""Batches on a disk that is really full: a command that goes on when there is room, a server that goes on at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.e2e.test_full_disk import _can_mount
from tests.support.artifacts import save_artifact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _can_mount(), reason="needs a mount namespace of its own"),
]

NUM_LINES = 600


def lines() -> bytes:
    asked = (
        {"custom_id": f"c{n}", "method": "POST", "url": "/embed", "body": {"inputs": f"hello {n}"}}
        for n in range(NUM_LINES)
    )
    return b"".join(json.dumps(one).encode() + b"\n" for one in asked)


def on_small_disk(disk: Path, script: str, *arguments: object) -> list[str]:
    """A command that runs ``script`` with a file system of 200 kB at ``disk``, of which it takes 100 kB at once."""
    disk.mkdir()
    mounted = f"mount -t tmpfs -o size=200k tmpfs {disk} && head -c 100000 /dev/zero > {disk}/filled && {script}"
    return ["unshare", "-rm", "sh", "-c", mounted, "sh", *map(str, arguments)]


def test_a_run_says_that_the_disk_is_full_and_goes_on_when_there_is_room(
    tmp_path: Path, env: Mapping[str, str]
) -> None:
    artifact, disk = save_artifact(tmp_path / "fake").path, tmp_path / "disk"
    (tmp_path / "in.jsonl").write_bytes(lines())
    run = f"{sys.executable} -m tests.e2e.batch_process run-batch -i in.jsonl -o {disk}/out.jsonl {artifact}"
    script = f"{run}; echo $?; rm {disk}/filled; mount -o remount,size=2m {disk}; {run}; echo $?; cp {disk}/out.jsonl ."
    ended = subprocess.run(
        on_small_disk(disk, script),
        env={**env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert ended.stdout.split() == ["2", "0"], ended.stderr
    assert f"error: The disk of {disk} is full: free space there" in ended.stderr
    assert "Traceback" not in ended.stderr
    found = [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == [f"c{n}" for n in range(NUM_LINES)]


def test_a_batch_fails_and_the_server_goes_on(tmp_path: Path, env: Mapping[str, str]) -> None:
    artifact, disk = save_artifact(tmp_path / "fake").path, tmp_path / "disk"
    script = f'exec {sys.executable} -m tests.e2e.batch_process serve "$@"'
    flags = (artifact, "--port", 0, "--tokenizer-threads", 1, "--batch-dir", disk)
    with Server(on_small_disk(disk, script, *flags), env, tmp_path) as server:

        def asked(content: bytes) -> httpx.Response:
            files = {"file": ("in.jsonl", content)}
            return httpx.post(f"{server.url}/v1/files", files=files, data={"purpose": "batch"}, timeout=DEADLINE_S)

        def batch(content: bytes) -> dict[str, str]:
            fields = {"input_file_id": asked(content).json()["id"], "endpoint": "/embed", "completion_window": "24h"}
            made = httpx.post(f"{server.url}/v1/batches", json=fields, timeout=DEADLINE_S).json()
            path = f"{server.url}/v1/batches/{made['id']}"
            wait_until(lambda: httpx.get(path).json()["status"] in ("completed", "failed"), "it ends")
            found: dict[str, str] = httpx.get(path).json()
            return found

        failed = batch(lines()[:30_000].rpartition(b"\n")[0])
        assert failed["status"] == "failed", failed
        assert "disk_full" in json.dumps(failed["errors"])
        refused = asked(b"x" * 150_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
        deleted = httpx.delete(f"{server.url}/v1/files/{failed['input_file_id']}", timeout=DEADLINE_S)
        assert deleted.status_code == 200
        assert batch(lines()[:500].rpartition(b"\n")[0])["status"] == "completed"
        assert server.embed("hello").status_code == 200
