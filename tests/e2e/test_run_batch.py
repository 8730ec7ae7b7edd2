"""``bei run-batch`` as a process that is killed in the middle, again and again, and stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.process import DEADLINE_S, wait_until
from tests.support.artifacts import save_artifact

NUM_LINES = 400


class Runs:
    """The command over one input, started as often as asked."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self._env = folder, env
        self._artifact = save_artifact(folder / "fake")
        self.output = folder / "out.jsonl"
        lines = ({"custom_id": f"c{n}", "method": "POST", "url": "/embed", "body": body(n)} for n in range(NUM_LINES))
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, **variables: str) -> subprocess.Popen[str]:
        """A process of its own."""
        files = ("-i", "in.jsonl", "-o", "out.jsonl", self._artifact.path)
        command = [sys.executable, "-m", "tests.e2e.batch_process", "run-batch", *map(str, files)]
        env = {**self._env, **variables}
        return subprocess.Popen(command, env=env, cwd=self.folder, stderr=subprocess.PIPE, text=True)

    @property
    def size(self) -> int:
        """Bytes of the answers so far."""
        return self.output.stat().st_size if self.output.exists() else 0

    def has_grown(self, before: int) -> bool:
        """True once there are more bytes of answers."""
        return self.size > before

    def ids(self, name: str) -> list[str]:
        """Of a file's lines."""
        return [json.loads(line)["custom_id"] for line in (self.folder / name).read_text().splitlines()]


def body(number: int) -> dict[str, object]:
    """Every tenth is wrong."""
    return {"inputs": f"hello {number}" if number % 10 else ""}


@pytest.fixture
def runs(tmp_path: Path, env: Mapping[str, str]) -> Runs:
    return Runs(tmp_path, env)


@pytest.mark.parametrize("checkpoint_s", ["3600", pytest.param("0", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_at_any_point_answers_every_line_once_in_the_end(runs: Runs, checkpoint_s: str) -> None:
    for _ in range(2):
        before = runs.size
        with runs.start(CHECKPOINT_S=checkpoint_s) as process:
            wait_until(partial(runs.has_grown, before if checkpoint_s == "0" else 0), "answers")
            process.kill()
    with runs.start() as process:
        assert process.wait(DEADLINE_S) == 1
    good, bad = runs.ids("out.jsonl"), runs.ids("out.errors.jsonl")
    assert good == [f"c{number}" for number in range(NUM_LINES) if number % 10]
    assert bad == [f"c{number}" for number in range(0, NUM_LINES, 10)]


@pytest.mark.slow
def test_a_run_that_is_stopped_ends_what_is_under_way_and_says_so(runs: Runs) -> None:
    with runs.start() as process:
        wait_until(lambda: runs.size > 0, "answers")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert "Stopped: the same command goes on." in process.stderr.read()
    done = len(runs.ids("out.jsonl"))
    assert 0 < done < NUM_LINES * 9 // 10
    assert runs.ids("out.jsonl") == [f"c{number}" for number in range(NUM_LINES) if number % 10][:done]
