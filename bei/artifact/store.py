"""Artifacts on disk: saving, loading with verification, signing, new certificates."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bei.artifact.certificate.page import certificate_page
from bei.artifact.certificate.record import (
    Certificate,
)
from bei.artifact.certificate.reliability import CalibratedTask, ProbabilityCalibration, reliability_fault
from bei.artifact.certificate_faults import certificate_fault
from bei.artifact.held_files import FileInfo, HeldFiles, open_files, read_file
from bei.artifact.signature import SIGNATURE, read_signature, write_signature
from bei.artifact.validation import check_files, manifest_fault
from bei.errors import (
    ArtifactError,
    ArtifactFileMissingError,
    ArtifactHashMismatchError,
    ArtifactManifestError,
    ArtifactSchemaNewerError,
    ArtifactSignatureError,
)
from bei.utils.durable_files import sync_folder, write_to_disk
from bei.utils.untrusted_files import UnfitError, read_bounded, unique_keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from bei.artifact.manifest import (
    CERTIFICATE,
    CERTIFICATE_PAGE,
    MANIFEST,
    SCHEMA_VERSION,
    TOKENIZER,
    Artifact,
    Manifest,
)

log = logging.getLogger(__name__)

Temperatures = dict[CalibratedTask, float]

# Folders of new files, by what begins their names (``validation`` allows both), and the one whose files are complete.
_CERTIFYING, _SIGNING = ".certificate.", ".signature."
_COMPLETE = f"{_CERTIFYING}complete"
# Of a digest, in the log.
SHOWN_DIGITS = 12


def _encode(record: Manifest | Certificate) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def certificate_html(manifest: Manifest, certificate: Certificate) -> str:
    """The content of ``certificate.html``."""
    source, engine = manifest.source, manifest.engine
    facts = [
        ("Model", f"{source.model}, {source.revision}" if source.revision else source.model),
        ("Architecture", manifest.spec.architecture),
        *((f"Scale of adapter {name}", str(scale)) for name, scale in (manifest.spec.adapter_scales or {}).items()),
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
    """Replace the certificate of the artifact on disk, but for its records of calibration, which stay those on disk.
    Raises as ``_rewrite``."""
    return _rewrite(
        artifact, lambda now: (msgspec.structs.replace(certificate, probabilities=now.certificate.probabilities), None)
    )


def add_calibration(artifact: Artifact, record: ProbabilityCalibration) -> Artifact:
    """Write a fitted temperature and its record into the artifact on disk, in place of those of the same task. Raises
    as ``_rewrite``."""

    def added(now: Artifact) -> tuple[Certificate, Temperatures]:
        others = [one for one in now.certificate.probabilities or [] if one.task != record.task]
        certificate = msgspec.structs.replace(now.certificate, probabilities=[*others, record])
        return certificate, {**(now.manifest.temperatures or {}), record.task: record.temperature}

    return _rewrite(artifact, added)


def _rewrite(artifact: Artifact, change: Callable[[Artifact], tuple[Certificate, Temperatures | None]]) -> Artifact:
    """Replace certificate, page and manifest on disk by what ``change`` makes of the artifact as it is there now:
    certificate, and temperatures (None: as they are).

    A lock admits one process at a time, so that none drops what another has written since ``artifact`` was read. Files
    are replaced one by one, the manifest last: what a process killed in between leaves is completed by who loads or
    rewrites the artifact next (``_complete``). Raises OSError; ArtifactSignatureError for a signed artifact, whose
    signature would not match; ArtifactError if another build lies there, or a file of it was changed.
    """
    path = artifact.path
    with _alone(path):
        check_in_place(artifact)
        if os.path.lexists(path / SIGNATURE):
            raise ArtifactSignatureError(
                f"{path} is signed, and its new manifest would not be: delete {SIGNATURE}, repeat this, and sign again "
                "with 'bei sign'."
            )
        _complete(path)
        manifest = load_manifest(path)
        now = msgspec.structs.replace(
            artifact,
            manifest=manifest,
            certificate=_certificate_of(path, manifest, _certificate_content(path, manifest)),
        )
        certificate, temperatures = change(now)
        contents = _certificate_files(manifest, certificate)
        manifest = _resealed(manifest, certificate, contents, temperatures)
        contents[MANIFEST] = _encode(manifest)
        _remove_leftovers(path, _CERTIFYING)
        with tempfile.TemporaryDirectory(prefix=_CERTIFYING, dir=path) as scratch:
            for name, content in contents.items():
                write_to_disk(Path(scratch) / name, content)
            sync_folder(Path(scratch))
            os.rename(scratch, path / _COMPLETE)
        _complete(path)
        sync_folder(path)
    return msgspec.structs.replace(artifact, manifest=manifest, certificate=certificate)


def _complete(path: Path) -> None:
    """Replace files by those of a rewrite, the manifest last; a rewrite whose process was killed may have replaced
    some. Files of another build, which lay at ``path`` before, are removed. The caller holds the lock. Raises OSError;
    ArtifactError where ``path`` has no manifest."""
    complete = path / _COMPLETE
    if complete.is_symlink() or not complete.is_dir():
        return
    if _build_of(complete) == files_to_hold(load_manifest(path)):
        for name in (CERTIFICATE, CERTIFICATE_PAGE, MANIFEST):
            with suppress(FileNotFoundError):
                os.replace(complete / name, path / name)
    shutil.rmtree(complete, ignore_errors=True)


def _build_of(complete: Path) -> list[FileInfo] | None:
    """The files of the build that a rewrite was of; None: its manifest is in place already."""
    try:
        return files_to_hold(load_manifest(complete))
    except ArtifactError:
        return None


def _remove_leftovers(path: Path, prefix: str) -> None:
    """Remove folders that killed processes have left. The caller holds the lock."""
    for left in path.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)


def _resealed(
    manifest: Manifest, certificate: Certificate, contents: Mapping[str, bytes], temperatures: Temperatures | None
) -> Manifest:
    new = {
        name: FileInfo(path=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    files = [new.get(info.path, info) for info in manifest.files]
    kept = manifest.temperatures if temperatures is None else temperatures
    return _sealed(msgspec.structs.replace(manifest, files=files, verification=certificate.kind, temperatures=kept))


def sign(artifact: Artifact, key: Ed25519PrivateKey) -> Artifact:
    """Sign the artifact on disk, replacing any signature. Raises OSError; ArtifactError if its manifest was replaced
    since ``artifact`` was read: a signature says that its files were checked."""
    with _alone(artifact.path, must_lock=False) as is_locked:  # one file, replaced at once
        if is_locked:
            _complete(artifact.path)
            _remove_leftovers(artifact.path, _SIGNING)
        if load_manifest(artifact.path).digest != artifact.manifest.digest:
            raise ArtifactError(f"{artifact.path} was changed while it was read: run 'bei sign' again.")
        with tempfile.TemporaryDirectory(prefix=_SIGNING, dir=artifact.path) as scratch:
            signed = write_signature(artifact.path, artifact.manifest.digest, key, Path(scratch))
    return msgspec.structs.replace(artifact, signed=signed)


@contextmanager
def _alone(folder: Path, *, must_lock: bool = True) -> Iterator[bool]:
    """A lock on ``folder`` between processes; on a file system without locks none (False), or OSError if
    ``must_lock``."""
    descriptor, is_locked = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            is_locked = False
            if must_lock:
                raise OSError(
                    f"{folder} cannot be locked ({error.strerror}), so that others could write it too: change a copy "
                    "of it on another file system, and move it there."
                ) from error
        yield is_locked
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
        lacks = f"it has no {MANIFEST}" if path.exists() else "it does not exist"
        raise ArtifactFileMissingError(f"{path} is not an artifact: {lacks}. Make one with 'bei build'.")
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


def files_to_hold(manifest: Manifest) -> list[FileInfo]:
    """The files of ``manifest`` that an artifact holds open. None of them changes with a new certificate."""
    return [info for info in manifest.files if info.path not in (CERTIFICATE, CERTIFICATE_PAGE)]


def load(path: Path, *, sealed: bool = False) -> Artifact:
    """Verify and return the artifact at ``path``: manifest, signature, then every file's size and sha256. It holds the
    files that were hashed.

    Every file is opened and hashed once. ``sealed``: as in ``bei.artifact.held_files.open_files``. Raises the errors of
    ``load_manifest`` and ``open_files``, ArtifactSignatureError and ArtifactFileUnlistedError.
    """
    manifest = load_manifest(path)
    raw = _certificate_if_whole(path, manifest)
    if raw is None:
        with _alone(path, must_lock=False) as is_locked:  # another process may be replacing the certificate
            if is_locked:
                with suppress(OSError):  # whoever cannot write is told what is wrong
                    _complete(path)
            manifest = load_manifest(path)
            raw = _certificate_if_whole(path, manifest)
    signed = read_signature(path, manifest.digest)
    check_files(path, manifest)
    certificate = _certificate_of(path, manifest, _certificate_content(path, manifest) if raw is None else raw)
    if manifest.reads_texts:
        _listed(path, manifest, TOKENIZER)
    return Artifact(path, manifest, certificate, signed, open_files(path, files_to_hold(manifest), sealed=sealed))


def check_in_place(artifact: Artifact) -> None:
    """Raise ArtifactError if another build lies where ``artifact`` was read. A new certificate is no other build."""
    if files_to_hold(load_manifest(artifact.path)) != files_to_hold(artifact.manifest):
        raise ArtifactError(f"Another build lies in {artifact.path} now: load that one.")


@contextmanager
def received(artifact: Artifact, descriptors: Sequence[int]) -> Iterator[Artifact]:
    """``artifact`` with the files that another process has verified and lent (``HeldFiles.lent``), within the block."""
    try:
        check_in_place(artifact)
    except (ArtifactError, OSError):
        log.warning(
            "%s: %s was replaced; opened is the artifact that is served, %s. Send SIGHUP to have the other one served",
            *(artifact.manifest.name, artifact.path, artifact.manifest.digest[:SHOWN_DIGITS]),
        )
    held = HeldFiles(artifact.path, files_to_hold(artifact.manifest), descriptors)
    try:
        yield msgspec.structs.replace(artifact, files=held)
    finally:
        held.close()


def _listed(path: Path, manifest: Manifest, name: str) -> FileInfo:
    found = next((info for info in manifest.files if info.path == name), None)
    if found is None:
        raise ArtifactManifestError(f"{path / MANIFEST} does not list {name}. Build the artifact again.")
    return found


def _certificate_content(path: Path, manifest: Manifest) -> bytes:
    """The certificate of ``manifest``, if its page is that of ``manifest`` too. Raises ArtifactError."""
    read_file(path, _listed(path, manifest, CERTIFICATE_PAGE))
    return read_file(path, _listed(path, manifest, CERTIFICATE))


def _certificate_if_whole(path: Path, manifest: Manifest) -> bytes | None:
    try:
        return _certificate_content(path, manifest)
    except (ArtifactError, OSError):  # a link to itself, say: ``check_files`` says what is wrong
        return None


def _certificate_of(path: Path, manifest: Manifest, raw: bytes) -> Certificate:
    file = path / CERTIFICATE
    try:
        json.loads(raw, object_pairs_hook=unique_keys)  # msgspec accepts duplicate keys
        certificate = _certificate_decoder.decode(raw)
    except _UNREADABLE as error:
        raise ArtifactManifestError(f"{file} cannot be read ({error}). Build it again.") from error
    fault = reliability_fault(manifest.temperatures or {}, certificate.probabilities or [])
    if fault := certificate_fault(manifest, certificate) or fault:
        raise ArtifactManifestError(f"{file} is not valid: {fault}. Build it again.")
    return certificate
