"""Jobs in which something does not return end with a line, and go on with the same command."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import bei.bulk.watchdog
from bei.artifact.manifest import Artifact
from bei.bulk.parts import SUCCESS
from bei.bulk.watchdog import Watchdog, watched, watched_store
from bei.errors import JobError
from tests.bei.bulk.conftest import digests, save_rows
from tests.bei.offline.given import texts
from tests.support.engines import DEADLINE_S

_HANG_TIMEOUT_S = 2.0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[JobError]:
    monkeypatch.setattr(bei.bulk.watchdog, "_WATCH_EVERY_S", 0.01)
    return []


def test_a_call_that_does_not_end_is_named(seen: list[JobError]) -> None:
    has_ended = threading.Event()

    def end(error: JobError) -> None:
        seen.append(error)
        has_ended.set()

    with Watchdog(0.05, end), watched("The engine has been in a step", 0.01):
        assert has_ended.wait(DEADLINE_S)
    assert str(seen[0]).startswith("The engine has been in a step for 0 s. The job ends here")


def test_calls_have_the_time_that_is_predicted_and_stores_more(seen: list[JobError]) -> None:
    with Watchdog(0.01, seen.append):
        with watched("a step", 1.0), watched_store("s3://bucket", 1_000_000):
            time.sleep(0.2)
        for _ in range(20):  # none of them takes long
            with watched("a step", 0.0):
                time.sleep(0.005)
    with Watchdog(0.0, seen.append), watched("a step", 0.0):
        time.sleep(0.05)
    assert seen == []


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("engine", "The engine has been in a step of"),
        pytest.param("read", "rows.parquet has not answered", marks=pytest.mark.slow),
        pytest.param("write", "out has not answered", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_hangs_ends_with_a_line_and_goes_on_with_the_same_command(
    what: str, named: str, artifact: Artifact, tmp_path: Path
) -> None:
    save_rows(tmp_path / "rows.parquet", texts(50))

    def run(what: str, output: str) -> subprocess.CompletedProcess[str]:
        given = ["embed", artifact.path, "--input", tmp_path / "rows.parquet", "--output", tmp_path / output]
        given += ["--hang-timeout", _HANG_TIMEOUT_S, "--shard-rows", 10]
        return _ran(what, *map(str, given))

    hung = run(what, "out")
    assert hung.returncode == 2
    (line,) = hung.stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert "the same command goes on" in line
    assert not (tmp_path / "out" / SUCCESS).exists()
    assert run("nothing", "out").returncode == 0
    assert run("nothing", "whole").returncode == 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.slow
def test_a_batch_whose_engine_hangs_gets_another_one_or_ends_with_a_line_and_goes_on_with_the_same_command(
    artifact: Artifact, tmp_path: Path
) -> None:
    bodies = [{"model": "tiny", "input": text} for text in texts(12)]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body})
        for number, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))

    def run(what: str, output: str) -> subprocess.CompletedProcess[str]:
        given = ["run-batch", "-i", tmp_path / "in.jsonl", "-o", tmp_path / output, artifact.path]
        return _ran(what, *map(str, given), "--hang-timeout", str(_HANG_TIMEOUT_S), "--tune", "off")

    replaced = run("engine", "replaced.jsonl")
    assert replaced.returncode == 0
    assert "the engine is replaced" in replaced.stderr
    hung = run("engine-of-a-gpu", "out.jsonl")
    assert hung.returncode == 2
    assert "the same command goes on" in hung.stderr.splitlines()[-1]
    assert run("nothing", "out.jsonl").returncode == 0
    for output in ("replaced", "out"):
        answers = [json.loads(line) for line in (tmp_path / f"{output}.jsonl").read_text().splitlines()]
        assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(12)]
        assert not (tmp_path / f"{output}.errors.jsonl").exists()


def _ran(what: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.bei.bulk.hanging", what, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
