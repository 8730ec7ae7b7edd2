"""Certificates for tests, made by the ``openssl`` command in a second; tests that need them are skipped without it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its private key."""

    cert: Path
    key: Path


def openssl(*arguments: object) -> str:
    """Run the command; returns what it prints."""
    found = shutil.which("openssl")
    if found is None:
        pytest.skip("the command openssl is not installed")
    command = [found, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def make_authority(folder: Path, name: str = "authority") -> Pair:
    """A certificate that signs others."""
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    openssl("req", "-x509", *_EC, "-subj", f"/CN={name}", "-days", "7", "-keyout", pair.key, "-out", pair.cert)
    return pair


def make_certificate(folder: Path, name: str, authority: Pair) -> Pair:
    """For ``name``, localhost and 127.0.0.1, as a server's and as a client's."""
    pair, request = Pair(folder / f"{name}.crt", folder / f"{name}.key"), folder / f"{name}.csr"
    extensions = folder / f"{name}.ext"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl("req", *_EC, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", request)
    signer = ("-CA", authority.cert, "-CAkey", authority.key, "-CAcreateserial")
    openssl("x509", "-req", "-in", request, *signer, "-days", "2", "-extfile", extensions, "-out", pair.cert)
    return pair
