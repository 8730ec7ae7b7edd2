"""The folder that a build writes in: what a killed build has left of it is removed by the next one."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from bei.artifact.manifest import MANIFEST, Artifact
from bei.artifact.store import load
from bei.errors import ConfigError
from bei_build.config import BuildConfig
from bei_build.output_folder import _put_in_place, scratch_folder, seal
from bei_build.pipeline import build
from bei_build.progress import Progress
from tests.support.builds import open_engine, silent

_BUILDS = """
import sys
from pathlib import Path
from bei_build.output_folder import scratch_folder
from tests.support.builds import silent
with scratch_folder(Path(sys.argv[1]), silent()) as scratch:
    (scratch / "engine.bin").write_bytes(b"0" * 1000)
    print(scratch, flush=True)
    sys.stdin.read()
"""


def building(out: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that builds ``out`` until its input ends, and its folder, which is two minutes old."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BUILDS, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    scratch = Path(process.stdout.readline().strip())
    assert [path.name for path in scratch.iterdir()] == ["engine.bin"]
    os.utime(scratch.with_name(f"{scratch.name}.lock"), (time.time() - 120,) * 2)
    return process, scratch


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=rf"{tmp_path}/file \(File exists\): choose another --out"),
        scratch_folder(tmp_path / "file" / "artifact", silent()),
    ):
        pass


def test_nothing_is_built_into_an_artifact(
    bert_artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest does not list the files: it would be refused from then on. Known before anything is read."""
    outer = Path(shutil.copytree(bert_artifact.path, tmp_path / "outer"))
    monkeypatch.chdir(outer)
    for out in (None, "sub", str(outer / "deep" / "sub"), "../outer/sub"):
        with pytest.raises(ConfigError, match=rf"{outer} is an artifact, .*: choose an --out beside it"):
            build(BuildConfig(model=str(tmp_path / "nowhere"), out=out), open_engine, silent())
    assert load(outer).manifest == bert_artifact.manifest


def test_what_a_killed_build_has_left_is_removed_by_the_next_one_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "artifact"
    (running, of_running), (killed, of_killed) = building(out), building(out)
    others = [tmp_path / name for name in (".artifact.backup12", ".other.abcdefgh", ".artifact.abcdefgh.replaced")]
    for folder in others:
        folder.mkdir()
        (folder / "thesis.txt").write_text("years of work")
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert of_killed.is_dir()
        with scratch_folder(out, silent()) as scratch:
            assert scratch.is_dir()
            assert not of_killed.exists()
            assert (of_running / "engine.bin").is_file()
            assert all((folder / "thesis.txt").is_file() for folder in others)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [of_running.name, f"{of_running.name}.lock", scratch.name, *(folder.name for folder in others)]
        )
    finally:
        for process in (running, killed):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("is_there", [True, False], ids=["replaced", "between the renames"])
def test_a_build_killed_at_its_renames_loses_no_artifact(is_there: bool, tmp_path: Path) -> None:
    out, told = tmp_path / "artifact", io.StringIO()
    killed, of_killed = building(out)
    killed.kill()
    killed.communicate()
    former = of_killed.with_name(f"{of_killed.name}.replaced")
    former.mkdir()
    (former / "former.bin").touch()
    if is_there:
        out.mkdir()
        (out / "new.bin").touch()
    with scratch_folder(out, Progress(Console(file=told, width=1000))) as scratch:
        assert [path.name for path in out.iterdir()] == ["new.bin" if is_there else "former.bin"]
        assert {path.name for path in tmp_path.iterdir()} == {"artifact", scratch.name, f"{scratch.name}.lock"}
    assert ("artifact is the former artifact again" in told.getvalue()) is not is_there


