"""Artifacts on disk: saving, loading with verification, signing, new certificates."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bei.artifact.certificate.page import certificate_page
from bei.artifact.certificate.record import (
    Certificate,
)
from bei.artifact.signature import read_signature, write_signature
from bei.artifact.validation import certificate_fault, check_files, manifest_fault
from bei.errors import (
    ArtifactFileMissingError,
    ArtifactHashMismatchError,
    ArtifactManifestError,
    ArtifactSchemaNewerError,
)
from bei.utils.untrusted_files import MOST_JSON_BYTES, UnfitError, read_bounded, unique_keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from bei.artifact.manifest import (
    CERTIFICATE,
    CERTIFICATE_PAGE,
    MANIFEST,
    SCHEMA_VERSION,
    TOKENIZER,
    Artifact,
    FileInfo,
    Manifest,
)


def _encode(record: Manifest | Certificate) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def certificate_html(manifest: Manifest, certificate: Certificate) -> str:
    """The content of ``certificate.html``."""
    source, engine = manifest.source, manifest.engine
    facts = [
        ("Model", f"{source.model}, {source.revision}" if source.revision else source.model),
        ("Architecture", manifest.spec.architecture),
        ("Target and precision", f"{manifest.target}, {manifest.precision}"),
        ("Compiler", f"{engine.compiler} {engine.compiler_version}"),
        ("Checkpoint SHA-256", source.sha256),
        ("Built by", f"bei {manifest.bei_version}"),
    ]
    return certificate_page(manifest.name, facts, certificate)


def _certificate_files(manifest: Manifest, certificate: Certificate) -> dict[str, bytes]:
    """The files that a new certificate replaces: contents by name."""
    page = certificate_html(manifest, certificate)
    return {CERTIFICATE: _encode(certificate), CERTIFICATE_PAGE: page.encode()}


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(_encode(msgspec.structs.replace(manifest, digest=""))).hexdigest()


def _sealed(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, digest=_digest(manifest))


def sha256_of_file(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def save(path: Path, manifest: Manifest, certificate: Certificate) -> Artifact:
    """Complete the artifact at ``path``: write the certificate and its page, list and hash all files, write the
    manifest last.

    Tokenizer and engine files exist already. A directory without a manifest is not an artifact, so an interrupted build
    cannot be served.
    """
    for name, content in _certificate_files(manifest, certificate).items():
        (path / name).write_bytes(content)
    files = [
        FileInfo(path=file.relative_to(path).as_posix(), size=file.stat().st_size, sha256=sha256_of_file(file))
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    ]
    manifest = _sealed(msgspec.structs.replace(manifest, files=files, verification=certificate.kind))
    temporary = path / (MANIFEST + ".partial")
    temporary.write_bytes(_encode(manifest))
    os.replace(temporary, path / MANIFEST)
    return Artifact(path, manifest, certificate)


def recertify(artifact: Artifact, certificate: Certificate) -> Artifact:
    """Replace the certificate and its page in the artifact on disk, and update the manifest. Raises OSError.

    A lock admits one process at a time; of two certificates the later one stays. Files are replaced one by one, the
    manifest last: a process killed in between leaves an artifact that fails its hash check and must be copied anew. Not
    for signed artifacts: the signature would not match the manifest.
    """
    assert artifact.signed is None, "whoever completes certificates asks first"
    contents = _certificate_files(artifact.manifest, certificate)
    new = {
        name: FileInfo(path=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    files = [new.get(info.path, info) for info in artifact.manifest.files]
    manifest = _sealed(msgspec.structs.replace(artifact.manifest, files=files, verification=certificate.kind))
    with _alone(artifact.path), tempfile.TemporaryDirectory(prefix=".certificate.", dir=artifact.path) as scratch:
        contents[MANIFEST] = _encode(manifest)  # replaced last
        for name, content in contents.items():
            (Path(scratch) / name).write_bytes(content)
        for name in contents:
            os.replace(Path(scratch) / name, artifact.path / name)
    return msgspec.structs.replace(artifact, manifest=manifest, certificate=certificate)


def sign(artifact: Artifact, key: Ed25519PrivateKey) -> Artifact:
    """Sign the artifact on disk, replacing any signature. Raises OSError."""
    signed = write_signature(artifact.path, artifact.manifest.digest, key)
    return msgspec.structs.replace(artifact, signed=signed)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock on ``folder`` between processes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# Errors of reading a record: not JSON, wrong form, too large (ValueErrors), nested too deeply.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
_manifest_decoder = msgspec.json.Decoder(Manifest)
_certificate_decoder = msgspec.json.Decoder(Certificate)


def is_artifact(path: Path) -> bool:
    """True if ``path`` looks like an artifact, which may still be damaged."""
    return (path / MANIFEST).is_file()


def load_manifest(path: Path) -> Manifest:
    """Read and check the manifest only; files are not hashed.

    Raises ArtifactFileMissingError, ArtifactSchemaNewerError, ArtifactManifestError, ArtifactHashMismatchError.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise ArtifactFileMissingError(f"{path} is not an artifact: it has no {MANIFEST}. Make one with 'bei build'.")
    try:
        raw = read_bounded(file)
        version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("schema_version")
        schema_version = msgspec.json.decode(version, type=int) if version is not None else 0
        if schema_version > SCHEMA_VERSION:
            raise ArtifactSchemaNewerError(
                f"{path} has artifact schema {schema_version}, this bei reads up to {SCHEMA_VERSION}: "
                "upgrade bei, or build the artifact again with this one."
            )
        if schema_version < SCHEMA_VERSION:
            raise UnfitError(f"it has schema {schema_version}")
        manifest = _manifest_decoder.decode(raw)
    except _UNREADABLE as error:
        raise ArtifactManifestError(
            f"{file} is not a manifest of schema {SCHEMA_VERSION} ({error}). Build the artifact again."
        ) from error
    if _encode(manifest) != raw or manifest.digest != _digest(manifest):
        raise ArtifactHashMismatchError(
            f"{file} was changed after the build. Build the artifact again, or copy it anew from its source."
        )
    if fault := manifest_fault(manifest):
        raise ArtifactManifestError(f"{file} is not valid: {fault}. Build the artifact again.")
    return manifest


