"""Ed25519 keys: private keys that sign, and public keys that are trusted.

Reading key files needs the package cryptography (extra ``sign``); the functions of a key's 32 bytes do not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import stat
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.errors import ConfigError
from bei.utils.libraries import importing
from bei.utils.named_files import MOST_KEY_BYTES, named_bytes
from bei.utils.untrusted_files import UnfitError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

EXTRA = "sign"
PASSPHRASE_VARIABLE = "BEI_SIGN_PASSPHRASE"

_TYPE = "ssh-ed25519"
# The beginning of a public key in OpenSSH's wire format: length and name of the type, length of the key.
_WIRE_HEAD = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
_KEY_BYTES = 32

_PEM = re.compile("-----BEGIN ([A-Z0-9 ]+)-----.+?-----END \\1-----", re.DOTALL)
_OPENSSH_TYPE = re.compile(r"(ssh|ecdsa|sk-ssh|sk-ecdsa)-[A-Za-z0-9@.-]+")


def fingerprint(public_key: bytes) -> str:
    """The fingerprint of a public key (32 bytes) in the form of ``ssh-keygen -l``: ``SHA256:...``."""
    digest = hashlib.sha256(_WIRE_HEAD + public_key).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def openssh_line(public_key: bytes) -> str:
    """A public key (32 bytes) as a line of an ``id_ed25519.pub``, without a comment."""
    return f"{_TYPE} {base64.b64encode(_WIRE_HEAD + public_key).decode()}"


def from_openssh_line(line: str) -> bytes:
    """The 32 bytes of the key in a line of an ``id_ed25519.pub``. Raises UnfitError."""
    kind, _, rest = line.strip().partition(" ")
    if kind != _TYPE:
        raise UnfitError(f"its type is {kind[:40]!a}, and must be {_TYPE}")
    try:
        wire = base64.b64decode(rest.split(" ")[0], validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnfitError("it is not base64") from error
    if not wire.startswith(_WIRE_HEAD) or len(wire) != len(_WIRE_HEAD) + _KEY_BYTES:
        raise UnfitError(f"it does not hold a key of {_KEY_BYTES} bytes")
    return wire[len(_WIRE_HEAD) :]


def private_key(file: str, passphrase: str | None = None, passphrase_file: str | None = None) -> Ed25519PrivateKey:
    """The key in ``file``: PEM (PKCS#8, as ``openssl genpkey -algorithm ed25519`` writes it) or OpenSSH's form.

    An encrypted key needs ``passphrase``, or ``passphrase_file``, whose first line is used. Raises ConfigError if the
    key is unusable, or the passphrase is missing, wrong or superfluous; MissingDependencyError.
    """
    serialization = _serialization("Signing an artifact")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = _passphrase(passphrase, passphrase_file)
    content = _content("The signing key", file)
    kind = next((match[1] for match in _PEM.finditer(content) if "PRIVATE KEY" in match[1]), None)
    if kind is None:
        raise ConfigError(f"The signing key {file} holds no private key in PEM form: make one ({_MAKE}).")
    load = serialization.load_ssh_private_key if "OPENSSH" in kind else serialization.load_pem_private_key
    try:
        key = load(content.encode(), secret)
    except TypeError:  # cryptography raises it for a missing and for a superfluous passphrase
        if secret is not None:
            raise ConfigError(f"The signing key {file} is not encrypted: leave the passphrase out.") from None
        raise ConfigError(
            f"The signing key {file} is encrypted: give its passphrase in {PASSPHRASE_VARIABLE}, or in a file."
        ) from None
    except ValueError:
        what = "its passphrase is wrong, or it is damaged" if secret is not None else "it is damaged"
        raise ConfigError(f"The signing key {file} cannot be read: {what}.") from None
    except UnsupportedAlgorithm as error:
        raise ConfigError(f"The signing key {file} cannot be read ({error}): store it in PEM form ({_MAKE}).") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"The signing key {file} is a key for {_kind(key)}, not for Ed25519: make one ({_MAKE}).")
    return key


_MAKE = "openssl genpkey -algorithm ed25519"


def exposure(file: str) -> str | None:
    """A warning if every user of the machine can read the private key ``file``; else None.

    It is not an error: secrets mounted by Kubernetes are world-readable by default, inside a container that isolates
    them.
    """
    try:
        mode = Path(file).expanduser().stat().st_mode
    except OSError:
        return None  # reading it will report the problem
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        return f"the signing key {file} can be read by every user of this machine: chmod 600 {file}"
    return None


def trusted_keys(files: Seq[str]) -> frozenset[bytes]:
    """The public keys in ``files``, 32 bytes each. A file holds one or more, in PEM or as OpenSSH lines.

    Raises ConfigError if a file is unreadable, holds no key, or one that is not a public Ed25519 key;
    MissingDependencyError, because signatures could not be checked.
    """
    serialization = _serialization("Requiring signatures")
    return frozenset(key for file in files for key in _public_keys(file, serialization))


def _public_keys(file: str, serialization: Any) -> Iterator[bytes]:
    content = _content("The trusted key", file)
    found = [*_of_pem(file, content, serialization), *_of_lines(file, _PEM.sub("", content))]
    if not found:
        raise ConfigError(f"The trusted key {file} holds no key: put a public key there, in PEM or as {_TYPE} ....")
    yield from found


def _of_pem(file: str, content: str, serialization: Any) -> Iterator[bytes]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    for match in _PEM.finditer(content):
        if "PRIVATE" in match[1]:
            raise ConfigError(
                f"The trusted key {file} holds a private key: give the public one, and keep this one off servers."
            )
        try:
            key = serialization.load_pem_public_key(match[0].encode())
        except (ValueError, UnsupportedAlgorithm):
            what = f"a {match[1].lower()} that is no public key for Ed25519"
            raise ConfigError(
                f"The trusted key {file} holds {what}: give a public key (openssl pkey -pubout)."
            ) from None
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(f"The trusted key {file} holds a key for {_kind(key)}: give a public key for Ed25519.")
        yield key.public_bytes_raw()


def _of_lines(file: str, content: str) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not _OPENSSH_TYPE.match(line.strip()):
            raise ConfigError(
                f"The trusted key {file} has a line {number} that is not a key: give keys in PEM, or as {_TYPE} ...."
            )
        try:
            yield from_openssh_line(line)
        except UnfitError as error:
            raise ConfigError(
                f"The trusted key {file} has a key in line {number} that cannot be used: {error}."
            ) from None


def _passphrase(passphrase: str | None, file: str | None) -> bytes | None:
    if passphrase is not None and file is not None:
        raise ConfigError(f"The signing key's passphrase is in {PASSPHRASE_VARIABLE} and in a file: keep one of them.")
    if file is not None:
        passphrase = (_content("The passphrase of the signing key", file).splitlines() or [""])[0]
    if passphrase == "":
        raise ConfigError(f"The signing key's passphrase ({PASSPHRASE_VARIABLE}, or its file) is empty: leave it out.")
    return None if passphrase is None else passphrase.encode()


def _content(what: str, file: str) -> str:
    """The content of ``file``, which messages never quote."""
    content = named_bytes(what, file, MOST_KEY_BYTES, may_be_pipe=True)  # --sign <(fetch the key)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {file} is no text: give it in PEM form (openssl pkey -inform DER).") from None


def _kind(key: object) -> str:
    """The kind of a key by its class: ``RSA`` for RSAPrivateKey."""
    return re.sub(r"(Private|Public)Key$", "", type(key).__name__).strip("_")


def _serialization(purpose: str) -> Any:
    with importing("cryptography", EXTRA, purpose, modules=("cryptography.hazmat.primitives",)):
        from cryptography.hazmat.primitives import serialization
    return serialization
