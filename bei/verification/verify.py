"""Completes a pending verification on the target device: ``bei verify``, or the first ``bei serve``."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

from bei.artifact import store
from bei.artifact.certificate.record import Certificate
from bei.artifact.certificate.thresholds import remedies
from bei.artifact.manifest import Artifact
from bei.artifact.signature import SIGNATURE
from bei.core import Engine
from bei.engine.load import load_engine
from bei.errors import ArtifactSignatureError, VerificationError
from bei.utils.full_disk import naming_full_disk
from bei.utils.share_done import ShareDone, Tell, untold
from bei.verification.stored_answers import check_stored, complete_certificate, may_be_served

log = logging.getLogger(__name__)


def verify(path: Path, tell: Tell = untold) -> tuple[Artifact, bool]:
    """Compare the engine of the artifact at ``path`` with the stored reference answers, and write the certificate.

    Returns the artifact and whether it may be served. ``tell``: called as texts are answered. Raises the errors of
    ``bei.verification.stored_answers.complete_certificate``; ArtifactError, DeviceNotFoundError,
    MissingDependencyError; OSError if the folder is read-only; ArtifactSignatureError for a signed artifact, whose
    signature a new certificate would invalidate.
    """
    artifact = store.load(path)
    if artifact.signed is not None:
        raise ArtifactSignatureError(
            f"{path} is signed by {artifact.signed.key}, and a new certificate would not be: delete {SIGNATURE}, "
            "verify, and sign again with 'bei sign'."
        )
    check_stored(artifact)  # before gigabytes are loaded by a library that may be missing
    with closing(load_engine(artifact.engine_files, artifact.manifest)) as engine:
        artifact.check_files()
        completed, is_good = complete_certificate(artifact, engine, tell)
    with naming_full_disk(path):
        return store.recertify(artifact, completed.certificate), is_good


def verified(artifact: Artifact, engine: Engine) -> Artifact:
    """``artifact``, with a pending certificate completed by ``engine``.

    Raises VerificationError if the engine fails, or failed in an earlier comparison. An artifact that is read-only or
    signed keeps its old certificate on disk, and is verified at each start.
    """
    name = artifact.manifest.name
    if artifact.certificate.kind != "pending":
        if not may_be_served(artifact):
            raise VerificationError(failure_of(name, artifact.certificate))
        if artifact.certificate.device != engine.info.device:
            log.info(
                "%s: its certificate was made on %s, this machine has %s; the canary text shows whether both give "
                "the same results",
                name,
                artifact.certificate.device,
                engine.info.device,
            )
        return artifact
    log.info("%s: verifying its engine on %s, which the build could not do", name, engine.info.device)
    tell = ShareDone(log=lambda words: log.info("%s: verifying: %s", name, words))
    completed, is_good = complete_certificate(artifact, engine, tell)
    if not is_good:
        raise VerificationError(failure_of(name, completed.certificate))
    if artifact.signed is not None:
        log.info("%s: its certificate is not written, since it is signed: it is verified at every start", name)
        return completed
    try:
        return store.recertify(artifact, completed.certificate)
    except (OSError, ArtifactSignatureError) as error:
        log.warning(
            "%s: its certificate cannot be written into %s (%s): it is verified at every start",
            name,
            artifact.path,
            error,
        )
        return completed


def failure_of(name: str, certificate: Certificate) -> str:
    """The message that refuses an engine below its thresholds."""
    return (
        f"{name} differs from its reference ({certificate.reference}) on {certificate.device}: "
        f"{'; '.join(certificate.failures)}. Build it again: {', or '.join(remedies(certificate))}."
    )
