"""Files of an artifact that are held open, and where another process finds them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

from bei.artifact.manifest import TOKEN_WEIGHTS, Artifact
from bei.artifact.store import load_manifest, recertify, save
from bei.config.settings import ServeConfig
from bei.errors import ArtifactError
from bei.multiprocess.control import held_files
from bei.multiprocess.control.held_files import HeldFiles, readable
from bei.service.loader import encoder_of
from tests.bei.artifact.test_token_weights import save_table
from tests.support.artifacts import save_artifact


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "tiny")


def contents(artifact: Artifact) -> dict[str, bytes]:
    """What is read of an artifact when it is opened."""
    paths = [artifact.path / "tokenizer.json", *sorted(artifact.engine_dir.iterdir())]
    return {path.name: path.read_bytes() for path in paths}


def duplicates(held: HeldFiles) -> list[int]:
    """As another process gets them."""
    with held.lent() as descriptors:
        return [os.dup(descriptor) for descriptor in descriptors]


def test_a_table_of_weights_is_held_too(tmp_path: Path) -> None:
    artifact = save_table(tmp_path / "table")
    expected = (artifact.path / TOKEN_WEIGHTS).read_bytes()
    held = HeldFiles(artifact)
    shutil.rmtree(artifact.path)
    with readable(artifact, duplicates(held)) as found:
        assert (found.path / TOKEN_WEIGHTS).read_bytes() == expected
        assert encoder_of(found, ServeConfig()).token_weights is not None
    held.close()


def test_what_was_replaced_is_read_as_it_was_and_nothing_is_left(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    num_open, before = psutil.Process().num_fds(), contents(artifact)
    held = HeldFiles(artifact)
    with readable(artifact, duplicates(held)) as found:
        assert found is artifact  # nothing has happened
    recertify(artifact, artifact.certificate)
    with readable(artifact, duplicates(held)) as found:
        assert found is artifact  # it is the same engine
    shutil.rmtree(artifact.path)
    with readable(artifact, duplicates(held)) as found:
        assert contents(found) == before
        assert load_manifest(found.path) == artifact.manifest
    other = save_artifact(artifact.path, canary=[1] * 8)
    (other.engine_dir / "fake.bin").write_bytes(b"another engine")
    with readable(artifact, duplicates(held)) as found:
        assert contents(found) == before != contents(other)
    assert not found.path.exists()
    held.close()
    assert os.listdir(tmp_path / "tmp") == []
    assert psutil.Process().num_fds() == num_open


def test_what_is_lent_is_there_though_it_is_let_go_of_meanwhile(artifact: Artifact) -> None:
    held, before = HeldFiles(artifact), contents(artifact)
    with held.lent() as descriptors:
        held.close()
        shutil.rmtree(artifact.path)
        copies = [os.dup(descriptor) for descriptor in descriptors]
        with readable(artifact, copies) as found:
            assert contents(found) == before


def test_another_build_is_not_held_in_the_place_of_the_one_that_was_verified(artifact: Artifact) -> None:
    num_open = psutil.Process().num_fds()
    (artifact.engine_dir / "fake.bin").write_bytes(b"another engine")
    save(artifact.path, artifact.manifest, artifact.certificate)
    with pytest.raises(ArtifactError, match="was replaced while it was opened"):
        HeldFiles(artifact)
    (artifact.path / "tokenizer.json").unlink()
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        HeldFiles(artifact)
    assert psutil.Process().num_fds() == num_open


def test_more_files_than_can_be_passed_on_are_refused(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_files, "MOST_DESCRIPTORS", 2)
    with pytest.raises(ArtifactError, match=r"has 3 files that an engine process reads.*serve it from one process"):
        HeldFiles(artifact)
