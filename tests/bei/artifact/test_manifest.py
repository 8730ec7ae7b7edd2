"""Artifacts on disk: what is saved is loaded, and later changes are refused by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bei.artifact import store
from bei.artifact.manifest import CERTIFICATE, CERTIFICATE_PAGE, MANIFEST, SCHEMA_VERSION, TOKENIZER, Artifact
from bei.artifact.store import is_artifact, load, load_manifest
from bei.core import Limits
from bei.errors import (
    ArtifactError,
    ArtifactFileMissingError,
    ArtifactHashMismatchError,
    ArtifactManifestError,
    ArtifactSchemaNewerError,
)
from tests.support.artifacts import save_artifact

FILES = [CERTIFICATE_PAGE, CERTIFICATE, "engine/fake.bin", MANIFEST, TOKENIZER]


@pytest.fixture
def saved(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "artifact")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One artifact for all examples; each puts back what it changes."""
    return save_artifact(tmp_path_factory.mktemp("shared") / "artifact").path


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit manifest.json as a person would, digest and all."""
    content = json.loads((path / MANIFEST).read_text())
    change(content)
    (path / MANIFEST).write_text(json.dumps(content))


# Saving and loading.


def test_what_is_saved_is_what_is_loaded(saved: Artifact) -> None:
    assert load(saved.path).without_files() == saved
    assert load_manifest(saved.path) == saved.manifest
    assert is_artifact(saved.path)
    assert saved.engine_dir == saved.path / "engine"


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = texts.filter(str.isprintable)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=names.filter(str.strip),
    prompts=st.dictionaries(names, texts, max_size=3),
    has_default=st.booleans(),
    normalize=st.booleans(),
    dimensions=st.none() | st.lists(st.integers(1, 2**31), max_size=3),
    limits=st.tuples(st.integers(1, 2**24), st.integers(1, 2**20), st.integers(1, 2**24)),
)
def test_any_manifest_survives_saving_and_loading(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    prompts: dict[str, str],
    has_default: bool,
    normalize: bool,
    dimensions: list[int] | None,
    limits: tuple[int, int, int],
) -> None:
    saved = save_artifact(
        tmp_path_factory.mktemp("any") / "artifact",
        name=name,
        prompts=prompts,
        default_prompt_name=next(iter(prompts), None) if has_default else None,
        embedding={"normalize": normalize, "matryoshka_dimensions": dimensions},
        max_num_tokens=limits[0],
        max_batch_size=min(limits[0], limits[1]),
        max_seq_len=min(limits[0], limits[2]),
    )
    assert load(saved.path).without_files() == saved


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (save_artifact(tmp_path / name) for name in ("first", "second"))
    assert first.manifest == second.manifest
    assert [(first.path / file).read_bytes() for file in FILES] == [(second.path / file).read_bytes() for file in FILES]


def test_every_file_but_the_manifest_is_listed_with_size_and_hash(saved: Artifact) -> None:
    assert [info.path for info in saved.manifest.files] == [
        CERTIFICATE_PAGE,
        CERTIFICATE,
        "engine/fake.bin",
        TOKENIZER,
    ]
    for info in saved.manifest.files:
        assert info.size == (saved.path / info.path).stat().st_size
        assert info.sha256 == store.sha256_of_file(saved.path / info.path)


def test_an_artifact_may_be_moved(saved: Artifact, tmp_path: Path) -> None:
    moved = Path(shutil.move(saved.path, tmp_path / "elsewhere"))
    assert load(moved).manifest == saved.manifest


def test_facts_are_read_from_the_manifest(saved: Artifact) -> None:
    assert saved.manifest.limits == Limits(64, 8, 16)
    assert saved.manifest.dimension("embedding") == 8
    assert saved.manifest.dimension("logits") is None


def test_a_new_certificate_replaces_its_page_too(saved: Artifact) -> None:
    certificate = msgspec.structs.replace(saved.certificate, device="another device")
    again = store.recertify(saved, certificate)
    assert load(saved.path).without_files() == again
    assert again.certificate == certificate
    assert "another device" in (saved.path / CERTIFICATE_PAGE).read_text()
    assert "another device" not in (save_artifact(saved.path.with_name("first")).path / CERTIFICATE_PAGE).read_text()


def test_the_page_is_read_again_with_its_manifest(saved: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is replaced while the artifact is read: its page is the first of the new files."""
    before = (saved.path / CERTIFICATE_PAGE).read_bytes()
    store.recertify(saved, msgspec.structs.replace(saved.certificate, device="another device"))
    after = (saved.path / CERTIFICATE_PAGE).read_bytes()
    old = save_artifact(saved.path.with_name("old"))
    (old.path / CERTIFICATE_PAGE).write_bytes(after)
    replaced: list[Path] = []

    @contextmanager
    def finish(path: Path, **_: object) -> Iterator[None]:
        (path / CERTIFICATE_PAGE).write_bytes(before)
        replaced.append(path)
        yield

    monkeypatch.setattr(store, "_alone", finish)
    assert load(old.path).without_files() == old
    assert replaced == [old.path]


