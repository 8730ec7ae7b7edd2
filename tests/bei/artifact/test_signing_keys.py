"""Key files: which are accepted, and errors for the others, which never quote a file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from bei.artifact.signing_keys import exposure, fingerprint, from_openssh_line, openssh_line, private_key, trusted_keys
from bei.errors import ConfigError, MissingDependencyError
from bei.utils.untrusted_files import UnfitError
from tests.support.keys import KeyPair, make_keys

PKCS8 = PrivateFormat.PKCS8
SPKI = PublicFormat.SubjectPublicKeyInfo


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return make_keys(tmp_path)


def as_line(keys: KeyPair) -> str:
    return keys.key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


# By their 32 bytes.


def test_a_public_key_is_written_as_openssh_writes_it(keys: KeyPair) -> None:
    assert openssh_line(keys.raw) == as_line(keys)
    assert from_openssh_line(f" {as_line(keys)} somebody@somewhere\n") == keys.raw


def test_a_fingerprint_is_that_of_ssh_keygen() -> None:
    """Of the key whose bytes count from 0, as ``ssh-keygen -l`` says it."""
    assert fingerprint(bytes(range(32))) == "SHA256:ZkAslGjFiUHdGf/WUL8rQvkib4PTvQatUV0OUQSncCA"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "its type is ''"),
        ("ssh-rsa AAAA", "its type is 'ssh-rsa', and must be ssh-ed25519"),
        ("ssh-ed25519", "does not hold a key of 32 bytes"),
        ("ssh-ed25519 AAAA", "does not hold a key of 32 bytes"),
        ("ssh-ed25519 \u00e9", "not base64"),
        (openssh_line(bytes(31)), "does not hold a key of 32 bytes"),
        (openssh_line(bytes(33)), "does not hold a key of 32 bytes"),
    ],
)
def test_a_line_that_is_no_such_key_is_refused(line: str, message: str) -> None:
    with pytest.raises(UnfitError, match=message):
        from_openssh_line(line)


# Private ones.


def test_a_private_key_is_read_in_pem_and_in_openssh_s_form(keys: KeyPair, tmp_path: Path) -> None:
    ssh = tmp_path / "id_ed25519"
    ssh.write_bytes(keys.key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    for file in (keys.private, ssh):
        assert private_key(str(file)).public_key().public_bytes_raw() == keys.raw


def test_an_encrypted_one_needs_its_passphrase(tmp_path: Path) -> None:
    keys, file = make_keys(tmp_path, passphrase="open é"), tmp_path / "passphrase"
    file.write_text("open é\nanother line\n", encoding="utf-8")
    for given in (("open é", None), (None, str(file))):
        assert private_key(str(keys.private), *given).public_key().public_bytes_raw() == keys.raw
    with pytest.raises(ConfigError, match=r"is encrypted: give its passphrase in BEI_SIGN_PASSPHRASE, or in a file"):
        private_key(str(keys.private))
    with pytest.raises(ConfigError, match="its passphrase is wrong") as caught:
        private_key(str(keys.private), "shut")
    assert "shut" not in str(caught.value)


def test_a_passphrase_that_is_not_obeyed_is_refused(keys: KeyPair, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for given, message in (
        (("needless", None), "is not encrypted: leave the passphrase out"),
        (("one", str(empty)), "keep one of them"),
        (("", None), "is empty"),
        ((None, str(empty)), "is empty"),
        ((None, str(tmp_path / "absent")), "absent cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            private_key(str(keys.private), *given)


def test_a_private_key_of_another_kind_is_named(tmp_path: Path) -> None:
    others: dict[str, Any] = {
        "RSA": rsa.generate_private_key(65537, 2048),
        "EC": ec.generate_private_key(ec.SECP256R1()),
        "Ed448": ed448.Ed448PrivateKey.generate(),
        "X25519": x25519.X25519PrivateKey.generate(),
    }
    file = tmp_path / "key"
    for name, key in others.items():
        file.write_bytes(key.private_bytes(Encoding.PEM, PKCS8, NoEncryption()))
        with pytest.raises(ConfigError, match=rf"is a key for {name}\w*, not for Ed25519"):
            private_key(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no private key in PEM form"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "it is damaged"),
        (b"\xff\xfe", "is no text"),
        (b"x" * 1_000_001, "more than the 1,000,000 that are read"),
    ],
)
def test_a_file_that_is_no_private_key_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        private_key(str(file))


def test_a_public_key_does_not_sign(keys: KeyPair) -> None:
    with pytest.raises(ConfigError, match="no private key"):
        private_key(str(keys.public))


def test_a_key_that_everybody_can_read_is_warned_of(keys: KeyPair, tmp_path: Path) -> None:
    for mode, is_said in ((0o600, False), (0o640, False), (0o644, True), (0o604, True)):
        keys.private.chmod(mode)
        assert (exposure(str(keys.private)) is not None) == is_said, oct(mode)
    assert f"chmod 600 {keys.private}" in str(exposure(str(keys.private)))
    assert exposure(str(tmp_path / "absent")) is None


# Trusted ones.


def test_a_file_holds_one_key_or_several_in_either_form(tmp_path: Path) -> None:
    first, second, third = (make_keys(tmp_path, name) for name in ("first", "second", "third"))
    both = tmp_path / "both"
    both.write_text(f"# who builds here\n{as_line(second)} build@ci\n\n{third.public.read_text()}")
    assert trusted_keys([str(first.public)]) == {first.raw}
    assert trusted_keys([str(both)]) == {second.raw, third.raw}
    assert trusted_keys([str(both), str(first.public)]) == {first.raw, second.raw, third.raw}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no key: put a public key there"),
        ("# only a comment\n", "holds no key"),
        ("not a key\n", "line 1 that is not a key"),
        ("ssh-rsa AAAA me@here\n", "line 1 that cannot be used: its type is 'ssh-rsa'"),
        ("sk-ssh-ed25519@openssh.com AAAA\n", "its type is 'sk-ssh-ed25519@openssh.com'"),
        (
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
            "a public key that is no public key for Ed25519",
        ),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "a certificate that is no public key"),
    ],
)
def test_a_file_without_a_key_that_can_be_trusted_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trusted"
    file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        trusted_keys([str(file)])


def test_trusted_keys_of_another_kind_and_private_ones_are_refused(keys: KeyPair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a private key: give the public one"):
        trusted_keys([str(keys.private)])
    file = tmp_path / "ec"
    file.write_bytes(ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(Encoding.PEM, SPKI))
    with pytest.raises(ConfigError, match="holds a key for EC"):
        trusted_keys([str(keys.public), str(file)])
    with pytest.raises(ConfigError, match="absent cannot be read"):
        trusted_keys([str(tmp_path / "absent")])


def test_without_cryptography_the_extra_is_named(keys: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    for read in (lambda: private_key(str(keys.private)), lambda: trusted_keys([str(keys.public)])):
        with pytest.raises(MissingDependencyError, match=r"pip install 'bei\[sign\]'"):
            read()