@pytest.mark.parametrize("is_there", [True, False], ids=["replaced", "between the renames"])
def test_so_does_one_without_a_lock(
    is_there: bool, bert_artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes stayed, or the only artifact was in a folder that nobody would find."""
    out, former = tmp_path / "artifact", tmp_path / ".artifact.abcdefgh.replaced"
    shutil.copytree(bert_artifact.path, former)
    if is_there:
        shutil.copytree(former, out)
    with scratch_folder(out, silent()):
        assert former.exists()  # it may be of a build that ends just now
    monkeypatch.setattr("bei_build.output_folder._LEFT_AFTER_S", -1.0)
    with scratch_folder(out, silent()):
        assert not former.exists()
        assert load(out).manifest == bert_artifact.manifest


def test_a_mount_point_is_refused_before_the_work(tmp_path: Path) -> None:
    """Nothing can be renamed onto it, which was found out when everything was computed. One of the same device looks
    like a folder."""
    (tmp_path / "artifact").mkdir()
    for mount in ("-t tmpfs none", f"--bind {shlex.quote(str(tmp_path))}"):
        script = f'mount {mount} "$1" 2>&- || exit 77; shift; exec "$@"'
        run = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path / "artifact")]
        found = subprocess.run(
            [*run, sys.executable, "-c", _BUILDS, str(tmp_path / "artifact")],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode == 77 or "unshare" in found.stderr:
            pytest.skip("no mounts without privileges here")
        assert f"ConfigError: {tmp_path}/artifact is a mount point" in found.stderr
        assert f"--out {tmp_path}/artifact/artifact." in found.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV], ids=["EPERM", "EXDEV"])
def test_a_folder_that_cannot_be_moved_is_refused_before_the_work(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's in a sticky folder; of a lower layer of overlayfs."""
    out = tmp_path / "artifact"
    out.mkdir()
    (out / "engine.bin").touch()

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", refuse)
    message = rf"artifact cannot be replaced \({os.strerror(number)}\): choose"
    with pytest.raises(ConfigError, match=message), scratch_folder(out, silent()):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    assert [path.name for path in out.iterdir()] == ["engine.bin"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS], ids=["ENOLCK", "ENOSYS"])
def test_a_file_system_without_locks_is_built_on(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre and NFS may have none: builds failed there, for a lock that only tidies up."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("bei.utils.file_lock.fcntl.flock", refuse)
    for _ in range(2):
        with scratch_folder(tmp_path / "artifact", silent()) as scratch:
            assert [path.name for path in tmp_path.iterdir()] == [scratch.name]  # no lock that others could take
        scratch.rmdir()


def test_a_former_artifact_that_cannot_be_removed_does_not_fail_the_build(
    bert_artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps the files that a server has open, and their folder."""
    out, rmdir = Path(shutil.copytree(bert_artifact.path, tmp_path / "artifact")), os.rmdir

    def refuse(path: object, **options: object) -> None:
        if str(path).endswith(".replaced"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        rmdir(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rmdir", refuse)
    with scratch_folder(out, silent()) as scratch:
        shutil.copytree(out, scratch, dirs_exist_ok=True)
        built = seal(scratch, out, bert_artifact.manifest, bert_artifact.certificate, None, silent())
    assert load(out).manifest == built.manifest
    assert [path.name for path in tmp_path.iterdir() if path != out] == [f"{scratch.name}.replaced"]


def test_an_artifact_that_cannot_be_replaced_stays_in_its_place(
    bert_artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = Path(shutil.copytree(bert_artifact.path, tmp_path / "artifact")), Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target == out and not path.name.endswith(".replaced"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, target)

    def build_again() -> None:
        with scratch_folder(out, silent()) as scratch:
            shutil.copytree(out, scratch, dirs_exist_ok=True)
            seal(scratch, out, bert_artifact.manifest, bert_artifact.certificate, None, silent())

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        build_again()
    assert load(out).manifest == bert_artifact.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_of_builds_that_end_at_once_one_stays_and_none_fails(tmp_path: Path) -> None:
    """The second found that the folder was gone, or was there again."""
    out, rounds = tmp_path / "artifact", 200

    def build(number: int) -> None:
        for _ in range(rounds):
            scratch = Path(tempfile.mkdtemp(prefix=".artifact.", dir=tmp_path))
            (scratch / MANIFEST).write_text(json.dumps({"schema_version": 1, "bei_version": str(number)}))
            assert _put_in_place(scratch, out) is None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(build, range(4)))
    assert json.loads((out / MANIFEST).read_text())["schema_version"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
