"""``signature.json``: an Ed25519 signature of the manifest's digest, with its public key.

The digest covers the manifest, which lists every file with its sha256: the signature covers the artifact. A signature
that is present is always checked, even if none is required: an invalid one shows a change after signing. Only trusted
keys prove who signed (``check_trusted``).
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bei.artifact.signing_keys import EXTRA, fingerprint, from_openssh_line, openssh_line
from bei.errors import ArtifactSignatureError, ArtifactUntrustedError, MissingDependencyError
from bei.utils.durable_files import sync_folder, write_to_disk
from bei.utils.libraries import importing
from bei.utils.untrusted_files import UnfitError, read_bounded, unique_keys, within

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE = "signature.json"
ALGORITHM = "ed25519"

_SCHEMA_VERSION = 1
# Domain separation: a prefix of the digest, so that the signature is valid for nothing else.
_DOMAIN = "bei-artifact-signature-v1:"
_MOST_BYTES = 10_000  # usual: 400
_PURPOSE = "Checking the signature of an artifact"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. ``public_key``: in OpenSSH's form; ``signature``: of ``_DOMAIN`` and ``digest``, in base64."""

    schema_version: int
    algorithm: str
    public_key: str
    digest: str
    signature: str


_record_decoder = msgspec.json.Decoder(_Record)


class ArtifactSignature(msgspec.Struct, frozen=True, kw_only=True):
    """The signature of an artifact. ``public_key``: 32 bytes. ``is_checked``: the signature is valid; False: unknown,
    because the package cryptography is not installed."""

    algorithm: str
    public_key: bytes
    is_checked: bool

    @property
    def key(self) -> str:
        """The key's fingerprint, ``SHA256:...``."""
        return fingerprint(self.public_key)


def write_signature(folder: Path, digest: str, key: Ed25519PrivateKey, scratch: Path) -> ArtifactSignature:
    """Sign the artifact in ``folder``, whose manifest has ``digest``. The file is written in ``scratch``, a folder of
    the same file system, and put in place at once. Raises OSError."""
    public_key = key.public_key().public_bytes_raw()
    record = _Record(
        schema_version=_SCHEMA_VERSION,
        algorithm=ALGORITHM,
        public_key=openssh_line(public_key),
        digest=digest,
        signature=base64.b64encode(key.sign(_message(digest))).decode(),
    )
    file = scratch / SIGNATURE
    write_to_disk(file, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    os.replace(file, folder / SIGNATURE)
    sync_folder(folder)
    return ArtifactSignature(algorithm=ALGORITHM, public_key=public_key, is_checked=True)


def read_signature(folder: Path, digest: str) -> ArtifactSignature | None:
    """The signature of the artifact in ``folder``, whose manifest has ``digest``; None: it has none.

    Raises ArtifactSignatureError if it is unreadable, belongs to another manifest, or is invalid.
    """
    file = folder / SIGNATURE
    if not os.path.lexists(file):  # a dangling link counts as a signature
        return None
    try:
        record = _decoded(read_bounded(within(folder, SIGNATURE), _MOST_BYTES))
        public_key = from_openssh_line(record.public_key)
        signature = base64.b64decode(record.signature, validate=True)
    except (msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:  # UnfitError is a ValueError
        raise ArtifactSignatureError(f"{file} cannot be read as a signature ({_line(error)}). {_REMEDY}") from error
    if record.digest != digest:
        raise ArtifactSignatureError(
            f"{file} does not match the manifest: it belongs to another artifact, or this one was changed after it "
            f"was signed. {_REMEDY}"
        )
    is_good = _holds(public_key, signature, digest)
    if is_good is False:
        raise ArtifactSignatureError(
            f"{file} is not valid: the key {fingerprint(public_key)} has not signed this artifact. {_REMEDY}"
        )
    return ArtifactSignature(algorithm=record.algorithm, public_key=public_key, is_checked=is_good is not None)


_REMEDY = "Copy the artifact anew from its source; if you know what was changed, delete this file and sign again."


def check_trusted(folder: Path, signed: ArtifactSignature | None, trusted: Set[bytes]) -> None:
    """Raise ArtifactUntrustedError unless the artifact in ``folder`` is ``signed`` by one of the ``trusted`` keys (32
    bytes each); MissingDependencyError if its signature could not be checked."""
    if signed is None:
        raise ArtifactUntrustedError(
            f"{folder} is not signed, and only artifacts signed by {_named(trusted)} are served: sign it with "
            "'bei sign', or leave require_signature out."
        )
    if signed.public_key not in trusted:
        raise ArtifactUntrustedError(
            f"{folder} is signed by {signed.key}, and only artifacts signed by {_named(trusted)} are served: sign it "
            "again with one of these, or trust that key too."
        )
    if not signed.is_checked:
        raise MissingDependencyError("cryptography", EXTRA, _PURPOSE)


def _decoded(raw: bytes) -> _Record:
    content = json.loads(raw, object_pairs_hook=unique_keys)
    if not isinstance(content, dict):
        raise UnfitError("it is not a JSON object")
    if content.get("schema_version") != _SCHEMA_VERSION:
        raise UnfitError(f"its schema_version is not {_SCHEMA_VERSION}, the only one that this bei reads")
    if content.get("algorithm") != ALGORITHM:
        raise UnfitError(
            f"its algorithm is {str(content.get('algorithm'))[:40]!a}, and this bei knows {ALGORITHM} only"
        )
    return _record_decoder.decode(raw)


def _holds(public_key: bytes, signature: bytes, digest: str) -> bool | None:
    """True if the signature is valid; None: cryptography is not installed. Raises BrokenDependencyError."""
    modules = ("cryptography.exceptions", "cryptography.hazmat.primitives.asymmetric.ed25519")
    try:
        with importing("cryptography", EXTRA, _PURPOSE, modules=modules):
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except MissingDependencyError:
        return None
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _message(digest))
    except InvalidSignature:
        return False
    return True


def _message(digest: str) -> bytes:
    return (_DOMAIN + digest).encode()


def _named(keys: Set[bytes]) -> str:
    return " or ".join(sorted(map(fingerprint, keys)))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
