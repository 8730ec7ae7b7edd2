"""Commands on a disk that is full: they say so, with the path, and leave nothing half-written."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from tests.e2e.process import BEI, DEADLINE_S
from tests.support.keys import make_keys

# A mount of its own, which ends with the process. What is left on the disk is listed at the end of stdout.
_ON_SMALL_DISK = 'mount -t tmpfs -o size="$1" tmpfs "$2" && cd "$2" && sh -c "$3"; code=$?; find . -type f; exit $code'


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _can_mount(), reason="needs a mount namespace of its own")


def on_small_disk(size: str, script: str, env: Mapping[str, str], folder: Path) -> tuple[str, str, list[str]]:
    """Run ``script`` in a file system of ``size``; returns its last line on stderr, its folder, and the files left."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["unshare", "-rm", "sh", "-c", _ON_SMALL_DISK, "sh", size, str(disk), script]
    ended = subprocess.run(
        command, env=dict(env), cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    left = sorted(line for line in ended.stdout.splitlines() if line.startswith("."))
    return ended.stderr.splitlines()[-1], str(disk), left


# While the tokenizer, the engine, the reference is written.
@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in ("40k", "300k")), "440k"])
def test_a_build_says_that_the_disk_is_full_and_leaves_nothing(
    size: str, checkpoint: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    script = f"{' '.join(BEI)} build {checkpoint} --out out --precision fp32 --reference engine"
    line, disk, left = on_small_disk(size, script, env, tmp_path)
    assert line.startswith(f"error: The disk of {disk} is full: free space there")
    assert left == []


def test_a_server_that_builds_says_that_its_cache_is_full(
    checkpoint: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    script = f"{' '.join(BEI)} serve {checkpoint} --port 0 --precision fp32 --cache-dir cache"
    line, disk, left = on_small_disk("100k", script, env, tmp_path)
    assert line.startswith(f"error: The disk of {disk}/cache is full: free space there")
    assert [name for name in left if not name.endswith((".used", ".lock"))] == []


def test_a_signature_is_written_whole_or_not_at_all(tiny: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    key = make_keys(tmp_path).private
    fill = "cat /dev/zero > filled 2> /dev/null"
    script = f"cp -r {tiny.path} tiny; {fill}; {' '.join(BEI)} sign tiny --key {key}"
    line, _, left = on_small_disk("2m", script, env, tmp_path)
    assert line.startswith("error: The disk of tiny is full: free space there")
    assert not any("signature" in name for name in left)


@pytest.mark.parametrize("flag", ["--json", "--write-trace"])
def test_results_are_written_whole_or_not_at_all(flag: str, env: Mapping[str, str], tmp_path: Path) -> None:
    fill = "cat /dev/zero > filled 2> /dev/null"
    script = f"{fill}; {' '.join(BEI)} simulate --seconds 2 --policies bei {flag} result"
    line, disk, left = on_small_disk("100k", script, env, tmp_path)
    assert line.startswith(f"error: The disk of {disk} is full: free space there")
    assert left == ["./filled"]


def test_output_that_cannot_be_written_is_an_error_line(tiny: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [*BEI, "inspect", str(tiny.path)]
        ended = subprocess.run(command, env=dict(env), cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 2
    assert ended.stderr.decode().splitlines() == ["error: [Errno 28] No space left on device"]
