"""Output folders: files appear whole, once, or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import s3fs

from bei.bulk.folder import JobFolder, LocalJobFolder, RemoteJobFolder, _here, folder_at
from bei.bulk.parts import PLAN
from bei.bulk.run import _stored_plan as stored_plan
from bei.bulk.sources.rows import Columns
from bei.bulk.sources.source import Source
from bei.errors import DiskFullError, JobDiffersError, JobError, JobInputError, MissingDependencyError


@pytest.fixture(params=["", "file://", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> JobFolder:
    if request.param != "s3":
        return folder_at(f"{request.param}{tmp_path}/new/out")
    return folder_at(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


def test_files_are_read_as_they_were_committed(folder: JobFolder) -> None:
    assert folder.is_empty()
    assert folder.read("a/b") is None
    assert not folder.exists("a/b")
    folder.commit("a/b", b"first")
    folder.commit("a/b", memoryview(b"second"))
    assert folder.read("a/b") == b"second"
    assert folder.exists("a/b")
    assert not folder.is_empty()
    with folder.opened("a/b") as stream:
        assert stream.read() == b"second"
    with pytest.raises(FileNotFoundError), folder.opened("a/c"):
        pass
    with pytest.raises(ValueError, match="no Parquet"), folder.opened("a/b"):  # what its reader says
        raise ValueError("no Parquet")


def test_a_file_is_removed_if_it_is_there(folder: JobFolder) -> None:
    folder.commit("a/b", b"first")
    for _ in range(2):
        folder.remove("a/b")
        assert not folder.exists("a/b")


def test_a_file_that_cannot_be_looked_for_is_not_taken_to_be_missing(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    folder.commit("part", b"whole")
    if isinstance(folder, RemoteJobFolder):
        monkeypatch.setattr(folder._file_system, "info", failing)
    else:
        monkeypatch.setattr(Path, "stat", failing)
    with pytest.raises(JobError, match="Input/output error"):
        folder.exists("part")


def test_a_job_that_another_process_begins_meanwhile_is_one_and_no_folder_of_other_files(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, plans = folder.read, [None]  # the first look finds none

    monkeypatch.setattr(folder, "read", lambda name: plans.pop() if plans else read(name))
    folder.create(PLAN, b"{}")
    with pytest.raises(JobDiffersError, match="is not a plan of this version"):
        stored_plan(folder)


def test_of_many_who_create_a_file_one_does(folder: JobFolder) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def create(number: int) -> None:
        barrier.wait()
        if folder.create("plan", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert folder.read("plan") == b"%d" % won[0]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_hard_links_is_named_with_what_to_do(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcsfuse, FAT: there was the error's number alone. Nothing half-written stays."""

    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(JobError, match=r"without hard links .* its URL \(gs://"):
        folder_at(str(tmp_path)).create(PLAN, b"{}")
    assert not list(tmp_path.iterdir())


def test_what_a_process_that_has_ended_left_is_removed_and_what_another_one_writes_is_not(tmp_path: Path) -> None:
    folder = LocalJobFolder(tmp_path)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = tmp_path / f".part.{_here()}.{int(ended.stdout)}.abc.partial"
    others = [
        tmp_path / f".part.{_here()}.{os.getpid()}.abc.partial",
        tmp_path / f".part.{os.uname().nodename}.{int(ended.stdout)}.abc.partial",  # of a container of the same name
        tmp_path / f".part.elsewhere.{int(ended.stdout)}.abc.partial",
    ]
    for path in (left, *others):
        path.touch()
    assert folder.is_empty()
    folder.clean()
    assert not left.exists()
    assert all(path.exists() for path in others)


def test_what_is_left_is_removed_on_a_host_whose_name_has_dots_and_after_a_day_on_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    own, old, no_job_s = (
        tmp_path / name
        for name in (
            f".part.parquet.ip-10-0-0-1.ec2.internal-0a.{int(ended.stdout)}.abc.partial",
            f".part.parquet.elsewhere.{os.getpid()}.abc.partial",
            "download.partial",
        )
    )
    for path in (own, old, no_job_s):
        path.touch()
        os.utime(path, (0, 0) if path is old else None)
    monkeypatch.setattr("bei.bulk.folder._here", lambda: "ip-10-0-0-1.ec2.internal-0a")
    LocalJobFolder(tmp_path).clean()
    assert [path.name for path in tmp_path.iterdir()] == [no_job_s.name]


def test_a_container_s_processes_are_not_taken_for_those_of_another_one() -> None:
    """Host names are shared, and numbers of processes mean others there."""
    name = os.uname().nodename
    assert _here().startswith(f"{name}-")
    assert _here().rpartition("-")[2] in os.readlink("/proc/self/ns/pid")
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", _PRINT_HERE]
    outside = subprocess.run(command, capture_output=True, text=True, check=False)
    if outside.returncode == 0:  # it may be forbidden here
        assert outside.stdout.strip().startswith(f"{name}-")
        assert outside.stdout.strip() != _here()


_PRINT_HERE = "from bei.bulk.folder import _here; print(_here())"


def test_what_another_user_s_process_writes_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.kill", forbidden)
    path = tmp_path / f".part.{_here()}.1.abc.partial"
    path.touch()
    LocalJobFolder(tmp_path).clean()
    assert path.exists()


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalJobFolder(tmp_path)
    folder.commit("part", b"whole")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bei.bulk.folder.os.fsync", full)
    with pytest.raises(DiskFullError, match=str(tmp_path)):
        folder.commit("part", b"other")
    assert folder.read("part") == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize("url", ["s3://no-such-bucket-here/x", "nowhere://bucket/x"])
def test_a_place_that_cannot_be_written_to_is_named(url: str, bucket: str) -> None:
    with pytest.raises(JobError, match=url):
        folder_at(url).commit("part", b"x")


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    for url in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(JobError, match=f"{url} cannot be used: .*Not a directory.* name another"):
            stored_plan(folder_at(str(url)))


def test_errors_that_a_store_s_package_has_of_its_own_are_named(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    url = f"{bucket}/{tmp_path.name}"
    for use in (lambda: folder_at(url).read(PLAN), lambda: Source((f"{url}/rows.parquet",), Columns())):
        with pytest.raises((JobError, JobInputError), match=f"{url}.*NoCredentialsError"):
            use()
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_protocol_whose_package_is_missing_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(MissingDependencyError, match="pip install gcsfs"):
        folder_at("gs://bucket/x")
