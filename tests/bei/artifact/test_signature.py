"""A signature binds an artifact to a key: changed, exchanged or damaged artifacts are refused by name."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bei.artifact import store
from bei.artifact.manifest import MANIFEST, TOKENIZER, Artifact
from bei.artifact.signature import SIGNATURE, check_trusted
from bei.artifact.signing_keys import fingerprint, openssh_line
from bei.artifact.store import load
from bei.config.settings import ServeConfig
from bei.errors import (
    ArtifactError,
    ArtifactHashMismatchError,
    ArtifactManifestError,
    ArtifactSignatureError,
    ArtifactUntrustedError,
    MissingDependencyError,
)
from bei.service.trusted_artifact import opened
from tests.support.artifacts import save_artifact
from tests.support.keys import KeyPair, make_keys
from tests.support.spoilt_artifacts import ENGINE_FILE, lists, put, says_all
from tests.support.tls_certificates import openssl

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def signed(tmp_path: Path, keys: KeyPair) -> Artifact:
    return store.sign(save_artifact(tmp_path / "artifact"), keys.key)


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / SIGNATURE).read_text())
    return record


def changed(**fields: object) -> Spoil:
    """The signature says something else."""
    return lambda folder: (folder / SIGNATURE).write_text(json.dumps({**record_of(folder), **fields}))


def raw(content: bytes) -> Spoil:
    return lambda folder: (folder / SIGNATURE).write_bytes(content)


# Signing.


def test_whoever_opens_a_signed_artifact_learns_whose_signature_it_has(signed: Artifact, keys: KeyPair) -> None:
    assert load(signed.path).without_files() == signed
    assert signed.signed is not None
    assert (signed.signed.key, signed.signed.is_checked) == (fingerprint(keys.raw), True)
    assert save_artifact(signed.path.with_name("another")).signed is None


def test_signing_changes_no_other_file_and_gives_the_same_bytes_again(signed: Artifact, keys: KeyPair) -> None:
    plain = save_artifact(signed.path.with_name("plain"))
    assert plain.manifest == signed.manifest
    first = (signed.path / SIGNATURE).read_bytes()
    assert store.sign(signed, keys.key) == signed
    assert (signed.path / SIGNATURE).read_bytes() == first
    names = {path.relative_to(signed.path) for path in signed.path.rglob("*")}
    assert names - {path.relative_to(plain.path) for path in plain.path.rglob("*")} == {Path(SIGNATURE)}
    assert (signed.path / SIGNATURE).stat().st_mode == (signed.path / TOKENIZER).stat().st_mode, "others may read it"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF], ids=["ENOLCK", "EBADF"])
def test_where_no_folder_can_be_locked_artifacts_are_signed_and_nothing_else_of_them_is_changed(
    number: int, tmp_path: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    artifact = save_artifact(tmp_path / "artifact")
    monkeypatch.setattr("bei.artifact.store.fcntl.flock", refuse)
    with pytest.raises(OSError, match=rf"artifact cannot be locked \({os.strerror(number)}\).* change a copy of it"):
        store.recertify(artifact, artifact.certificate)
    assert load(artifact.path).manifest == artifact.manifest
    assert store.sign(artifact, keys.key).signed == load(artifact.path).signed is not None


def test_what_a_killed_process_has_left_is_removed(signed: Artifact, keys: KeyPair) -> None:
    (signed.path / ".signature.abcdefgh").mkdir()
    (signed.path / ".signature.abcdefgh" / SIGNATURE).write_text("half")
    store.sign(load(signed.path), keys.key)
    assert not [*signed.path.glob(".signature.*")]


def test_another_signature_takes_the_place_of_the_first(signed: Artifact, stranger: KeyPair) -> None:
    store.sign(signed, stranger.key)
    found = load(signed.path).signed
    assert found is not None
    assert found.public_key == stranger.raw


def test_openssl_checks_it_as_the_reference_says(signed: Artifact, keys: KeyPair, tmp_path: Path) -> None:
    """docs/reference.md, "Signatures": an implementation that is not ours, on the words that are signed."""
    (tmp_path / "message").write_text(f"bei-artifact-signature-v1:{signed.manifest.digest}")
    (tmp_path / "signature").write_bytes(base64.b64decode(record_of(signed.path)["signature"]))
    said = openssl(
        *("pkeyutl", "-verify", "-pubin", "-inkey", keys.public, "-rawin", "-in", tmp_path / "message"),
        *("-sigfile", tmp_path / "signature"),
    )
    assert "Verified Successfully" in said


# Invalid signatures are refused, whether a signature is required or not.


def of_another(folder: Path) -> None:
    another = save_artifact(folder.with_name("another"), name="another")
    store.sign(another, make_keys(folder.parent, "another").key)
    shutil.copy(another.path / SIGNATURE, folder / SIGNATURE)


def a_link_out(folder: Path) -> None:
    shutil.move(folder / SIGNATURE, folder.parent / SIGNATURE)
    (folder / SIGNATURE).symlink_to(folder.parent / SIGNATURE)


def a_link_to_nothing(folder: Path) -> None:
    (folder / SIGNATURE).unlink()
    (folder / SIGNATURE).symlink_to("absent")


def a_pipe(folder: Path) -> None:
    (folder / SIGNATURE).unlink()
    os.mkfifo(folder / SIGNATURE)


def a_folder(folder: Path) -> None:
    (folder / SIGNATURE).unlink()
    (folder / SIGNATURE).mkdir()


def another_digest(folder: Path) -> None:
    """An attacker who changes the manifest can write its digest into the signature too."""
    says_all(name="renamed")(folder)
    changed(digest=json.loads((folder / MANIFEST).read_text())["digest"])(folder)


STRANGE_KEY = openssh_line(bytes(range(32)))
OTHERS = "does not match the manifest"

WRONG: dict[str, tuple[Spoil, str]] = {
    "of another artifact": (of_another, OTHERS),
    "the manifest was changed, and sealed again": (says_all(name="renamed"), OTHERS),
    "the tokenizer was exchanged, and listed again": (lambda folder: put(folder, TOKENIZER, b"{}"), OTHERS),
    "the engine was exchanged, and listed again": (lambda folder: put(folder, ENGINE_FILE, b"evil"), OTHERS),
    "the digest was changed with the manifest": (another_digest, "is not valid"),
    "another key": (changed(public_key=STRANGE_KEY), "is not valid: the key SHA256:"),
    "another signature": (changed(signature=base64.b64encode(bytes(64)).decode()), "is not valid"),
    "a short signature": (changed(signature="AAAA"), "is not valid"),
    "not base64": (changed(signature="ä"), "cannot be read as a signature"),
    "a key that is none": (changed(public_key="ssh-ed25519 AAAA"), "does not hold a key of 32 bytes"),
    "a key of another kind": (changed(public_key="ssh-rsa AAAA"), "its type is 'ssh-rsa'"),
    "another algorithm": (changed(algorithm="rsa-sha256"), "its algorithm is 'rsa-sha256', and this bei knows ed25519"),
    "no algorithm": (changed(algorithm=None), "its algorithm is 'None'"),
    "a later form": (changed(schema_version=2), "schema_version is not 1"),
    "a number for the digest": (changed(digest=1), "cannot be read as a signature"),
    "a field that is not known": (changed(time="now"), "cannot be read as a signature"),
    "empty": (raw(b""), "cannot be read as a signature"),
    "no JSON": (raw(b"signed, honestly"), "cannot be read as a signature"),
    "a list": (raw(b"[]"), "not a JSON object"),
    "nested": (raw(b"[" * 9_000), "cannot be read as a signature"),
    "too large": (raw(b" " * 10_001), "10,001 bytes, more than the 10,000"),
    "a key twice": (raw(b'{"digest": "a", "digest": "b"}'), "'digest' twice"),
    "truncated": (lambda folder: os.truncate(folder / SIGNATURE, 100), "cannot be read as a signature"),
    "a link out of the folder": (a_link_out, "leads out of its folder"),
    "a link to nothing": (a_link_to_nothing, "a link to a file that is not there"),
    "a pipe": (a_pipe, "no regular file"),
    "a folder": (a_folder, "no regular file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_signature_is_refused_in_one_line_although_none_is_required(name: str, signed: Artifact) -> None:
    spoil, message = WRONG[name]
    spoil(signed.path)
    with pytest.raises(ArtifactSignatureError) as caught:
        load(signed.path)
    said = str(caught.value)
    assert message in said
    assert "\n" not in said
    assert "Copy the artifact anew" in said, "it says what to do"


def test_a_file_that_was_exchanged_is_refused_by_its_hash(signed: Artifact) -> None:
    (signed.path / ENGINE_FILE).write_bytes(b"evil")
    with pytest.raises(ArtifactHashMismatchError):
        load(signed.path)


def test_a_signature_cannot_be_one_of_the_listed_files(signed: Artifact) -> None:
    lists(SIGNATURE)(signed.path)
    with pytest.raises(ArtifactManifestError, match="no path of a file"):
        store.load_manifest(signed.path)


def test_a_link_inside_of_the_artifact_is_followed(signed: Artifact) -> None:
    """As Kubernetes mounts a volume."""
    (signed.path / "..data").mkdir()
    shutil.move(signed.path / SIGNATURE, signed.path / "..data" / SIGNATURE)
    (signed.path / SIGNATURE).symlink_to(f"..data/{SIGNATURE}")
    assert load(signed.path).without_files() == signed


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_any_changed_byte_is_refused_or_changes_nothing(signed: Artifact, place: float, change: int) -> None:
    """White space may be other white space."""
    file = signed.path / SIGNATURE
    before = file.read_bytes()
    index = int(place * len(before))
    file.write_bytes(before[:index] + bytes([before[index] ^ change]) + before[index + 1 :])
    try:
        assert load(signed.path).without_files() == signed
    except ArtifactSignatureError:
        pass
    finally:
        file.write_bytes(before)


# Trusted keys.


def test_only_signatures_of_trusted_keys_will_do(signed: Artifact, keys: KeyPair, stranger: KeyPair) -> None:
    check_trusted(signed.path, signed.signed, {keys.raw})
    check_trusted(signed.path, signed.signed, {stranger.raw, keys.raw})
    with pytest.raises(ArtifactUntrustedError) as caught:
        check_trusted(signed.path, signed.signed, {stranger.raw})
    assert f"is signed by {fingerprint(keys.raw)}" in str(caught.value)
    assert f"signed by {fingerprint(stranger.raw)} are served" in str(caught.value)
    with pytest.raises(ArtifactUntrustedError, match="is not signed, and only artifacts signed by SHA256:"):
        check_trusted(signed.path, None, {keys.raw})


def test_an_artifact_is_opened_as_the_settings_say(
    signed: Artifact, keys: KeyPair, stranger: KeyPair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert opened(signed.path, ServeConfig()).without_files() == signed
    assert "no key is required" in caplog.text
    both = ServeConfig(require_signature=(str(stranger.public), str(keys.public)))
    assert opened(signed.path, both).without_files() == signed
    assert "which is trusted" in caplog.text
    required = ServeConfig(require_signature=(str(stranger.public),))
    for source in (signed.path, signed):
        with pytest.raises(ArtifactUntrustedError):
            opened(source, required)
    (signed.path / SIGNATURE).unlink()
    assert opened(signed.path, ServeConfig()).signed is None
    with pytest.raises(ArtifactUntrustedError, match="not signed"):
        opened(signed.path, required)


def test_without_cryptography_a_signature_is_not_believed_and_that_is_said(
    signed: Artifact, keys: KeyPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    found = opened(signed.path, ServeConfig())
    assert found.signed is not None
    assert not found.signed.is_checked
    assert "is not checked, as cryptography is not installed: pip install 'bei[sign]'" in caplog.text
    with pytest.raises(MissingDependencyError):
        check_trusted(signed.path, found.signed, {keys.raw})
    says_all(name="renamed")(signed.path)  # this needs no cryptography
    with pytest.raises(ArtifactError, match=OTHERS):
        load(signed.path)


def test_an_artifact_that_was_verified_in_this_start_is_not_hashed_again(
    signed: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = load(signed.path)
    monkeypatch.setattr(store, "open_files", lambda path, *_, **__: pytest.fail(f"{path} is hashed"))
    assert opened(verified, ServeConfig()) is verified


def test_files_are_sealed_where_a_signature_is_required_and_held_elsewhere(signed: Artifact, keys: KeyPair) -> None:
    required = ServeConfig(require_signature=(str(keys.public),))
    for source in (signed.path, signed, load(signed.path)):
        for config, is_sealed in ((ServeConfig(), False), (required, True)):
            artifact = opened(source, config)
            file = artifact.engine_files / "fake.bin"
            assert os.path.realpath(file).startswith("/memfd:") is is_sealed
