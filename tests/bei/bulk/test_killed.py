"""Jobs whose processes are killed: the output is that of a job that was not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from tests.bei.bulk.conftest import save_rows
from tests.bei.offline.given import texts


@pytest.mark.parametrize(
    ("form", "every"),
    [
        ("parquet", 7),
        *(pytest.param(form, 1, marks=pytest.mark.slow) for form in ("parquet", "jsonl", "npy")),
        pytest.param(
            "lance", 3, marks=pytest.mark.slow
        ),  # each process loads it, and its scratch files have points too
    ],
)
def test_a_job_killed_at_any_step_and_run_again_writes_the_same_bytes(
    form: str, every: int, artifact: Artifact, tmp_path: Path
) -> None:
    save_rows(tmp_path / "rows.parquet", ["", *texts(24)])
    given = [artifact.path, tmp_path / "rows.parquet", tmp_path, form, every]
    command = [sys.executable, "-m", "tests.bei.bulk.killed", *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["left"] == 0
    assert found["points"] > 25
