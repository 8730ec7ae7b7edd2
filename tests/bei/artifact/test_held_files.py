"""Files of an artifact that are opened once: what was hashed is what is read, in this process and in others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bei.artifact import held_files
from bei.artifact.held_files import MOST_FILES, HeldFiles, on_disk, shown_path
from bei.artifact.manifest import TOKEN_WEIGHTS, TOKENIZER, Artifact
from bei.artifact.store import load, received, recertify, save
from bei.config.settings import ServeConfig
from bei.errors import ArtifactError, ArtifactFileMissingError, ArtifactHashMismatchError, ArtifactManifestError
from bei.multiprocess.transport.channel import MOST_DESCRIPTORS
from bei.service.loader import encoder_of
from tests.bei.artifact.test_token_weights import save_table
from tests.support.artifacts import save_artifact

ENGINE = "engine/fake.bin"
BUILT = b"an engine would be here"
OTHER = b"another engine, as long"  # as many bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_artifact(tmp_path / "tiny").path


def engine_of(artifact: Artifact) -> bytes:
    return (artifact.engine_files / "fake.bin").read_bytes()


def lent(artifact: Artifact) -> list[int]:
    """The descriptors, as another process gets them."""
    assert artifact.files is not None
    with artifact.files.lent() as descriptors:
        return [*map(os.dup, descriptors)]


def renamed(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(OTHER)
    other.rename(file)


def linked(file: Path) -> None:
    other = file.parents[2] / "other"
    other.write_bytes(OTHER)
    file.unlink()
    file.symlink_to(other)


def removed(file: Path) -> None:
    shutil.rmtree(file.parents[1])


def written(file: Path) -> None:
    assert len(OTHER) == len(BUILT)
    file.write_bytes(OTHER)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("replace", [renamed, linked, removed])
def test_what_was_verified_is_read_whatever_lies_under_its_name(
    path: Path, replace: Callable[[Path], None], sealed: bool
) -> None:
    artifact = load(path, sealed=sealed)
    replace(path / ENGINE)
    assert engine_of(artifact) == BUILT
    artifact.check_files()
    with received(artifact.without_files(), lent(artifact)) as elsewhere:
        assert engine_of(elsewhere) == BUILT
        assert encoder_of(elsewhere, ServeConfig()) is not None


def test_a_sealed_copy_is_not_what_is_written_into_the_file_and_cannot_be_written_to(path: Path) -> None:
    artifact = load(path, sealed=True)
    written(path / ENGINE)
    assert engine_of(artifact) == BUILT
    artifact.check_files()
    for flags in (os.O_WRONLY, os.O_RDWR):
        held = os.open(artifact.engine_files / "fake.bin", flags)
        with pytest.raises(PermissionError):
            os.write(held, OTHER)
        with pytest.raises(PermissionError):
            os.ftruncate(held, 0)
        os.close(held)


@pytest.mark.parametrize(
    ("owner", "mode", "user", "is_copied"),
    [
        (0, 0o100644, 1000, False),  # root's, and the server is another user's
        (0, 0o100644, 0, True),  # its own user may write
        (1000, 0o100644, 1000, True),
        (1001, 0o100644, 1000, True),
        (0, 0o100664, 1000, True),  # a group may, or whom an ACL names
        (0, 0o100646, 1000, True),
    ],
)
def test_files_that_only_root_may_write_are_not_copied(
    owner: int, mode: int, user: int, is_copied: bool, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    fstat = os.fstat

    def owned(descriptor: int) -> os.stat_result:
        found = [*fstat(descriptor)]
        found[0], found[4] = mode, owner
        return os.stat_result([*found])

    monkeypatch.setattr("os.fstat", owned)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr(held_files, "_last_write", lambda _: (0, 0))
    artifact = load(path, sealed=True)
    monkeypatch.undo()
    assert os.path.realpath(artifact.engine_files / "fake.bin").startswith("/memfd:") is is_copied


def test_copies_that_exceed_the_memory_are_refused_with_a_way_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_open = psutil.Process().num_fds()
    monkeypatch.setattr(held_files, "available_bytes", lambda: 100)
    with pytest.raises(ArtifactError, match=r"is copied into memory.*100 B.*owned by root"):
        load(path, sealed=True)
    assert psutil.Process().num_fds() == num_open
    assert engine_of(load(path)) == BUILT


def test_what_is_written_over_is_noticed_and_a_new_time_alone_is_not(path: Path) -> None:
    artifact = load(path)
    os.utime(path / ENGINE)
    artifact.check_files()
    written(path / ENGINE)
    with pytest.raises(ArtifactHashMismatchError, match=r"engine/fake\.bin was written over.*copy it anew"):
        artifact.check_files()


def test_only_listed_files_are_found(path: Path) -> None:
    artifact = load(path)
    (path / "engine" / "more.bin").write_bytes(OTHER)
    with pytest.raises(ArtifactFileMissingError, match=r"lacks engine/more\.bin, or its manifest does not list it"):
        _ = artifact.engine_files / "more.bin"
    with on_disk(artifact.engine_files) as folder:
        assert os.listdir(folder) == ["fake.bin"]
        assert (folder / "fake.bin").read_bytes() == BUILT
    assert not folder.exists()
    with on_disk(artifact.engine_dir) as folder:
        assert folder == artifact.engine_dir


def test_a_table_of_weights_is_held_too(tmp_path: Path) -> None:
    artifact = load(save_table(tmp_path / "table").path)
    expected = (artifact.path / TOKEN_WEIGHTS).read_bytes()
    shutil.rmtree(artifact.path)
    assert artifact.file(TOKEN_WEIGHTS).read_bytes() == expected
    encoder = encoder_of(artifact, ServeConfig())
    assert encoder is not None
    assert encoder.token_weights is not None


def test_a_new_certificate_is_no_other_build(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = load(path)
    recertify(artifact, artifact.certificate)
    with received(artifact.without_files(), lent(artifact)) as found:
        assert found.file(TOKENIZER).read_bytes() == (path / TOKENIZER).read_bytes()
    assert caplog.text == ""
    shutil.rmtree(path)
    with received(artifact.without_files(), lent(artifact)):
        assert "was replaced; opened is the artifact that is served" in caplog.text


def test_a_certificate_is_not_written_into_another_build(path: Path) -> None:
    artifact = load(path)
    (path / ENGINE).write_bytes(OTHER)
    save(path, artifact.manifest, artifact.certificate)
    with pytest.raises(ArtifactError, match=r"Another build lies in .* now"):
        recertify(artifact, artifact.certificate)
    assert engine_of(load(path)) == OTHER


def test_descriptors_are_closed_with_the_last_reference_or_before(path: Path) -> None:
    num_open = psutil.Process().num_fds()
    artifact = load(path, sealed=True)
    assert psutil.Process().num_fds() > num_open
    del artifact
    assert psutil.Process().num_fds() == num_open
    artifact = load(path)
    assert isinstance(artifact.files, HeldFiles)
    with artifact.files.lent() as descriptors:
        artifact.files.close()
        with received(artifact.without_files(), [*map(os.dup, descriptors)]) as found:
            assert engine_of(found) == BUILT
    with pytest.raises(ArtifactFileMissingError):
        engine_of(artifact)
    assert psutil.Process().num_fds() == num_open
    (path / ENGINE).write_bytes(OTHER)
    with pytest.raises(ArtifactHashMismatchError):
        load(path)
    assert psutil.Process().num_fds() == num_open


def test_a_pipe_that_was_put_there_after_the_check_is_not_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.artifact.store.check_files", lambda *_: None)
    (path / ENGINE).unlink()
    os.mkfifo(path / ENGINE)
    with pytest.raises(ArtifactManifestError, match="is no regular file"):
        load(path)


def test_messages_name_the_file_by_which_it_was_opened(path: Path) -> None:
    artifact = load(path)
    assert shown_path(artifact.file(TOKENIZER)) == str(path / TOKENIZER)
    artifact = load(path, sealed=True)
    assert shown_path(artifact.file(TOKENIZER)) == str(path / TOKENIZER)
    assert shown_path(path) == str(path)


def test_a_message_can_carry_as_many_descriptors_as_an_artifact_may_have_files() -> None:
    assert MOST_FILES <= MOST_DESCRIPTORS
