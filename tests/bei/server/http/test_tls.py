"""Certificates and keys: what cannot be used is one line that names the setting, and a reload never does harm."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from bei.errors import ConfigError
from bei.server.http import tls as module
from bei.server.http.tls import TLS
from bei.server.http.x509_dates import validity
from tests.support.tls_certificates import Pair, make_authority, make_certificate, openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, authority: Pair) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder, name, authority) for name in ("first", "second")}


@pytest.fixture
def pair(tmp_path: Path, made: dict[str, Pair]) -> Pair:
    """Files of a test's own."""
    found = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")
    put(found, made["first"])
    return found


def put(pair: Pair, other: Pair) -> None:
    shutil.copy(other.cert, pair.cert)
    shutil.copy(other.key, pair.key)


def tls(pair: Pair, client_ca: Path | None = None) -> TLS:
    return TLS(str(pair.cert), str(pair.key), None if client_ca is None else str(client_ca), 5.0)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """In memory; the client's end. Raises what either end does."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    ends[0].do_handshake()
    ends[1].do_handshake()
    return ends[0]


def client(authority: Pair, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.cert))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def test_a_client_that_knows_the_authority_is_connected_with_http_1_1(pair: Pair, authority: Pair) -> None:
    context = client(authority)
    context.set_alpn_protocols(["h2", "http/1.1"])
    end = handshake(tls(pair).context, context)
    assert end.version() == "TLSv1.3"
    assert end.selected_alpn_protocol() == "http/1.1"


def test_tls_1_2_is_the_oldest(pair: Pair, authority: Pair) -> None:
    context = client(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(tls(pair).context, context).version() == "TLSv1.2"
    assert tls(pair).context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_where_clients_need_a_certificate_only_those_of_the_authority_are_connected(
    pair: Pair, authority: Pair, made: dict[str, Pair], tmp_path: Path
) -> None:
    server = tls(pair, authority.cert).context
    stranger = make_certificate(tmp_path, "stranger", make_authority(tmp_path, "elsewhere"))
    oldest = ssl.TLSVersion.TLSv1_2  # whose handshake ends with the server's word
    for own, is_good in ((made["second"], True), (None, False), (stranger, False)):
        context = client(authority, own)
        context.maximum_version = oldest
        if is_good:
            handshake(server, context)
        else:
            with pytest.raises(ssl.SSLError):
                handshake(server, context)


def encrypted(pair: Pair) -> None:
    plain = shutil.copy(pair.key, pair.key.with_suffix(".plain"))
    openssl("pkey", "-in", plain, "-aes256", "-passout", "pass:secret", "-out", pair.key)


def of_another(pair: Pair) -> None:
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", pair.key)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pair: pair.cert.unlink(), "tls_cert .*cert.pem cannot be read: No such file"),
        (lambda pair: pair.key.unlink(), "tls_key .*key.pem cannot be read: No such file"),
        (lambda pair: pair.cert.write_text("nothing"), "tls_cert .* has no certificate in PEM form"),
        (lambda pair: pair.key.write_bytes(b"\xff\x00"), "tls_key .* has no private key in PEM form"),
        (lambda pair: shutil.copy(pair.key, pair.cert), "tls_cert .* has no certificate in PEM form"),
        (of_another, "tls_key .* does not belong to tls_cert"),
        (encrypted, "tls_key .* is encrypted: store it without a passphrase"),
        (lambda pair: pair.key.write_text(pair.key.read_text().replace("M", "!", 1)), "cannot be used|is not that of"),
        (lambda pair: pair.cert.write_text(cut(pair.cert.read_text())), "cannot be used"),
    ],
    ids=[
        "no cert",
        "no key",
        "cert no PEM",
        "key no PEM",
        "key as cert",
        "other key",
        "encrypted",
        "bad key",
        "bad cert",
    ],
)
def test_files_that_cannot_be_used_are_told_apart(pair: Pair, damage: object, message: str) -> None:
    damage(pair)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message) as caught:
        tls(pair)
    assert "\n" not in str(caught.value)


def cut(pem: str) -> str:
    """The same without some lines in the middle."""
    lines = pem.splitlines()
    return "\n".join(lines[:2] + lines[4:])


def test_an_authority_that_is_none_is_named(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_client_ca .*nowhere cannot be read"):
        tls(pair, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"tls_client_ca .* has no certificate"):
        tls(pair, pair.key)
    (tmp_path / "bad").write_text(cut(pair.cert.read_text()))
    with pytest.raises(ConfigError, match=r"tls_client_ca .* cannot be used"):
        tls(pair, tmp_path / "bad")


@pytest.mark.parametrize("method", ["load_cert_chain", "load_verify_locations"])
def test_a_file_that_is_taken_away_while_it_is_read_is_named(
    pair: Pair, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ssl.SSLContext, method, gone)
    with pytest.raises(ConfigError, match=r"tls_c.* cannot be used \(No such file or directory\)"):
        tls(pair, pair.cert)


def subject(server: TLS, authority: Pair) -> str:
    """Of the certificate that new connections get."""
    found = handshake(server.context, client(authority)).getpeercert()
    assert found is not None
    return str(dict(part[0] for part in found["subject"])["commonName"])  # type: ignore[misc]


def test_a_reload_takes_the_new_certificate_for_new_connections(
    pair: Pair, made: dict[str, Pair], authority: Pair
) -> None:
    server = tls(pair)
    before = server.context
    put(pair, made["second"])
    asyncio.run(server.reload())
    assert subject(server, authority) == "second"
    assert server.context is not before  # which connections under way still have


def test_where_the_new_files_cannot_be_used_the_old_certificate_stays(
    pair: Pair, made: dict[str, Pair], authority: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    server = tls(pair)
    shutil.copy(made["second"].cert, pair.cert)  # and its key is not there yet
    asyncio.run(server.reload())
    assert subject(server, authority) == "first"
    assert "the certificate stays as it was, the new one cannot be used: tls_key" in caplog.text


def test_files_that_change_while_they_are_read_are_not_used(
    pair: Pair,
    made: dict[str, Pair],
    authority: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = tls(pair)
    before, load = server.pem, ssl.SSLContext.load_cert_chain

    def changed(context: ssl.SSLContext, *files: Any) -> None:
        put(pair, made["second"])
        load(context, *files)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", changed)
    asyncio.run(server.reload())
    assert "has changed while they were read" in caplog.text
    assert (subject(server, authority), server.pem) == ("first", before)
    asyncio.run(server.reload())
    assert (subject(server, authority), server.pem.cert) == ("second", made["second"].cert.read_bytes())


@pytest.mark.parametrize(
    ("days", "warning"), [(0, None), (3, "has expired on"), (-1, "is valid from")], ids=["now", "later", "before"]
)
def test_a_certificate_that_clients_will_refuse_is_warned_of(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, days: int, warning: str | None
) -> None:
    now = datetime.now(timezone.utc) + timedelta(days=days)
    monkeypatch.setattr(module, "_now", lambda: now)
    tls(pair)
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == (warning is not None)
    assert warning is None or (warning in found[0] and "clients will refuse it" in found[0])


# Dates


def test_the_dates_of_a_certificate_are_those_that_openssl_reads(pair: Pair) -> None:
    found = validity(ssl.PEM_cert_to_DER_cert(pair.cert.read_text()))
    assert found is not None
    printed = openssl("x509", "-in", pair.cert, "-noout", "-dates").splitlines()
    for line, date in zip(printed, found, strict=True):
        text = line.split("=")[1]
        assert date == datetime.fromtimestamp(ssl.cert_time_to_seconds(text), timezone.utc)


def test_a_certificate_that_is_cut_off_anywhere_has_no_dates(pair: Pair) -> None:
    der = ssl.PEM_cert_to_DER_cert(pair.cert.read_text())
    assert validity(b"") is None
    assert {validity(der[:length]) for length in range(len(der))} == {None}


def test_a_certificate_that_openssl_reads_and_python_does_not_is_used(pair: Pair) -> None:
    """OpenSSL passes over what is no base64 at the end of a line."""
    begin, first, *others = pair.cert.read_bytes().split(b"\n")
    pair.cert.write_bytes(b"\n".join((begin, first + b"\xff", *others)))
    tls(pair)


def test_years_of_two_and_of_four_digits() -> None:
    def certificate(begins: bytes, ends: bytes) -> bytes:
        def element(tag: int, content: bytes) -> bytes:
            return bytes((tag, len(content))) + content

        dates = element(0x17, begins) + element(0x18, ends)
        fields = element(0x02, b"\x01") + element(0x30, b"") + element(0x30, b"") + element(0x30, dates)
        return element(0x30, element(0x30, fields))

    found = validity(certificate(b"500101000000Z", b"20991231235959Z"))
    assert found is not None
    assert (found[0].year, found[1].isoformat()) == (1950, "2099-12-31T23:59:59+00:00")
    assert validity(certificate(b"50010100000Z", b"2099")) is None
