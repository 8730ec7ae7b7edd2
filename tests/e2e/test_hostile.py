"""Artifacts and checkpoints made to do harm, in real processes: one line, exit code 2, within 5 s and 1 GB.

All of them in the second tier; a few, of each way to be refused, in every run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e import measured
from tests.support import hostile_artifacts, hostile_checkpoints
from tests.support.artifacts import save_artifact

MOST_S = 5.0  # of CPU
MOST_BYTES = 1_000_000_000

FEW_ARTIFACTS = ("path '../outside'", "manifest of 2 GB", "weights beside the engine", "tokenizer nested deep")
FEW_CHECKPOINTS = ("10^9 layers", "module: ..", "header: 2^63 bytes", "shard: ..")


def tiers(names: Mapping[str, object], few: tuple[str, ...]) -> list[object]:
    assert set(few) <= names.keys()
    return [pytest.param(name, marks=() if name in few else pytest.mark.slow) for name in names]


def is_in_time(cpu_s: float) -> bool:
    """Whether ``cpu_s`` are less than MOST_S. On a busy machine importing transformers and torch alone takes more than
    4 s: then it is not counted."""
    if cpu_s < MOST_S:
        return True
    before = os.times().children_user
    subprocess.run([sys.executable, "-c", "from transformers import CONFIG_MAPPING"], check=True)
    return cpu_s < MOST_S + os.times().children_user - before


def refused(ended: measured.Ended, message: str) -> None:
    """The command has ended as it should."""
    assert ended.returncode == 2, ended.said
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: "), ended.said
    assert re.search(message, line), ended.said
    assert is_in_time(ended.cpu_s), ended.said
    assert ended.peak_bytes < MOST_BYTES, ended.said


@pytest.mark.parametrize("name", tiers(hostile_artifacts.HOSTILE, FEW_ARTIFACTS))
def test_a_hostile_artifact(name: str, env: Mapping[str, str], tmp_path: Path) -> None:
    hostile = hostile_artifacts.HOSTILE[name]
    path = save_artifact(tmp_path / "artifact").path
    hostile.spoil(path)
    # A folder without a manifest is a checkpoint to bei serve.
    commands = {hostile.command, "serve" if name == "weights beside the engine" else hostile.command}
    for command in sorted(commands):
        refused(measured.run([command, path], env, tmp_path), hostile.message)


@pytest.mark.parametrize("name", tiers(hostile_checkpoints.HOSTILE, FEW_CHECKPOINTS))
def test_a_hostile_checkpoint(name: str, checkpoint: Path, env: Mapping[str, str], tmp_path: Path) -> None:
    hostile = hostile_checkpoints.HOSTILE[name]
    folder = hostile_checkpoints.save_good(checkpoint, tmp_path / "checkpoint")
    hostile.spoil(folder)
    (tmp_path / "cwd").mkdir()
    ended = measured.run(["build", folder, "--precision", "fp32"], env, tmp_path / "cwd")
    refused(ended, hostile.message)
    assert not (tmp_path / hostile_checkpoints.EXECUTED).exists()
    assert not [path for path in (tmp_path / "cwd").iterdir() if path.is_dir()]  # it leaves nothing behind


def test_a_hostile_checkpoint_is_refused_by_serve_too(checkpoint: Path, env: Mapping[str, str], tmp_path: Path) -> None:
    hostile = hostile_checkpoints.HOSTILE["10^9 layers"]
    folder = hostile_checkpoints.save_good(checkpoint, tmp_path / "checkpoint")
    hostile.spoil(folder)
    ended = measured.run(["serve", folder, "--cache-dir", tmp_path / "cache"], env, tmp_path)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.said
    assert re.search(hostile.message, ended.stderr.splitlines()[-1])  # behind a note that it is built
    assert is_in_time(ended.cpu_s), ended.said
    assert ended.peak_bytes < MOST_BYTES


def test_a_measured_process_is_what_it_says(env: Mapping[str, str], tmp_path: Path) -> None:
    ended = measured.run(["--version"], env, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("bei ")
    assert 1_000_000 < ended.peak_bytes < MOST_BYTES
