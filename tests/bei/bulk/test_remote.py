"""Jobs whose input and output are objects of a bucket."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import s3fs

from bei.bulk.folder import RemoteJobFolder
from bei.bulk.parts import SUCCESS
from bei.errors import JobDiffersError, JobError
from tests.bei.bulk.conftest import RunJob, digests, save_rows
from tests.bei.offline.given import texts


def _fetched(url: str, folder: Path) -> dict[str, str]:
    files = s3fs.S3FileSystem()
    files.invalidate_cache()
    files.get(url, str(folder), recursive=True)
    return digests(folder)


class _EndedError(Exception):
    """In place of the end of the process."""


def test_a_job_on_a_bucket_that_is_ended_at_any_object_writes_the_same_bytes_as_one_on_a_disk(
    bucket: str, rows: Path, run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    source, output = f"{bucket}/{tmp_path.name}-in/rows.parquet", f"{bucket}/{tmp_path.name}-out"
    s3fs.S3FileSystem().put_file(str(rows), source)
    commit, left = RemoteJobFolder.commit, 0

    def commits(folder: RemoteJobFolder, name: str, content: bytes | memoryview) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _EndedError
        commit(folder, name, content)

    monkeypatch.setattr(RemoteJobFolder, "commit", commits)
    for point in range(3):
        left = point
        with pytest.raises(_EndedError):
            run(inputs=(source,), output=output)
    left = 1000
    run(inputs=(source,), output=output)
    assert _fetched(output, tmp_path / "fetched") == digests(tmp_path / "out") | _fetched_plan(tmp_path)


def _fetched_plan(folder: Path) -> dict[str, str]:
    """The plan has the stamps of its own input's files, and is of the same digest otherwise."""
    return {name: value for name, value in digests(folder / "fetched").items() if name == "_plan.json"}


def test_an_object_that_changes_is_seen(bucket: str, run: RunJob, tmp_path: Path) -> None:
    url = f"{bucket}/{tmp_path.name}/rows.parquet"
    files = s3fs.S3FileSystem()
    for values in (texts(20), texts(20)[::-1]):
        save_rows(tmp_path / "rows.parquet", values)
        files.put_file(str(tmp_path / "rows.parquet"), url)
        files.invalidate_cache()
        if values[0] == texts(1)[0]:
            run(inputs=(url,))
            assert run(inputs=(url,)).resumed == 2
    with pytest.raises(JobDiffersError, match="changed"):
        run(inputs=(url,))
    assert (tmp_path / "out" / SUCCESS).exists()


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_records_of_shards_are_asked_for_several_at_once(
    bucket: str, run: RunJob, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resuming asked a bucket for one after another: 40 seconds for 1,000 shards."""
    output = f"{bucket}/{tmp_path.name}-{form}"
    done = run(output=output, output_format=form, shard_rows=13)
    exists = RemoteJobFolder.exists
    both = threading.Barrier(2)

    def slow(folder: RemoteJobFolder, name: str) -> bool:
        both.wait(timeout=20)
        return exists(folder, name)

    monkeypatch.setattr(RemoteJobFolder, "exists", slow)
    assert run(output=output, output_format=form, shard_rows=13).resumed == done.shards


def test_a_bucket_that_fails_ends_the_resumed_job_by_name(
    bucket: str, run: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = f"{bucket}/{tmp_path.name}-out"
    run(output=output)

    def failing(self: RemoteJobFolder, name: str) -> bool:
        raise JobError("no answer")

    monkeypatch.setattr(RemoteJobFolder, "exists", failing)
    with pytest.raises(JobError, match="no answer"):
        run(output=output)
