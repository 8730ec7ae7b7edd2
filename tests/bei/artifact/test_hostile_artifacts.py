"""Artifacts made to do harm are refused by name before anything of them is used; the table is in
tests/support/hostile_artifacts.py, and tests/e2e/test_hostile.py starts processes on them."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bei.artifact import store
from bei.artifact.held_files import HeldFiles
from bei.artifact.manifest import CERTIFICATE, ENGINE_DIR, MANIFEST, REFERENCE_DIR, TOKENIZER
from bei.artifact.signature import SIGNATURE
from bei.artifact.store import load
from bei.engine.fake import FakeEngine
from bei.errors import ArtifactFileUnlistedError, ArtifactManifestError
from bei.printable import printable
from bei.tokenizer.encoder import TextEncoder
from bei.utils.untrusted_files import UnfitError, check_regular, read_bounded, unlisted, within
from bei.verification.stored_answers import complete_certificate
from tests.support.artifacts import save_artifact
from tests.support.hostile_artifacts import HOSTILE
from tests.support.spoilt_artifacts import ENGINE_FILE, extra, manifest_of, nested, says_all, seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_artifact(tmp_path / "artifact").path


def opened(path: Path) -> None:
    """As far as a server goes before it looks for an engine."""
    manifest = load(path).manifest
    TextEncoder(path / TOKENIZER, manifest.max_seq_len, vocab_size=manifest.spec.vocab_size)


def test_there_are_as_many_as_were_asked_for() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_artifact_is_refused_in_one_line(name: str, folder: Path) -> None:
    hostile = HOSTILE[name]
    opened(folder)
    hostile.spoil(folder)
    with pytest.raises(hostile.error) as caught:
        opened(folder)
    message = str(caught.value)
    assert re.search(hostile.message, message), message
    assert "\n" not in message
    assert len(message) < 1000
    assert re.search(r"[Bb]uild|again|delete it|upgrade", message), "it says what to do"


# Harmless changes.


def test_what_was_sealed_anew_without_a_change_is_good(folder: Path) -> None:
    """The helpers that spoil artifacts leave no traces of their own: each refusal is due to the change."""
    seal(folder, manifest_of(folder))
    opened(folder)


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "LICENSE", ".gitattributes", ".git/HEAD", ".cache/huggingface/download/model.lock"),
        *(".DS_Store", ".nfs000000000123abcd00000001", ".certificate.ab12cd_3/certificate.json"),
    ],
)
def test_files_that_systems_and_repositories_leave_may_lie_in_the_root(name: str, folder: Path) -> None:
    extra(name)(folder)
    opened(folder)


def test_links_inside_an_artifact_are_followed(folder: Path) -> None:
    """As Kubernetes mounts a volume."""
    (folder / "..data").mkdir()
    for name in (TOKENIZER, ENGINE_FILE):
        moved = folder / "..data" / Path(name).name
        shutil.move(folder / name, moved)
        (folder / name).symlink_to(os.path.relpath(moved, (folder / name).parent))
    opened(folder)


def test_links_from_a_snapshot_of_the_hub_to_its_blobs_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--a--b" / "blobs"
    save_artifact(snapshot / "cpu")
    blobs.mkdir()
    for file in [path for path in snapshot.rglob("*") if path.is_file()]:
        blob = blobs / file.name
        shutil.move(file, blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    opened(snapshot / "cpu")


def test_a_link_from_a_snapshot_to_anywhere_else_is_refused(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    save_artifact(snapshot)
    shutil.move(snapshot / TOKENIZER, tmp_path / TOKENIZER)
    (snapshot / TOKENIZER).symlink_to(tmp_path / TOKENIZER)
    with pytest.raises(ArtifactManifestError, match="leads out of its folder"):
        load(snapshot)


def test_a_target_that_is_not_known_here_can_be_inspected(folder: Path) -> None:
    """It may be a newer bei's; serving it says that it cannot be served."""
    says_all(target="npu-2")(folder)
    assert load(folder).manifest.target == "npu-2"


def test_a_refused_artifact_is_not_hashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra("engine/model.bin")(folder)

    def fail(*_: object, **__: object) -> HeldFiles:
        raise AssertionError("nothing is opened")

    monkeypatch.setattr(store, "open_files", fail)
    with pytest.raises(ArtifactFileUnlistedError):
        load(folder)


# Answers of a reference, which are read when the engine is there to be compared with them.


