"""``bei embed`` on MiniLM's weights over sentences of a corpus: however it is ended and divided, the same bytes.

    BEITEST_ROWS=200000 pytest -m slow tests/real/test_long_job.py

Each of these tests computes all rows once; of 20,000 rows unless the variable says otherwise. ``tests/bei/bulk`` ends
jobs at every call that changes a disk, over an engine that takes no time.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.texts import Words, read_prose
from tests.bei.bulk.conftest import bucket, digests
from tests.e2e.process import BEI, environment
from tests.e2e.test_full_disk import _can_mount

__all__ = ["bucket"]  # a fixture

pytestmark = pytest.mark.slow

NUM_ROWS = int(os.environ.get("BEITEST_ROWS", "20000"))
NUM_SHARDS = 20
NUM_KILLS = 5
SENTENCES = Words(8, 0.5, 60)  # about 13 tokens with the special ones
DEADLINE_S = 60 + NUM_ROWS / 20


class LongJob(NamedTuple):
    """``whole_s``: the time that an undisturbed process took, of which ``files`` are the digests."""

    artifact: Path
    source: Path
    output: Path
    env: Mapping[str, str]
    whole_s: float
    files: Mapping[str, str]

    def command(self, output: object, *flags: str, source: Path | None = None) -> list[str]:
        """For this job's rows, and its shards."""
        given = ["--input", str(source or self.source), "--id-column", "id", "--output", str(output)]
        return [*BEI, "embed", str(self.artifact), *given, "--shard-rows", str(NUM_ROWS // NUM_SHARDS), *flags]

    def finish(self, output: object, *flags: str, source: Path | None = None) -> str:
        """Run it to its end; what it says there."""
        command = self.command(output, *flags, source=source)
        ended = subprocess.run(
            command, env={**self.env}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    def kill_at_random(self, output: object, seed: int, source: Path | None = None) -> None:
        """Begin it ``NUM_KILLS`` times, and kill it at any moment in or between its next few shards."""
        moments = random.Random(seed)
        for _ in range(NUM_KILLS):
            command = self.command(output, "--json", source=source)
            with subprocess.Popen(command, env={**self.env}, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                for _ in range(1 + moments.randrange(NUM_SHARDS // NUM_KILLS - 1)):
                    child.stdout.readline()  # at the start, and after each shard
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(moments.uniform(0.0, self.whole_s / NUM_SHARDS))
                assert child.poll() is None
                child.kill()


def ran(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**env}, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, bucket: str) -> LongJob:
    try:
        texts = read_prose().take(NUM_ROWS, SENTENCES)
    except SystemExit as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("long")
    artifact = built(minilm_folder(), folder).path
    save(folder / "rows.parquet", [*texts])
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    job = LongJob(artifact, folder / "rows.parquet", folder / "whole", environment(folder, **store), 0.0, {})
    began = time.monotonic()
    job.finish(job.output)
    return job._replace(whole_s=time.monotonic() - began, files=digests(job.output))


def save(path: Path, texts: list[str | None]) -> None:
    """A Parquet file of them, with an id each."""
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)


def test_a_job_that_is_killed_at_five_moments_writes_the_same_bytes(job: LongJob, tmp_path: Path) -> None:
    assert len(job.files) == NUM_SHARDS + 2  # the plan, and the mark of its end
    job.kill_at_random(tmp_path / "out", seed=1)
    assert "shards were done before" in job.finish(tmp_path / "out")
    assert digests(tmp_path / "out") == job.files


def test_so_does_one_whose_output_is_a_bucket(job: LongJob, bucket: str, tmp_path: Path) -> None:
    output = f"{bucket}/killed"
    job.kill_at_random(output, seed=2)
    assert "shards were done before" in job.finish(output)
    files = s3fs.S3FileSystem()
    files.invalidate_cache()
    files.get(output, str(tmp_path / "fetched"), recursive=True)
    assert digests(tmp_path / "fetched") == job.files


def test_three_processes_with_a_third_each_and_a_fourth_with_one_of_these_write_the_same_bytes(
    job: LongJob, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    children = [subprocess.Popen(job.command(output, "--shard", f"{part}/3"), env={**job.env}) for part in (0, 1, 2, 1)]
    assert [child.wait(DEADLINE_S) for child in children] == [0, 0, 0, 0]
    assert digests(output) == job.files


@pytest.mark.skipif(not _can_mount(), reason="needs a mount namespace of its own")
def test_a_disk_that_fills_up_ends_it_with_one_line_and_room_there_lets_it_go_on(job: LongJob, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in job.output.iterdir())
    again = '"$@"; echo $?'
    script = f"""
        mount -t tmpfs -o size={size // 2} tmpfs {disk} && {again}
        mount -o remount,size={size * 2} {disk} && {again} && cp -r {disk}/out {tmp_path}/out
    """
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *job.command(disk / "out")]
    ended = ran(command, job.env)
    assert ended.stdout.split() == ["2", "0"], ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert error.startswith(f"error: The disk of {disk}/out is full"), error
    assert "Traceback" not in ended.stderr
    assert digests(tmp_path / "out") == job.files


def test_one_bad_row_in_a_hundred_is_told_and_the_others_have_their_vectors(job: LongJob, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.parquet", tmp_path / "out"
    texts = pq.read_table(job.source)["text"].to_pylist()
    bad = [*range(0, NUM_ROWS, 100)]
    for number, place in enumerate(bad):
        texts[place] = None if number % 2 else ""
    save(source, texts)
    job.kill_at_random(output, seed=3, source=source)
    said = job.finish(output, source=source)
    assert f"Rows without an answer: {len(bad):,};" in said
    told = [line for path in sorted((output / "_dead").iterdir()) for line in path.read_text().splitlines()]
    assert len(told) == len(bad)
    found, whole = pq.read_table(output), pq.read_table(job.output)
    assert found["id"].to_pylist() == [*np.delete(np.arange(NUM_ROWS), bad)]
    cosines = np.sum(np.delete(vectors(whole), bad, axis=0) * vectors(found), axis=1)
    assert cosines.min() > 0.999  # other neighbours in a step: another rounding


def vectors(table: pa.Table) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Of unit length."""
    flat = table["embedding"].combine_chunks().flatten().to_numpy()
    found: np.ndarray[tuple[int, int], np.dtype[np.float32]] = flat.reshape(table.num_rows, -1)
    return found
