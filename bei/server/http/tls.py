"""TLS: certificate, key and client authorities, read at start and again on SIGHUP.

Each read makes a new context, which replaces the old one once it is complete. A context changed in place would already
have the new certificate when its key turns out to belong to another one.
"""

from __future__ import annotations

import logging
import re
import ssl
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from bei.config.settings import ServeConfig
from bei.errors import ConfigError
from bei.server.http.x509_dates import validity
from bei.utils.named_files import MOST_AUTHORITIES_BYTES, MOST_KEY_BYTES, named_bytes
from bei.utils.threads import off_loop

log = logging.getLogger(__name__)

_CERTIFICATE = re.compile(b"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(b"-----BEGIN [A-Z ]*PRIVATE KEY-----")

# Seconds from the last byte to the client's close_notify; then the connection is cut off.
SHUTDOWN_S = 2.0


class Pem(NamedTuple):
    """The contents of the files. ``client_ca`` None: clients need no certificate."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


class TLS:
    """The ``context`` of new connections, what it is made of (``pem``), and the seconds that each has for its
    handshake (``handshake_s``).

    Raises ConfigError if the files cannot be used.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None, handshake_s: float) -> None:
        self.handshake_s = handshake_s
        self._files = cert, key, client_ca
        self.context, self.pem = self._read()

    def _read(self) -> tuple[ssl.SSLContext, Pem]:
        context, pem = _context(*self._files)
        _warn_of_dates(self._files[0], pem.cert)
        return context, pem

    async def reload(self) -> None:
        """Read the files again. If they cannot be used, the old context stays and the error is logged."""
        try:
            self.context, self.pem = await off_loop(self._read)
        except ConfigError as error:
            log.error("the certificate stays as it was, the new one cannot be used: %s", error)
            return
        log.info("the certificate was read anew")


def tls_of(config: ServeConfig) -> TLS | None:
    """The TLS that ``config`` asks for; None: it asks for none. Raises ConfigError."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return TLS(config.tls_cert, config.tls_key, config.tls_client_ca, config.header_timeout)


def check_tls(config: ServeConfig) -> None:
    """Raise ConfigError where ``tls_of`` would."""
    if config.tls_cert is not None and config.tls_key is not None:
        _context(config.tls_cert, config.tls_key, config.tls_client_ca)


def _context(cert: str, key: str, client_ca: str | None) -> tuple[ssl.SSLContext, Pem]:
    pem = _pem_of(cert, key, client_ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, cert, key)
    if client_ca is not None:
        _load_authorities(context, client_ca)
    if _pem_of(cert, key, client_ca) != pem:  # the context takes paths alone
        raise ConfigError("tls_cert, tls_key or tls_client_ca has changed while they were read: have them read again.")
    return context, pem


def _pem_of(cert: str, key: str, client_ca: str | None) -> Pem:
    authorities = None if client_ca is None else named_bytes("tls_client_ca", client_ca, MOST_AUTHORITIES_BYTES)
    pem = Pem(named_bytes("tls_cert", cert, MOST_KEY_BYTES), named_bytes("tls_key", key, MOST_KEY_BYTES), authorities)
    for setting, path, content in (("tls_cert", cert, pem.cert), ("tls_client_ca", client_ca, pem.client_ca)):
        if content is not None and _CERTIFICATE.search(content) is None:
            raise ConfigError(f"{setting} {path} has no certificate in PEM form (-----BEGIN CERTIFICATE-----).")
    if _KEY.search(pem.key) is None:
        raise ConfigError(f"tls_key {key} has no private key in PEM form (-----BEGIN PRIVATE KEY-----).")
    return pem


def _load_chain(context: ssl.SSLContext, cert: str, key: str) -> None:
    is_encrypted = False

    def password() -> str:  # without it OpenSSL would ask on the terminal
        nonlocal is_encrypted
        is_encrypted = True
        return ""

    try:
        context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser(), password)
    except (OSError, ValueError) as error:  # OSError: ssl.SSLError, and a file that was taken away just now
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "unreadable"
        if is_encrypted:
            raise ConfigError(f"tls_key {key} is encrypted: store it without a passphrase.") from None
        if "MISMATCH" in reason:
            raise ConfigError(
                f"tls_key {key} does not belong to tls_cert {cert}: give the key of that certificate."
            ) from None
        raise ConfigError(f"tls_cert {cert} and tls_key {key} cannot be used ({reason}): make them anew.") from None


def _load_authorities(context: ssl.SSLContext, client_ca: str) -> None:
    try:
        context.load_verify_locations(Path(client_ca).expanduser())
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror
        raise ConfigError(f"tls_client_ca {client_ca} cannot be used ({reason}): make it anew.") from None
    context.verify_mode = ssl.CERT_REQUIRED


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _warn_of_dates(path: str, pem: bytes) -> None:
    first = _CERTIFICATE.search(pem)
    assert first is not None  # it was looked for
    try:
        found = validity(ssl.PEM_cert_to_DER_cert(first[0].decode("ascii", errors="replace")))
    except ValueError:  # Python is stricter about base64 than OpenSSL
        found = None
    if found is None:
        return  # OpenSSL has accepted the certificate: only the warning is left out
    begins, ends = found
    now = _now()
    if now > ends:
        log.warning("tls_cert %s has expired on %s: clients will refuse it", path, ends.isoformat())
    elif now < begins:
        log.warning("tls_cert %s is valid from %s on: clients will refuse it", path, begins.isoformat())