# A process that writes a new certificate, and is killed when it would replace file number sys.argv[2].
_KILLED = """
import os, signal, sys
from pathlib import Path
import msgspec
from bei.artifact import store

artifact, replace, left = store.load(Path(sys.argv[1])), os.replace, [int(sys.argv[2])]

def replace_or_die(*paths):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = replace_or_die
store.recertify(artifact, msgspec.structs.replace(artifact.certificate, device="another device"))
"""


def rewrite_and_be_killed(path: Path, num_replaced: int) -> None:
    command = [sys.executable, "-c", _KILLED, str(path), str(num_replaced)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("num_replaced", range(3))
def test_what_a_process_killed_between_replacing_files_leaves_is_completed(num_replaced: int, saved: Artifact) -> None:
    rewrite_and_be_killed(saved.path, num_replaced)
    found = load(saved.path)
    assert found.certificate.device == (saved.certificate.device if num_replaced == 0 else "another device")
    again = store.recertify(found, msgspec.structs.replace(found.certificate, device="a third device"))
    assert load(saved.path).without_files() == again.without_files()
    assert not [*saved.path.glob(".certificate.*")]


def test_what_a_killed_process_leaves_is_not_put_into_another_build(saved: Artifact, tmp_path: Path) -> None:
    """It would replace the manifest of a build that was copied over the first one."""
    other = save_artifact(tmp_path / "other")
    (other.path / "engine" / "fake.bin").write_bytes(b"another engine")
    other = store.save(other.path, msgspec.structs.replace(other.manifest, files=[], digest=""), other.certificate)
    rewrite_and_be_killed(saved.path, 0)
    shutil.copytree(other.path, saved.path, dirs_exist_ok=True)
    new = store.recertify(load(saved.path), msgspec.structs.replace(other.certificate, device="another device"))
    assert load(saved.path).without_files() == new.without_files()
    assert store.files_to_hold(new.manifest) == store.files_to_hold(other.manifest)


# Refusing what was changed.


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
@example(file=MANIFEST, place=0.0, change=1)
@example(file="engine/fake.bin", place=0.999, change=128)
def test_any_single_changed_byte_is_refused(shared: Path, file: str, place: float, change: int) -> None:
    path = shared / file
    before = path.read_bytes()
    index = int(place * len(before))
    path.write_bytes(before[:index] + bytes([before[index] ^ change]) + before[index + 1 :])
    try:
        with pytest.raises(ArtifactError, match=r"[Bb]uild|again"):
            load(shared)
    finally:
        path.write_bytes(before)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), extra=st.binary(max_size=3))
@example(file=TOKENIZER, place=0.0, extra=b"")
@example(file=MANIFEST, place=0.5, extra=b" ")
def test_any_file_that_is_cut_off_or_longer_is_refused(shared: Path, file: str, place: float, extra: bytes) -> None:
    path = shared / file
    before = path.read_bytes()
    index = int(place * len(before))
    path.write_bytes(before[:index] + extra + before[index:] if extra else before[:index])
    try:
        with pytest.raises(ArtifactError, match=r"[Bb]uild|again"):
            load(shared)
    finally:
        path.write_bytes(before)
    load(shared)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named_with_the_remedy(file: str, saved: Artifact) -> None:
    (saved.path / file).unlink()
    with pytest.raises(ArtifactFileMissingError, match=rf"{file}.*([Bb]uild|Copy)"):
        load(saved.path)


