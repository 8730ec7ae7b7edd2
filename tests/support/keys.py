"""Keys for tests of signatures, made in memory and written as users have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


@dataclass(frozen=True)
class KeyPair:
    """An Ed25519 key, and its two files in PEM form."""

    key: Ed25519PrivateKey
    private: Path
    public: Path

    @property
    def raw(self) -> bytes:
        """The 32 bytes of the public key."""
        return self.key.public_key().public_bytes_raw()


def make_keys(folder: Path, name: str = "key", *, passphrase: str | None = None) -> KeyPair:
    """A new key. Its private file is for its owner alone."""
    key = Ed25519PrivateKey.generate()
    pair = KeyPair(key, folder / f"{name}.pem", folder / f"{name}.pub")
    encryption = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase.encode())
    pair.private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    pair.private.chmod(0o600)
    pair.public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return pair