def npy(shape: tuple[int, ...], data: bytes = b"") -> bytes:
    """An array of float32 as numpy writes it, of the ``shape`` that it says."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def packed(part: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input_ids.npy", part)
    return file.getvalue()


def says_to_be_large(content: bytes) -> bytes:
    """The archive's list of parts says that the part has 4 GB."""
    place = content.index(b"PK\x01\x02") + 24
    return content[:place] + struct.pack("<I", (1 << 32) - 2) + content[place + 4 :]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed(npy((10**12,))), "cannot be read"),
        (packed(npy((-1,))), "cannot be read"),
        (says_to_be_large(packed(npy((4,), bytes(16)))), "4,294,967,294 bytes when it is unpacked, more than the 500,"),
        (b"no archive", "it is no archive"),
    ],
    ids=["10^12 numbers", "-1 numbers", "4 GB", "no archive"],
)
def test_answers_that_would_take_all_memory_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "artifact")
    folder = artifact.path / REFERENCE_DIR
    folder.mkdir()
    record = {"name": "x", "is_own": False, "outputs": ["embedding"], "texts": ["a"], "canary_text": "a"}
    thresholds = {"mean": 0.9, "p1": 0.9, "min": 0.9}
    record |= {"thresholds": thresholds, "allow_below_threshold": False}
    (folder / "reference.json").write_text(json.dumps(record))
    (folder / "answers.npz").write_bytes(content)
    artifact = store.save(artifact.path, artifact.manifest, artifact.certificate)
    with pytest.raises(ArtifactManifestError, match=message):
        complete_certificate(artifact, FakeEngine(artifact.manifest.limits))


def test_a_record_of_the_reference_that_is_nested_deep_is_refused(tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "artifact")
    folder = artifact.path / REFERENCE_DIR
    folder.mkdir()
    (folder / "reference.json").write_bytes(nested(1_000_000))
    (folder / "answers.npz").write_bytes(packed(npy((4,), bytes(16))))
    artifact = store.save(artifact.path, artifact.manifest, artifact.certificate)
    with pytest.raises(ArtifactManifestError, match=r"reference\.json cannot be read"):
        complete_certificate(artifact, FakeEngine(artifact.manifest.limits))


# The parts.


@pytest.mark.parametrize("name", ["a", "a/b", "", ".", "a/./b", "..data/x", "a..b", "é"])
def test_a_name_inside_the_folder_is_its_path(name: str, tmp_path: Path) -> None:
    assert within(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("name", ["..", "a/..", "a/../b", "/", "/a", "a\0", "\0", "a" * 256, "a/" * 3000, "\ud800"])
def test_a_name_outside_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnfitError):
        within(tmp_path, name)


def test_a_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    (tmp_path / "here").symlink_to("there")
    assert within(tmp_path / "here", "file").is_file()


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bounded(file, 5) == b"12345"
    with pytest.raises(UnfitError, match="it has 5 bytes, more than the 4 that are read"):
        read_bounded(file, 4)
    check_regular(tmp_path / "absent")  # the reader reports it
    with pytest.raises(UnfitError, match="no regular file"):
        check_regular(Path("/dev/null"))
    with pytest.raises(UnfitError, match="no regular file"):
        check_regular(tmp_path)


def test_files_that_are_not_listed_are_named(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    known = ["a", "b/c", "b/.hidden"]
    assert [*unlisted(tmp_path, known)] == []
    assert [*unlisted(tmp_path, ["a"])] == ["b/.hidden", "b/c"]
    assert [*unlisted(tmp_path / "absent", [])] == []
    (tmp_path / "link").symlink_to("b")
    assert [*unlisted(tmp_path, known)] == ["link"]
    assert [*unlisted(tmp_path, [*known, "link/c"])] == []


def test_what_a_terminal_obeys_is_written_as_an_escape() -> None:
    assert printable("é世 \x1b[2J\n\x9b") == "é世 \\x1b[2J\\n\\x9b"


def test_the_manifest_s_name_is_no_secret() -> None:
    """bei.artifact.validation has these names as literals, since bei.artifact imports it."""
    assert (MANIFEST, TOKENIZER, CERTIFICATE) == ("manifest.json", "tokenizer.json", "certificate.json")
    assert (ENGINE_DIR, REFERENCE_DIR, SIGNATURE) == ("engine", "reference", "signature.json")