def test_a_folder_that_is_no_artifact_says_how_to_make_one(tmp_path: Path) -> None:
    assert not is_artifact(tmp_path)
    for path, lacks in ((tmp_path, "has no manifest.json"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(
            ArtifactFileMissingError, match=rf"is not an artifact: it {lacks}\. Make one with 'bei build'"
        ):
            load(path)


def test_a_changed_file_is_named_with_the_remedy(saved: Artifact) -> None:
    (saved.path / "engine" / "fake.bin").write_bytes(b"another engine")
    with pytest.raises(ArtifactHashMismatchError, match=r"fake\.bin is not the file that was built.*build it again"):
        load(saved.path)


def test_a_newer_schema_asks_for_an_upgrade_whatever_else_it_holds(saved: Artifact) -> None:
    (saved.path / MANIFEST).write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1, "unknown": [1, 2]}))
    with pytest.raises(
        ArtifactSchemaNewerError, match=rf"schema {SCHEMA_VERSION + 1}, .* {SCHEMA_VERSION}: upgrade bei"
    ):
        load(saved.path)


def test_an_older_schema_says_which_it_is_and_asks_for_a_build(saved: Artifact) -> None:
    """Its manifest may look the same, and its certificate have other fields."""
    rewrite(saved.path, lambda manifest: manifest.update(schema_version=SCHEMA_VERSION - 1))
    message = rf"schema {SCHEMA_VERSION} \(it has schema {SCHEMA_VERSION - 1}\)\. Build the artifact again"
    with pytest.raises(ArtifactManifestError, match=message):
        load(saved.path)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(extra=1),
        lambda manifest: manifest["source"].update(extra=1),
        lambda manifest: manifest["files"][0].update(mode="0644"),
        lambda manifest: manifest.pop("name"),
        lambda manifest: manifest.update(max_seq_len="16"),
        lambda manifest: manifest.update(schema_version="1"),
        lambda manifest: manifest.update(schema_version=None),
    ],
    ids=[
        "unlisted",
        "unlisted in source",
        "unlisted in file",
        "missing",
        "wrong type",
        "text as schema",
        "null schema",
    ],
)
def test_fields_of_another_shape_are_refused(change: Callable[[dict[str, Any]], object], saved: Artifact) -> None:
    rewrite(saved.path, change)
    message = rf"is not a manifest of schema {SCHEMA_VERSION} \(.*\)\. Build the artifact again"
    with pytest.raises(ArtifactManifestError, match=message):
        load(saved.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"schema_version": 1}'])
def test_a_manifest_that_is_no_manifest_is_refused(content: bytes, saved: Artifact) -> None:
    (saved.path / MANIFEST).write_bytes(content)
    with pytest.raises(ArtifactManifestError, match="Build the artifact again"):
        load(saved.path)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(name="another"),
        lambda manifest: manifest.update(digest="0" * 64),
        lambda manifest: manifest.update(max_batch_size=9999),
        lambda manifest: manifest["files"].pop(),
        lambda manifest: None,  # the same content, laid out in another way
    ],
    ids=["name", "digest", "limit", "file", "layout"],
)
def test_a_manifest_that_was_edited_is_refused(change: Callable[[dict[str, Any]], object], saved: Artifact) -> None:
    rewrite(saved.path, change)
    with pytest.raises(ArtifactHashMismatchError, match=r"manifest\.json was changed after the build\. Build"):
        load(saved.path)


def test_an_artifact_saved_without_its_tokenizer_is_refused(saved: Artifact) -> None:
    (saved.path / TOKENIZER).unlink()
    again = store.save(saved.path, saved.manifest, saved.certificate)
    with pytest.raises(ArtifactManifestError, match=r"does not list tokenizer\.json\. Build the artifact again"):
        load(again.path)


def test_saving_is_finished_by_the_manifest(saved: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the last step, a build leaves no artifact."""
    (saved.path / MANIFEST).unlink()

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bei.artifact.store.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.save(saved.path, saved.manifest, saved.certificate)
    assert not is_artifact(saved.path)


def test_each_way_of_being_wrong_has_its_own_code() -> None:
    classes = ArtifactError.__subclasses__()
    assert len({error.code for error in classes} - {ArtifactError.code}) == len(classes) == 11