def _has_certificate_of(path: Path, manifest: Manifest) -> bool:
    listed = {info.path: info for info in manifest.files}
    for name in (CERTIFICATE, CERTIFICATE_PAGE):
        file, said = path / name, listed.get(name)
        if said is None or said.size > MOST_JSON_BYTES or not file.is_file() or file.stat().st_size != said.size:
            return False
        if sha256_of_file(file) != said.sha256:
            return False
    return True


def load(path: Path) -> Artifact:
    """Verify and return the artifact at ``path``: manifest, signature, then every file's size and sha256.

    Every file is hashed once. Raises the errors of ``load_manifest``, ArtifactFileMissingError, ArtifactSignatureError,
    ArtifactFileUnlistedError and ArtifactHashMismatchError.
    """
    manifest = load_manifest(path)
    hashed: tuple[str, ...] = (CERTIFICATE, CERTIFICATE_PAGE)
    if not _has_certificate_of(path, manifest):
        with _alone(path):  # another process may be replacing the certificate
            manifest, hashed = load_manifest(path), ()
    signed = read_signature(path, manifest.digest)
    check_files(path, manifest)
    for info in manifest.files:
        if info.path in hashed:
            continue
        file = path / info.path
        if not file.is_file():
            raise ArtifactFileMissingError(
                f"{path} lacks {info.path}, which its manifest lists. Copy the artifact anew from its source, or "
                "build it again."
            )
        if file.stat().st_size != info.size or sha256_of_file(file) != info.sha256:
            raise ArtifactHashMismatchError(
                f"{file} is not the file that was built (size or sha256 differs). "
                "Copy the artifact anew from its source, or build it again."
            )
    listed = {info.path for info in manifest.files}
    for required in (TOKENIZER, CERTIFICATE, CERTIFICATE_PAGE):
        if required not in listed:
            raise ArtifactManifestError(f"{path / MANIFEST} does not list {required}. Build the artifact again.")
    certificate = _certificate_of(path, manifest)
    return load(path) if certificate is None else Artifact(path, manifest, certificate, signed)


def _certificate_of(path: Path, manifest: Manifest) -> Certificate | None:
    """The certificate; None if another process has replaced it since the files were hashed."""
    file = path / CERTIFICATE
    try:
        raw = read_bounded(file)
        said = next(info.sha256 for info in manifest.files if info.path == CERTIFICATE)
        if hashlib.sha256(raw).hexdigest() != said:
            return None
        json.loads(raw, object_pairs_hook=unique_keys)  # msgspec accepts duplicate keys
        certificate = _certificate_decoder.decode(raw)
    except _UNREADABLE as error:
        raise ArtifactManifestError(f"{file} cannot be read ({error}). Build it again.") from error
    if fault := certificate_fault(manifest, certificate):
        raise ArtifactManifestError(f"{file} is not valid: {fault}. Build it again.")
    return certificate
